#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/ip/tcp.hpp>

#include "recovery/rpc/rpc_listener.h"
#include "recovery/worker/core/readiness.h"
#include "src/async/task_group.h"

namespace rekindle::worker {

struct HealthOptions {
  std::size_t max_connections = 64;
  std::chrono::milliseconds request_deadline{5000};  // to receive a request; to send an answer
};

// An HTTP server for routers and probes: GET and HEAD of the targets of ReadyBoard::get(). A
// connection may send many requests. An idle or slow one is closed. Control thread only.
class HealthServer {
 public:
  using Answer = std::function<HealthAnswer(std::string_view target)>;

  static Result<std::unique_ptr<HealthServer>> listen(boost::asio::any_io_executor executor,
                                                      const std::string& address, Answer answer,
                                                      HealthOptions options = {});
  ~HealthServer();
  const std::string& address() const { return address_; }  // with the port in use
  async::Task<void> close(std::chrono::milliseconds deadline);

 private:
  HealthServer(boost::asio::any_io_executor executor, Answer answer, HealthOptions options);
  void accept(rpc::Socket socket);
  async::Task<void> serve(boost::asio::ip::tcp::socket socket);

  const boost::asio::any_io_executor executor_;
  const Answer answer_;
  const HealthOptions options_;
  std::string address_;
  std::shared_ptr<rpc::Listener> listener_;
  async::TaskGroup tasks_;
};

}  // namespace rekindle::worker
