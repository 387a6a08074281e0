#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "src/base/clock.h"
#include "src/client/inbox.h"
#include "src/ipc/channel.h"
#include "src/ipc/life.h"

namespace rekindle::client {

// A worker's connection to its agent. One thread reads, writes and keeps the heartbeat; every other
// thread leaves frames with it and waits in an Inbox, always with a deadline. When the connection
// is lost, all inboxes are closed with the reason. Thread-safe.
class Connection {
 public:
  // The hello included. kUnavailable: no agent serves that store; kDenied: another user's does.
  static Result<std::shared_ptr<Connection>> open(const std::string& store, TimePoint deadline);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Returns the call's number; the answer goes to `inbox`, which also gets the events of a session
  // that the answer begins. Without an inbox the answer is dropped.
  Result<std::uint64_t> send(const Request& request, std::uint64_t session,
                             std::chrono::milliseconds deadline, std::shared_ptr<Inbox> inbox);
  // send() and wait for the answer; an answer that is an error becomes the Error.
  Result<Message> call(const Request& request, std::uint64_t session,
                       std::chrono::milliseconds timeout, std::shared_ptr<Inbox> inbox);
  // Answers and events of that session are dropped from now on.
  void forget_session(std::uint64_t session, const std::shared_ptr<Inbox>& inbox);

  // Ends the connection; `why` is what calls that are open, or come later, return. Once.
  void close(const Error& why);

  // False in a child after fork(): there only abandon() may be called.
  bool is_owner() const;
  void abandon();  // closes the child's descriptor and nothing else

 private:
  explicit Connection(ipc::Channel channel) : channel_(std::move(channel)) {}
  Result<void> greet(TimePoint deadline);
  Result<void> begin();
  void run();
  Result<void> loop();
  Result<void> send_outgoing();
  Result<void> read_frames();
  Result<void> dispatch(ipc::Frame frame);
  void deliver(Message message);
  void undo_late(const AgentMessage& message);
  Result<void> keep_alive(TimePoint now);
  TimePoint next_deadline(TimePoint now) const;
  Result<std::uint64_t> queue(const Request& request, std::uint64_t session,
                              std::chrono::milliseconds deadline,
                              const std::shared_ptr<Inbox>& inbox);
  void wake();
  void fail_all(const Error& why);
  std::optional<Message> forget_call(std::uint64_t call, Inbox& inbox);

  // Of the connection's thread, after begin().
  ipc::Channel channel_;
  std::chrono::milliseconds ping_interval_{1000};
  std::chrono::milliseconds silence_{10000};
  TimePoint last_heard_{};
  TimePoint last_turn_{};
  TimePoint next_ping_{};

  const pid_t owner_ = ::getpid();
  UniqueFd wake_;
  std::unique_ptr<ipc::LifeHold> life_;
  std::atomic<bool> stopping_{false};
  std::atomic<std::size_t> backlog_bytes_{0};  // that the agent has not taken yet

  std::mutex mutex_;  // may be taken with an inbox's held, never the other way round
  std::uint64_t last_call_ = 0;
  std::vector<std::string> outgoing_;
  std::size_t outgoing_bytes_ = 0;
  std::map<std::uint64_t, std::shared_ptr<Inbox>> calls_;
  std::map<std::uint64_t, std::shared_ptr<Inbox>> sessions_;
  std::optional<Error> closed_;
  std::thread thread_;
};

}  // namespace rekindle::client
