#include "recovery/rpc/http_client.h"

#include <cstring>
#include <utility>
#include <vector>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>

#include "src/async/task.h"

namespace rekindle::rpc {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {

Result<std::vector<asio::ip::tcp::endpoint>> tcp_endpoints(const std::vector<Endpoint>& found,
                                                           const HostPort& server) {
  std::vector<asio::ip::tcp::endpoint> addresses;
  for (const Endpoint& generic : found) {
    asio::ip::tcp::endpoint address;
    if (generic.size() > address.capacity()) continue;
    std::memcpy(address.data(), generic.data(), generic.size());
    address.resize(generic.size());
    addresses.push_back(address);
  }
  if (addresses.empty()) return fail(ErrorCode::kUnavailable, "{} has no address", server.host);
  return addresses;
}

Failure network_error(const char* what, const beast::error_code& error) {
  return fail(ErrorCode::kUnavailable, "{}: {}", what,
              error == beast::error::timeout ? "no answer in time" : error.message());
}

}  // namespace

HttpClient::HttpClient(HostPort server, std::size_t most_answer_bytes)
    : server_(std::move(server)), most_answer_bytes_(most_answer_bytes) {}

asio::awaitable<Result<HttpReply>> HttpClient::exchange(std::string path,
                                                        std::optional<std::string> body,
                                                        TimePoint deadline) {
  constexpr auto kToken = asio::as_tuple(asio::use_awaitable);
  if (!stream_) {
    auto found = co_await resolve(server_, deadline);
    if (!found) co_return fail(ErrorCode::kUnavailable, "{}", found.error().message());
    CO_TRY(const auto addresses, tcp_endpoints(*found, server_));
    stream_.emplace(io_.get_executor());
    stream_->expires_at(deadline);
    const auto [error, address] = co_await stream_->async_connect(addresses, kToken);
    if (error) co_return network_error("connect", error);
  }
  stream_->expires_at(deadline);
  http::request<http::string_body> request{body ? http::verb::post : http::verb::get, path, 11};
  request.set(http::field::host, server_.to_string());
  if (body) {
    request.set(http::field::content_type, "application/json");
    request.body() = std::move(*body);
    request.prepare_payload();
  }
  const auto [write_error, written] = co_await http::async_write(*stream_, request, kToken);
  if (write_error) co_return network_error("send", write_error);
  beast::flat_buffer buffer;
  http::response_parser<http::string_body> parser;
  parser.body_limit(most_answer_bytes_);
  const auto [read_error, got] = co_await http::async_read(*stream_, buffer, parser, kToken);
  if (read_error) co_return network_error("receive", read_error);
  auto response = parser.release();
  if (!response.keep_alive()) stream_.reset();
  co_return HttpReply{static_cast<int>(response.result_int()), std::move(response.body())};
}

Result<HttpReply> HttpClient::post(std::string_view path, const std::string& body,
                                   TimePoint deadline) {
  return ask(path, body, deadline);
}

Result<HttpReply> HttpClient::get(std::string_view path, TimePoint deadline) {
  return ask(path, std::nullopt, deadline);
}

Result<HttpReply> HttpClient::ask(std::string_view path, std::optional<std::string> body,
                                  TimePoint deadline) {
  Result<HttpReply> answer = fail(ErrorCode::kUnavailable, "not asked");
  const auto once = [&] {
    io_.restart();
    asio::co_spawn(io_, exchange(std::string(path), body, deadline),
                   [&](const std::exception_ptr& thrown, Result<HttpReply> result) {
                     answer = thrown ? fail(ErrorCode::kInternal, "an exception") : result;
                   });
    io_.run();
    if (!answer) stream_.reset();
  };
  const bool reused = stream_.has_value();
  once();
  // The other end may have closed a kept connection a moment ago.
  if (reused && !answer && steady_now() < deadline) once();
  return answer;
}

}  // namespace rekindle::rpc
