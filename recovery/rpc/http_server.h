#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/ip/tcp.hpp>

#include "recovery/rpc/http_access.h"
#include "recovery/rpc/rpc_listener.h"
#include "src/async/task_group.h"

namespace rekindle::rpc {

// Valid during the call.
struct HttpRequest {
  std::string_view target;
  // Of the header Host: "10.0.0.1:7380"; "" without one.
  std::string_view host;
  // By https.
  bool is_encrypted = false;
};

struct HttpAnswer {
  int status = 200;
  std::string body;
  std::string content_type = "application/json";
  // Changes with the body. A client with this body gets 304 instead. "": clients keep nothing.
  std::string etag;
  std::vector<std::pair<std::string, std::string>> headers = {};
};

struct HttpOptions {
  std::size_t max_connections = 64;
  // For a TLS handshake, to receive a request, and to send an answer.
  std::chrono::milliseconds request_deadline{5000};
  // A longer one would outlive the revocation of its certificate.
  std::chrono::milliseconds connection_life{600'000};
  HttpAccess access = {};
};

// An HTTP server for routers, probes, scrapers and browsers: GET and HEAD of what `answer` knows. A
// connection may send many requests. An idle or slow one is closed. Another host has at most a
// quarter of the connections. A new connection that finds all of them in use takes the place of the
// longest unmoved one of the host that has the most. Everybody may ask for /healthz, which tells
// that the process answers. Control thread only.
class HttpServer {
 public:
  using Answer = std::function<HttpAnswer(const HttpRequest&)>;

  // `option`: gave the address, and is named in errors.
  static Result<std::unique_ptr<HttpServer>> listen(boost::asio::any_io_executor executor,
                                                    std::string_view option,
                                                    const std::string& address, Answer answer,
                                                    HttpOptions options = {});
  ~HttpServer();
  const std::string& address() const { return address_; }  // with the port in use
  async::Task<void> close(std::chrono::milliseconds deadline);

 private:
  HttpServer(boost::asio::any_io_executor executor, Answer answer, HttpOptions options);
  struct Conversation;
  class Connection;
  void accept(Socket socket, const std::string& peer_address);
  void push_out_one();
  async::Task<void> serve(std::unique_ptr<Connection> connection);
  void note_refusal(const std::string& peer_address, const std::string& why);

  const boost::asio::any_io_executor executor_;
  const Answer answer_;
  const HttpOptions options_;
  std::string address_;
  std::shared_ptr<Listener> listener_;
  // Of those that nobody has pushed out, the longest unmoved first.
  std::list<Connection*> connections_;
  std::map<std::string, std::size_t> of_host_;
  TimePoint next_refusal_log_{};
  async::TaskGroup tasks_;
};

}  // namespace rekindle::rpc
