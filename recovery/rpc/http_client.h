#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/beast/core/tcp_stream.hpp>

#include "recovery/rpc/address.h"
#include "src/base/clock.h"
#include "src/base/result.h"

namespace rekindle::rpc {

struct HttpReply {
  int status = 0;
  std::string body;
};

// Sends requests to one server over HTTP/1.1, and keeps the connection. Blocks, at most until the
// deadline of a call. One thread.
class HttpClient {
 public:
  explicit HttpClient(HostPort server, std::size_t most_answer_bytes = kMostAnswerBytes);

  // kUnavailable: no answer came; the message says why. A post may reach the server twice when a
  // kept connection breaks.
  Result<HttpReply> post(std::string_view path, const std::string& body, TimePoint deadline);
  Result<HttpReply> get(std::string_view path, TimePoint deadline);
  // From any thread: ends the call that runs. The client makes no call afterwards.
  void interrupt() { io_.stop(); }
  const HostPort& server() const { return server_; }

 private:
  static constexpr std::size_t kMostAnswerBytes = 1u << 20;

  // Without a body: a GET.
  boost::asio::awaitable<Result<HttpReply>> exchange(std::string path,
                                                     std::optional<std::string> body,
                                                     TimePoint deadline);
  Result<HttpReply> ask(std::string_view path, std::optional<std::string> body, TimePoint deadline);

  const HostPort server_;
  const std::size_t most_answer_bytes_;
  boost::asio::io_context io_{1};
  std::optional<boost::beast::tcp_stream> stream_;
};

}  // namespace rekindle::rpc
