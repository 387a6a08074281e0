#pragma once

#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <utility>

#include "recovery/device/process/device_sessions.h"
#include "tests/device/bucket_worker.h"
#include "tests/ipc/socket_pair.h"

namespace rekindle::device::testing {

// A session on its own thread, and the worker at the other end of its socket.
struct StartedSession {
  std::future<SessionEnd> end;
  std::unique_ptr<BucketWorker> worker;
  std::future<void> taken;
  // Ends first: the worker may be waiting for it.
  std::unique_ptr<Session> session;

  // `order` lacks only the socket.
  void start(SessionOrder order) {
    auto [ours, workers] = ipc::testing::socket_pair();
    order.socket = std::move(ours);
    auto promise = std::make_shared<std::promise<SessionEnd>>();
    end = promise->get_future();
    worker = std::make_unique<BucketWorker>(std::move(workers));
    session = *Session::start(std::move(order),
                              [promise](SessionEnd over) { promise->set_value(std::move(over)); });
  }
  void take_all() {
    taken = std::async(std::launch::async, [this] {
      worker->take_all();
      worker->close();
    });
  }
  SessionEnd wait() {
    if (end.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
      throw std::runtime_error("the session goes on");
    }
    return end.get();
  }
};

}  // namespace rekindle::device::testing
