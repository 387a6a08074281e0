#include "recovery/coordinator/etcd/gateway.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <openssl/evp.h>

#include "recovery/rpc/address.h"

namespace rekindle::coordinator::etcd {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {

constexpr std::string_view kScheme = "http://";
constexpr std::size_t kMaxAnswerBytes = 8u << 20;  // etcd's own limit for a request is 1.5 MiB

Result<std::vector<asio::ip::tcp::endpoint>> addresses_of(const rpc::HostPort& member) {
  TRY(const auto found, rpc::resolve_blocking(member));
  std::vector<asio::ip::tcp::endpoint> addresses;
  for (const rpc::Endpoint& generic : found) {
    asio::ip::tcp::endpoint& address = addresses.emplace_back();
    if (generic.size() > address.capacity()) {
      addresses.pop_back();
      continue;
    }
    std::memcpy(address.data(), generic.data(), generic.size());
    address.resize(generic.size());
  }
  if (addresses.empty()) return fail(ErrorCode::kNotFound, "{} has no address", member.host);
  return addresses;
}

Failure network_error(const char* what, const beast::error_code& error) {
  return fail(ErrorCode::kUnavailable, "{}: {}", what,
              error == beast::error::timeout ? "no answer in time" : error.message());
}

}  // namespace

Result<std::vector<rpc::HostPort>> parse_endpoints(std::string_view urls) {
  std::vector<rpc::HostPort> endpoints;
  while (true) {
    const std::size_t comma = urls.find(',');
    std::string_view url = urls.substr(0, comma);
    if (url.starts_with("https://")) {
      return fail(ErrorCode::kInvalid, "{}: etcd over TLS is not supported yet; use http://", url);
    }
    if (url.starts_with(kScheme)) url.remove_prefix(kScheme.size());
    if (url.ends_with('/')) url.remove_suffix(1);
    TRY(auto endpoint, rpc::HostPort::parse(url));
    endpoints.push_back(std::move(endpoint));
    if (comma == std::string_view::npos) return endpoints;
    urls.remove_prefix(comma + 1);
  }
}

std::string to_base64(std::string_view bytes) {
  std::string text((bytes.size() + 2) / 3 * 4 + 1, '\0');  // EVP_EncodeBlock ends it with a 0.
  const int size = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data()),
                                   reinterpret_cast<const unsigned char*>(bytes.data()),
                                   static_cast<int>(bytes.size()));
  text.resize(static_cast<std::size_t>(size));
  return text;
}

Result<std::string> from_base64(std::string_view text) {
  std::string bytes(text.size() / 4 * 3, '\0');
  const bool fits = text.size() % 4 == 0 && text.size() < std::numeric_limits<int>::max();
  if (!fits || EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                               reinterpret_cast<const unsigned char*>(text.data()),
                               static_cast<int>(text.size())) < 0) {
    return fail(ErrorCode::kCorrupt, "etcd answered with something that is not base64");
  }
  const auto padding =
      std::count(text.end() - std::min<std::ptrdiff_t>(2, std::ssize(text)), text.end(), '=');
  bytes.resize(bytes.size() - static_cast<std::size_t>(padding));
  return bytes;
}

std::int64_t number_in(const nlohmann::json& object, const char* field) {
  const auto found = object.find(field);
  if (found == object.end()) return 0;
  if (found->is_number_integer()) return found->get<std::int64_t>();
  if (!found->is_string()) return 0;
  const auto& text = found->get_ref<const std::string&>();
  std::int64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

Gateway::Gateway(std::vector<rpc::HostPort> endpoints) : endpoints_(std::move(endpoints)) {}

asio::awaitable<Result<std::string>> Gateway::exchange(rpc::HostPort member, std::string path,
                                                       std::string body,
                                                       Clock::time_point deadline) {
  constexpr auto kToken = asio::as_tuple(asio::use_awaitable);
  if (!stream_) {
    CO_TRY(const auto addresses, addresses_of(member));
    stream_.emplace(io_.get_executor());
    stream_->expires_at(deadline);
    const auto [error, address] = co_await stream_->async_connect(addresses, kToken);
    if (error) co_return network_error("connect", error);
  }
  stream_->expires_at(deadline);
  http::request<http::string_body> request{http::verb::post, path, 11};
  request.set(http::field::host, member.to_string());
  request.set(http::field::content_type, "application/json");
  request.body() = std::move(body);
  request.prepare_payload();
  const auto [write_error, written] = co_await http::async_write(*stream_, request, kToken);
  if (write_error) co_return network_error("send", write_error);
  beast::flat_buffer buffer;
  http::response_parser<http::string_body> parser;
  parser.body_limit(kMaxAnswerBytes);
  const auto [read_error, got] = co_await http::async_read(*stream_, buffer, parser, kToken);
  if (read_error) co_return network_error("receive", read_error);
  auto response = parser.release();
  if (!response.keep_alive()) stream_.reset();
  // 5xx: this member fails, another may not. 4xx: the call itself is wrong.
  if (response.result_int() >= 500) {
    co_return fail(ErrorCode::kUnavailable, "HTTP {}: {}", response.result_int(), response.body());
  }
  if (response.result_int() >= 400) {
    co_return fail(ErrorCode::kInvalid, "HTTP {}: {}", response.result_int(), response.body());
  }
  co_return std::move(response.body());
}

Result<nlohmann::json> Gateway::ask(const rpc::HostPort& member, std::string_view path,
                                    const std::string& body, Clock::time_point deadline) {
  Result<std::string> answer = fail(ErrorCode::kUnavailable, "not asked");
  const auto once = [&] {
    io_.restart();
    asio::co_spawn(io_, exchange(member, std::string(path), body, deadline),
                   [&](const std::exception_ptr& thrown, Result<std::string> result) {
                     answer = thrown ? fail(ErrorCode::kInternal, "an exception") : result;
                   });
    io_.run();
    if (!answer && answer.error().code() == ErrorCode::kUnavailable) stream_.reset();
  };
  const bool reused = stream_.has_value();
  once();
  // The other end may have closed a kept connection a moment ago.
  if (reused && !stream_ && !answer && Clock::now() < deadline) once();
  if (!answer) return fail(std::move(answer).error());
  auto parsed = nlohmann::json::parse(*answer, nullptr, false);
  if (!parsed.is_object()) {
    return fail(ErrorCode::kUnavailable, "it does not speak etcd's JSON: {:.80}", *answer);
  }
  return parsed;
}

Result<nlohmann::json> Gateway::call(std::string_view path, const nlohmann::json& body,
                                     std::chrono::milliseconds deadline) {
  const auto give_up = Clock::now() + deadline;
  const std::string text = body.dump();
  std::string causes;
  for (std::size_t asked = 0; asked < endpoints_.size(); ++asked) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(give_up - Clock::now());
    const auto share = left / static_cast<std::int64_t>(endpoints_.size() - asked);
    const rpc::HostPort& member = endpoints_[current_];
    auto answer = ask(member, path, text, Clock::now() + share);
    if (answer) return answer;
    if (answer.error().code() == ErrorCode::kInvalid) {
      return fail(std::move(answer).error().with_context("etcd refuses " + std::string(path)));
    }
    causes += fmt::format("{}{}: {}", causes.empty() ? "" : "; ", member.to_string(),
                          answer.error().message());
    stream_.reset();
    current_ = (current_ + 1) % endpoints_.size();
  }
  return fail(ErrorCode::kUnavailable, "etcd does not answer ({})", causes);
}

}  // namespace rekindle::coordinator::etcd
