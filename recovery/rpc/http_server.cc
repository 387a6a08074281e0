#include "recovery/rpc/http_server.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <sys/socket.h>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/tcp_stream.hpp>
#include <boost/beast/http.hpp>
#include <nlohmann/json.hpp>

#include "recovery/rpc/credentials.h"
#include "recovery/rpc/peer_budgets.h"
#include "recovery/rpc/tls.h"
#include "src/base/log.h"

namespace rekindle::rpc {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {

constexpr std::size_t kMaxHeaderBytes = 8192;
constexpr std::size_t kMaxRequestBytes = 16384;  // buffered; requests have no body
constexpr int kRequestsPerConnection = 10'000;
constexpr std::size_t kFirstBytes = 4096;
constexpr std::chrono::milliseconds kHttpRefusalLogInterval{100};

// Headers of requests may hold a token.
using Allocator = crypto::SecretAllocator<char>;
using Buffer = beast::basic_flat_buffer<Allocator>;
using RequestParser = http::request_parser<http::empty_body, Allocator>;
using Request = RequestParser::value_type;
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

// One connection in the order of the last moves, and in the count of its host.
class HttpServer::Connection {
 public:
  Connection(HttpServer& server, asio::ip::tcp::socket socket, std::string peer)
      : stream(std::move(socket)),
        peer_address(std::move(peer)),
        host(host_of_address(peer_address)),
        server_(server),
        place_(server.connections_.insert(server.connections_.end(), this)) {
    ++server_.of_host_[host];
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() { leave(); }

  // Its client has sent or taken something whole.
  void moved() {
    if (counts_)
      server_.connections_.splice(server_.connections_.end(), server_.connections_, place_);
  }
  // Its operation ends with an error soon.
  void push_out() {
    leave();
    stream.close();
  }

  beast::tcp_stream stream;
  const std::string peer_address;
  const std::string host;

 private:
  void leave() {
    if (!std::exchange(counts_, false)) return;
    server_.connections_.erase(place_);
    if (--server_.of_host_[host] == 0) server_.of_host_.erase(host);
  }

  HttpServer& server_;
  std::list<Connection*>::iterator place_;
  bool counts_ = true;
};

Result<std::unique_ptr<HttpServer>> HttpServer::listen(asio::any_io_executor executor,
                                                       std::string_view option,
                                                       const std::string& address, Answer answer,
                                                       HttpOptions options) {
  std::unique_ptr<HttpServer> server(
      new HttpServer(std::move(executor), std::move(answer), std::move(options)));
  auto fd = listen_tcp(address, server->address_);
  if (!fd) return fail(std::move(fd).error().with_context(option));
  server->listener_ = std::make_shared<Listener>(
      server->executor_, std::move(*fd), "",
      [raw = server.get()](Socket socket, const std::string& peer_address) {
        raw->accept(std::move(socket), peer_address);
      },
      [] {});
  server->listener_->start();
  return server;
}

HttpServer::HttpServer(asio::any_io_executor executor, Answer answer, HttpOptions options)
    : executor_(std::move(executor)),
      answer_(std::move(answer)),
      options_(std::move(options)),
      tasks_(executor_) {}

HttpServer::~HttpServer() {
  if (listener_ != nullptr) listener_->close();
}

async::Task<void> HttpServer::close(std::chrono::milliseconds deadline) {
  listener_->close();
  (void)co_await tasks_.close(deadline);
}

void HttpServer::accept(Socket socket, const std::string& peer_address) {
  boost::system::error_code error;
  const auto local = socket.local_endpoint(error);
  if (error) return;
  const std::string host = host_of_address(peer_address);
  const bool is_local = host.starts_with("127.") || host == "::1";
  const auto found = of_host_.find(host);
  // Whoever is not accepted is closed at once.
  if (!is_local && found != of_host_.end() && found->second >= options_.max_connections / 4) return;
  if (connections_.size() >= options_.max_connections) push_out_one();
  asio::ip::tcp::socket tcp(executor_);
  const auto protocol =
      local.protocol().family() == AF_INET6 ? asio::ip::tcp::v6() : asio::ip::tcp::v4();
  const int fd = socket.release(error);
  if (error) return;
  tcp.assign(protocol, fd, error);
  if (error) {
    ::close(fd);
    return;
  }
  tasks_.spawn("http", serve(std::make_unique<Connection>(*this, std::move(tcp), peer_address)));
}

void HttpServer::push_out_one() {
  const auto fewer = [](const auto& a, const auto& b) { return a.second < b.second; };
  const std::string& host = std::ranges::max_element(of_host_, fewer)->first;
  const auto last = std::ranges::find(connections_, host, &Connection::host);
  if (last != connections_.end()) (*last)->push_out();
}

void HttpServer::note_refusal(const std::string& peer_address, const std::string& why) {
  const TimePoint now = steady_now();
  if (now < next_refusal_log_) return;
  next_refusal_log_ = now + kHttpRefusalLogInterval;
  log::warn("http.refused", "peer", peer_address, "why", why);
}

// One connection, and what its client has proven.
struct HttpServer::Conversation {
  HttpServer& server;
  Connection& connection;
  Buffer& buffer;
  // nullptr: without TLS.
  std::unique_ptr<TlsSession> session = {};
  bool is_encrypted = false;
  // Of its certificate. Empty: it has given none that is valid.
  std::vector<std::string> principals = {};
  std::string no_certificate = {};

  std::vector<std::string> names_for(const Request& request) const {
    if (!principals.empty()) return principals;
    constexpr std::string_view kBearer = "Bearer ";
    const std::string_view field = field_of(request, http::field::authorization);
    const auto& tokens = server.options_.access.tokens;
    if (tokens == nullptr || !field.starts_with(kBearer)) return {};
    const auto name = tokens->principal_of(field.substr(kBearer.size()));
    return name ? std::vector<std::string>{*name} : std::vector<std::string>();
  }

  // Nothing: the client may read.
  std::optional<HttpAnswer> refuse(const Request& request) const {
    const HttpAccess& access = server.options_.access;
    if (access.is_open) return std::nullopt;
    const auto refusal = [this](int status, const std::string& why) {
      server.note_refusal(connection.peer_address, why);
      const auto replace = nlohmann::json::error_handler_t::replace;
      return HttpAnswer{status,
                        nlohmann::json{{"error", why}}.dump(-1, ' ', false, replace) + "\n"};
    };
    if (!is_encrypted) return refusal(403, "this server tells nothing by http; ask by https");
    const auto names = names_for(request);
    if (names.empty()) {
      auto answer = refusal(401, no_certificate + "; or send a token of --http-token-file");
      answer.headers = {{"WWW-Authenticate", "Bearer"}};
      return answer;
    }
    if (!access.allow) return std::nullopt;
    const auto allowed = access.allow(names);
    if (allowed) return std::nullopt;
    return refusal(403, allowed.error().message());
  }

  HttpAnswer answer(const Request& request) const {
    if (request.method() != http::verb::get && request.method() != http::verb::head) {
      return {405, "{\"error\":\"GET or HEAD\"}\n"};
    }
    const auto target = request.target();
    const HttpRequest asked{
        {target.data(), target.size()}, field_of(request, http::field::host), is_encrypted};
    if (asked.target == "/healthz") return {200, "ok\n", "text/plain"};
    if (auto refusal = refuse(request)) return *std::move(refusal);
    return server.answer_(asked);
  }

  // The certificate of the client may have ended, or been revoked, since the handshake.
  bool is_still_proven() {
    if (principals.empty()) return true;
    const auto proven = session->check_again(server.options_.access.credentials->context());
    if (!proven) server.note_refusal(connection.peer_address, proven.error().message());
    return proven.has_value();
  }

  template <typename Stream>
  async::Task<void> run(Stream& stream) {
    boost::system::error_code error;
    const TimePoint ends = steady_now() + server.options_.connection_life;
    const auto stopped = [&error] { return asio::redirect_error(asio::use_awaitable, error); };
    for (int i = 0; i < kRequestsPerConnection; ++i) {
      RequestParser parser;
      parser.header_limit(kMaxHeaderBytes);
      // The time of the first request runs since the connection was accepted.
      if (i > 0) connection.stream.expires_after(server.options_.request_deadline);
      co_await http::async_read(stream, buffer, parser, stopped());
      if (error || !is_still_proven()) co_return;
      connection.moved();
      const Request& request = parser.get();
      Response response = make_response(request, answer(request));
      http::response_serializer<http::string_body> serializer(response);
      serializer.split(request.method() == http::verb::head);
      connection.stream.expires_after(server.options_.request_deadline);
      if (request.method() == http::verb::head) {
        co_await http::async_write_header(stream, serializer, stopped());
      } else {
        co_await http::async_write(stream, serializer, stopped());
      }
      connection.moved();
      if (error || !request.keep_alive() || steady_now() >= ends) co_return;
    }
  }

  async::Task<void> run_tls() {
    auto created =
        TlsSession::create(server.options_.access.credentials->context(), Side::kServer, "");
    if (!created) {
      server.note_refusal(connection.peer_address, created.error().message());
      co_return;
    }
    session = std::move(*created);
    asio::ssl::stream<beast::tcp_stream&> stream(connection.stream, session->share());
    boost::system::error_code error;
    co_await stream.async_handshake(asio::ssl::stream_base::server, buffer.cdata(),
                                    asio::redirect_error(asio::use_awaitable, error));
    if (error) {
      server.note_refusal(connection.peer_address, "TLS handshake: " + error.message());
      co_return;
    }
    buffer.consume(buffer.size());
    is_encrypted = true;
    Peer peer;
    if (const auto proven = session->prove(peer); !proven) {
      no_certificate = proven.error().message();
    } else {
      principals = std::move(peer.principals);
      no_certificate = "the certificate names nobody";
    }
    auto running = run(stream);
    co_await std::move(running);
  }
};

async::Task<void> HttpServer::serve(std::unique_ptr<Connection> connection) {
  beast::tcp_stream& stream = connection->stream;
  Buffer buffer(kMaxRequestBytes);
  stream.expires_after(options_.request_deadline);
  boost::system::error_code error;
  const std::size_t size = co_await stream.async_read_some(
      buffer.prepare(kFirstBytes), asio::redirect_error(asio::use_awaitable, error));
  if (error) co_return;
  buffer.commit(size);
  Conversation conversation{*this, *connection, buffer};
  const bool is_tls = *static_cast<const char*>(buffer.cdata().data()) == kTlsFirstByte;
  auto running = is_tls && options_.access.credentials != nullptr ? conversation.run_tls()
                                                                  : conversation.run(stream);
  co_await std::move(running);
  stream.socket().shutdown(asio::ip::tcp::socket::shutdown_both, error);
}

}  // namespace rekindle::rpc
