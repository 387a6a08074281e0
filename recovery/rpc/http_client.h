#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>

#include "recovery/rpc/address.h"
#include "src/base/clock.h"
#include "src/base/result.h"

namespace rekindle::rpc {

struct HttpReply {
  int status = 0;
  std::string body;
};

// The PEM files of a client of HTTPS. They are read for each new connection, so that renewed ones
// are used.
struct HttpTlsFiles {
  // Authorities of the server. "": those that the system trusts.
  std::string authorities;
  // The client's own certificate chain and key, which may lie in one file. "": none.
  std::string certificate, key;
};
// kInvalid names the file that is wrong.
Result<void> check_tls_files(const HttpTlsFiles& files);

// Sends requests to one server over HTTP/1.1, and keeps the connection. Blocks, at most until the
// deadline of a call. One thread.
class HttpClient {
 public:
  // With `tls`, the server needs a certificate of its host name.
  explicit HttpClient(HostPort server, std::size_t most_answer_bytes = kMostAnswerBytes,
                      std::optional<HttpTlsFiles> tls = std::nullopt);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  // kUnavailable: no answer came; the message says why. A post may reach the server twice when a
  // kept connection breaks.
  // `authorization`: the value of the header; "" for none. The client keeps no copy
  // of the body.
  Result<HttpReply> post(std::string_view path, std::string_view body, TimePoint deadline,
                         std::string_view authorization = "");
  Result<HttpReply> get(std::string_view path, TimePoint deadline,
                        std::string_view authorization = "");
  // From any thread: ends the call that runs. The client makes no call afterwards.
  void interrupt() { io_.stop(); }
  const HostPort& server() const { return server_; }

 private:
  static constexpr std::size_t kMostAnswerBytes = 1u << 20;

  struct Request {
    std::string_view path;
    // Without one: a GET.
    std::optional<std::string_view> body;
    std::string_view authorization;
  };
  class Connection;
  boost::asio::awaitable<Result<HttpReply>> exchange(Request request, TimePoint deadline);
  Result<HttpReply> ask(Request request, TimePoint deadline);

  const HostPort server_;
  const std::size_t most_answer_bytes_;
  const std::optional<HttpTlsFiles> tls_;
  boost::asio::io_context io_{1};
  std::unique_ptr<Connection> connection_;
};

}  // namespace rekindle::rpc
