#include "recovery/rpc/http_server.h"

#include <utility>

#include <sys/socket.h>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>

namespace rekindle::rpc {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {

constexpr std::size_t kMaxHeaderBytes = 8192;
constexpr std::size_t kMaxRequestBytes = 16384;  // buffered; requests have no body
constexpr int kRequestsPerConnection = 10'000;

using Request = http::request<http::empty_body>;
using Response = http::response<http::string_body>;

std::string_view field_of(const Request& request, http::field field) {
  const auto found = request.find(field);
  if (found == request.end()) return {};
  return {found->value().data(), found->value().size()};
}

// Whether the client has this body. It names those that it has in quotes.
bool has_already(const Request& request, const std::string& etag) {
  return field_of(request, http::field::if_none_match).find('"' + etag + '"') !=
         std::string_view::npos;
}

Response make_response(const Request& request, HttpAnswer answer) {
  const bool same = !answer.etag.empty() && has_already(request, answer.etag);
  const auto status = same ? http::status::not_modified : static_cast<http::status>(answer.status);
  Response response{status, request.version()};
  response.set(http::field::cache_control, answer.etag.empty() ? "no-store" : "no-cache");
  if (!answer.etag.empty()) response.set(http::field::etag, '"' + answer.etag + '"');
  for (const auto& [name, value] : answer.headers) response.set(name, value);
  response.keep_alive(request.keep_alive());
  if (same) return response;
  response.set(http::field::content_type, answer.content_type);
  if (request.method() == http::verb::head) {
    response.content_length(answer.body.size());
  } else {
    response.body() = std::move(answer.body);
    response.prepare_payload();
  }
  return response;
}

}  // namespace

Result<std::unique_ptr<HttpServer>> HttpServer::listen(asio::any_io_executor executor,
                                                       std::string_view option,
                                                       const std::string& address, Answer answer,
                                                       HttpOptions options) {
  std::unique_ptr<HttpServer> server(
      new HttpServer(std::move(executor), std::move(answer), options));
  auto fd = listen_tcp(address, server->address_);
  if (!fd) return fail(std::move(fd).error().with_context(option));
  server->listener_ = std::make_shared<Listener>(
      server->executor_, std::move(*fd), "",
      [raw = server.get()](Socket socket, const std::string&) { raw->accept(std::move(socket)); },
      [] {});
  server->listener_->start();
  return server;
}

HttpServer::HttpServer(asio::any_io_executor executor, Answer answer, HttpOptions options)
    : executor_(std::move(executor)),
      answer_(std::move(answer)),
      options_(options),
      tasks_(executor_) {}

HttpServer::~HttpServer() {
  if (listener_ != nullptr) listener_->close();
}

async::Task<void> HttpServer::close(std::chrono::milliseconds deadline) {
  listener_->close();
  (void)co_await tasks_.close(deadline);
}

void HttpServer::accept(Socket socket) {
  if (tasks_.size() >= options_.max_connections) return;  // the connection closes at once
  boost::system::error_code error;
  const auto family = socket.local_endpoint(error).protocol().family();
  if (error) return;
  asio::ip::tcp::socket tcp(executor_);
  const auto protocol = family == AF_INET6 ? asio::ip::tcp::v6() : asio::ip::tcp::v4();
  const int fd = socket.release(error);
  if (error) return;
  tcp.assign(protocol, fd, error);
  if (error) {
    ::close(fd);
    return;
  }
  tasks_.spawn("http", serve(std::move(tcp)));
}

async::Task<void> HttpServer::serve(asio::ip::tcp::socket socket) {
  beast::tcp_stream stream(std::move(socket));
  beast::flat_buffer buffer(kMaxRequestBytes);
  boost::system::error_code error;
  for (int i = 0; i < kRequestsPerConnection; ++i) {
    http::request_parser<http::empty_body> parser;
    parser.header_limit(kMaxHeaderBytes);
    stream.expires_after(options_.request_deadline);
    co_await http::async_read(stream, buffer, parser,
                              asio::redirect_error(asio::use_awaitable, error));
    if (error) break;
    const Request& request = parser.get();
    const bool known = request.method() == http::verb::get || request.method() == http::verb::head;
    const auto target = request.target();
    const HttpRequest asked{{target.data(), target.size()}, field_of(request, http::field::host)};
    Response response = make_response(
        request, known ? answer_(asked) : HttpAnswer{405, "{\"error\":\"GET or HEAD\"}\n"});
    http::response_serializer<http::string_body> serializer(response);
    serializer.split(request.method() == http::verb::head);
    stream.expires_after(options_.request_deadline);
    if (request.method() == http::verb::head) {
      co_await http::async_write_header(stream, serializer,
                                        asio::redirect_error(asio::use_awaitable, error));
    } else {
      co_await http::async_write(stream, serializer,
                                 asio::redirect_error(asio::use_awaitable, error));
    }
    if (error || !request.keep_alive()) break;
  }
  stream.socket().shutdown(asio::ip::tcp::socket::shutdown_both, error);
}

}  // namespace rekindle::rpc
