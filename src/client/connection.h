#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "src/base/clock.h"
#include "src/client/call_table.h"
#include "src/ipc/channel.h"
#include "src/ipc/life.h"

namespace rekindle::client {

// A worker's connection to its agent. One thread reads, writes and sends the heartbeats. Other
// threads queue requests in the CallTable and wait in an Inbox, always with a deadline.
// Thread-safe.
class Connection {
 public:
  // Connects and says hello. kUnavailable: no agent serves that store. kDenied: another user's
  // agent serves it.
  static Result<std::shared_ptr<Connection>> open(const std::string& store, TimePoint deadline);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // As CallTable::begin().
  Result<std::uint64_t> send(const Request& request, std::uint64_t session,
                             std::chrono::milliseconds deadline, std::shared_ptr<Inbox> inbox,
                             std::vector<UniqueFd> descriptors = {});
  // Sends and waits for the answer. An answer that is an error becomes the Error.
  Result<Message> call(const Request& request, std::uint64_t session,
                       std::chrono::milliseconds timeout, std::shared_ptr<Inbox> inbox,
                       std::vector<UniqueFd> descriptors = {});
  // The agent takes a SealResidentRequest.
  bool keeps_residents() const { return keeps_residents_; }
  // The agent takes a WatchOrdersRequest.
  bool gives_orders() const { return gives_orders_; }
  void forget_session(std::uint64_t session, const std::shared_ptr<Inbox>& inbox) {
    calls_.forget_session(session, inbox);
  }

  // Ends the connection. Open calls and later calls return `why`. A second
  // call does nothing; not for two threads at once.
  void close(const Error& why);

  // False in a child after fork(). There only abandon() may be called.
  bool is_owner() const;
  // Closes the child's descriptor and does nothing else.
  void abandon();

 private:
  explicit Connection(ipc::Channel channel) : channel_(std::move(channel)) {}
  Result<void> greet(TimePoint deadline);
  Result<void> start_thread();
  void run();
  Result<void> loop();
  Result<void> send_outgoing();
  Result<void> read_frames();
  Result<void> dispatch(ipc::Frame frame);
  Result<void> keep_alive(TimePoint now);
  TimePoint next_deadline(TimePoint now) const;
  void wake();

  // The connection's thread owns these once it runs.
  ipc::Channel channel_;
  std::chrono::milliseconds ping_interval_{1000};
  std::chrono::milliseconds silence_{10000};
  TimePoint last_heard_{};
  TimePoint last_turn_{};
  TimePoint next_ping_{};

  // Set by the greeting.
  bool keeps_residents_ = false;
  bool gives_orders_ = false;

  const pid_t owner_ = ::getpid();
  CallTable calls_;
  UniqueFd wake_;
  std::unique_ptr<ipc::LifeHold> life_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace rekindle::client
