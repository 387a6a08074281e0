#include "recovery/rpc/http_client.h"

#include <cstring>
#include <utility>
#include <vector>

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include "recovery/rpc/credentials.h"
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

// `file` is wrong for `what`.
Failure tls_file_error(const char* what, const std::string& file, const beast::error_code& error) {
  return fail(ErrorCode::kInvalid, "{} {}: {}", what, file, error.message());
}

Result<std::unique_ptr<asio::ssl::context>> client_context(const HttpTlsFiles& files) {
  auto context = std::make_unique<asio::ssl::context>(asio::ssl::context::tls_client);
  beast::error_code error;
  SSL_CTX_set_min_proto_version(context->native_handle(), TLS1_2_VERSION);
  context->set_verify_mode(asio::ssl::verify_peer, error);
  if (files.authorities.empty()) {
    context->set_default_verify_paths(error);
  } else {
    context->load_verify_file(files.authorities, error);
  }
  if (error) return tls_file_error("authorities in", files.authorities, error);
  if (!files.certificate.empty()) {
    // Both may lie in one file.
    TRY(const auto chain, read_undumped(files.certificate));
    context->use_certificate_chain(asio::buffer(chain), error);
    if (error) return tls_file_error("certificate in", files.certificate, error);
    TRY(const auto key, read_undumped(files.key));
    context->use_private_key(asio::buffer(key), asio::ssl::context::pem, error);
    if (error) return tls_file_error("key in", files.key, error);
  }
  return context;
}

bool is_address(const std::string& host) {
  beast::error_code error;
  asio::ip::make_address(host, error);
  return !error;
}

}  // namespace

Result<void> check_tls_files(const HttpTlsFiles& files) {
  TRY_VOID(client_context(files));
  return {};
}

// Plain TCP, or TLS over it.
class HttpClient::Connection {
 public:
  explicit Connection(asio::io_context& io) : tcp_(io.get_executor()) {}
  beast::tcp_stream& tcp() { return tls_ ? tls_->next_layer() : tcp_; }

  // After the connection of tcp().
  asio::awaitable<Result<void>> begin_tls(HttpTlsFiles files, std::string host) {
    CO_TRY(context_, client_context(files));
    tls_.emplace(std::move(tcp_), *context_);
    SSL* const ssl = tls_->native_handle();
    X509_VERIFY_PARAM* const wanted = SSL_get0_param(ssl);
    X509_VERIFY_PARAM_set_hostflags(wanted, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    const bool named = is_address(host)
                           ? X509_VERIFY_PARAM_set1_ip_asc(wanted, host.c_str()) == 1
                           : SSL_set_tlsext_host_name(ssl, host.c_str()) == 1 &&
                                 X509_VERIFY_PARAM_set1_host(wanted, host.c_str(), 0) == 1;
    if (!named) co_return fail(ErrorCode::kInvalid, "{} is no name of a TLS server", host);
    const auto [error] = co_await tls_->async_handshake(asio::ssl::stream_base::client,
                                                        asio::as_tuple(asio::use_awaitable));
    if (!error) co_return Result<void>();
    const long why = SSL_get_verify_result(ssl);
    if (why == X509_V_OK) co_return network_error("TLS", error);
    co_return fail(ErrorCode::kUnavailable, "TLS: the server's certificate: {}",
                   X509_verify_cert_error_string(why));
  }

  // Each returns what Beast does.
  template <typename Serializer>
  auto write_header(Serializer& serializer) {
    return on_stream([&](auto& stream) {
      return http::async_write_header(stream, serializer, asio::as_tuple(asio::use_awaitable));
    });
  }
  template <typename Serializer>
  auto write(Serializer& serializer) {
    return on_stream([&](auto& stream) {
      return http::async_write(stream, serializer, asio::as_tuple(asio::use_awaitable));
    });
  }
  template <typename Parser>
  auto read(beast::flat_buffer& buffer, Parser& parser) {
    return on_stream([&](auto& stream) {
      return http::async_read(stream, buffer, parser, asio::as_tuple(asio::use_awaitable));
    });
  }

 private:
  template <typename Use>
  auto on_stream(Use use) {
    return tls_ ? use(*tls_) : use(tcp_);
  }

  beast::tcp_stream tcp_;
  std::unique_ptr<asio::ssl::context> context_;
  std::optional<asio::ssl::stream<beast::tcp_stream>> tls_;
};

HttpClient::HttpClient(HostPort server, std::size_t most_answer_bytes,
                       std::optional<HttpTlsFiles> tls)
    : server_(std::move(server)), most_answer_bytes_(most_answer_bytes), tls_(std::move(tls)) {}

HttpClient::~HttpClient() = default;

asio::awaitable<Result<HttpReply>> HttpClient::exchange(Request what, TimePoint deadline) {
  if (!connection_) {
    auto found = co_await resolve(server_, deadline);
    if (!found) co_return fail(ErrorCode::kUnavailable, "{}", found.error().message());
    CO_TRY(const auto addresses, tcp_endpoints(*found, server_));
    connection_ = std::make_unique<Connection>(io_);
    connection_->tcp().expires_at(deadline);
    const auto [error, address] =
        co_await connection_->tcp().async_connect(addresses, asio::as_tuple(asio::use_awaitable));
    if (error) co_return network_error("connect", error);
    // Header and body are two writes, and the second one must not wait for an answer to the first.
    beast::error_code ignored;
    connection_->tcp().socket().set_option(asio::ip::tcp::no_delay(true), ignored);
    if (tls_) {
      auto begin = connection_->begin_tls(*tls_, server_.host);
      auto begun = co_await std::move(begin);
      if (!begun) co_return fail(std::move(begun).error());
    }
  }
  connection_->tcp().expires_at(deadline);
  http::request<http::span_body<const char>> request{what.body ? http::verb::post : http::verb::get,
                                                     what.path, 11};
  request.set(http::field::host, server_.to_string());
  if (!what.authorization.empty()) request.set(http::field::authorization, what.authorization);
  if (what.body) {
    request.set(http::field::content_type, "application/json");
    request.body() = {what.body->data(), what.body->size()};
    request.prepare_payload();
  }
  // The body is a write by itself: for several buffers, Asio copies them to its stack, where a
  // password of the body would stay.
  http::request_serializer<http::span_body<const char>> serializer(request);
  serializer.split(true);
  const auto [header_error, header] = co_await connection_->write_header(serializer);
  if (header_error) co_return network_error("send", header_error);
  if (!serializer.is_done()) {
    const auto [body_error, body] = co_await connection_->write(serializer);
    if (body_error) co_return network_error("send", body_error);
  }
  beast::flat_buffer buffer;
  http::response_parser<http::string_body> parser;
  parser.body_limit(most_answer_bytes_);
  const auto [read_error, got] = co_await connection_->read(buffer, parser);
  if (read_error) co_return network_error("receive", read_error);
  auto response = parser.release();
  if (!response.keep_alive()) connection_.reset();
  co_return HttpReply{static_cast<int>(response.result_int()), std::move(response.body())};
}

Result<HttpReply> HttpClient::post(std::string_view path, std::string_view body, TimePoint deadline,
                                   std::string_view authorization) {
  return ask({path, body, authorization}, deadline);
}

Result<HttpReply> HttpClient::get(std::string_view path, TimePoint deadline,
                                  std::string_view authorization) {
  return ask({path, std::nullopt, authorization}, deadline);
}

Result<HttpReply> HttpClient::ask(Request request, TimePoint deadline) {
  Result<HttpReply> answer = fail(ErrorCode::kUnavailable, "not asked");
  const auto once = [&] {
    io_.restart();
    asio::co_spawn(io_, exchange(request, deadline),
                   [&](const std::exception_ptr& thrown, Result<HttpReply> result) {
                     answer = thrown ? fail(ErrorCode::kInternal, "an exception") : result;
                   });
    io_.run();
    if (!answer) connection_.reset();
  };
  const bool reused = connection_ != nullptr;
  once();
  // The other end may have closed a kept connection a moment ago.
  if (reused && !answer && steady_now() < deadline) once();
  return answer;
}

}  // namespace rekindle::rpc
