#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/client/agent_messages.h"

namespace rekindle::client {

struct Message {
  AgentMessage agent;
  // `agent` may point into it.
  std::unique_ptr<const std::string> frame;
  std::vector<UniqueFd> descriptors;
};

// The connection's thread leaves the messages of one session or call here. The mutex also guards
// the state of the session that owns the inbox: a thread that waits applies the messages that came.
struct Inbox {
  void put(Message message) {
    {
      const std::lock_guard lock(mutex);
      messages.push_back(std::move(message));
    }
    notify();
  }
  void close(const Error& why) {
    {
      const std::lock_guard lock(mutex);
      if (!closed) closed = why;
    }
    notify();
  }
  // Wakes the threads that wait for `changed` or poll `wake`.
  void notify() {
    changed.notify_all();
    const std::uint64_t one = 1;
    if (wake) [[maybe_unused]]
      const ssize_t written = ::write(wake.get(), &one, sizeof one);
  }
  // nullopt: the call's answer is not here. With the mutex held.
  std::optional<Message> take_answer_locked(std::uint64_t call) {
    const auto found =
        std::ranges::find(messages, call, [](const Message& m) { return m.agent.call; });
    if (found == messages.end()) return std::nullopt;
    Message message = std::move(*found);
    messages.erase(found);
    return message;
  }
  std::optional<Message> take_answer(std::uint64_t call) {
    const std::lock_guard lock(mutex);
    return take_answer_locked(call);
  }

  std::mutex mutex;
  std::condition_variable changed;
  // An eventfd for threads that also wait for other descriptors. Set before the first call.
  UniqueFd wake;
  // Both are guarded by `mutex`. `closed`: why no more messages will come.
  std::deque<Message> messages;
  std::optional<Error> closed;
};

// The number of the hello, which is sent before the table is used.
inline constexpr std::uint64_t kHelloCall = 1;
// The agent answers when there is something to say.
inline constexpr std::chrono::milliseconds kNoDeadline{0};

// The calls that wait for an answer, the sessions that get events, and the frames that wait to be
// sent. When it is closed, all inboxes are closed with the reason. Thread-safe. Its mutex may be
// taken while an inbox's is held, never the other way round.
class CallTable {
 public:
  // Queues a request and returns the call's number. The answer goes to `inbox`; if it begins a
  // session, the inbox gets the session's events, too. Without an inbox the answer is dropped.
  // kUnavailable: the agent does not read what it is sent. kInvalid: the request is too large.
  Result<std::uint64_t> begin(const Request& request, std::uint64_t session,
                              std::chrono::milliseconds deadline,
                              const std::shared_ptr<Inbox>& inbox,
                              std::vector<UniqueFd> descriptors = {});
  // Nobody waits for the call any more. Returns its answer if it has just come.
  std::optional<Message> forget_call(std::uint64_t call, Inbox& inbox);
  // Answers to `inbox` and events of the session are dropped from now on.
  void forget_session(std::uint64_t session, const std::shared_ptr<Inbox>& inbox);

  // For the thread that owns the socket.
  struct Outgoing {
    std::string body;
    std::vector<UniqueFd> descriptors;
  };
  std::vector<Outgoing> take_outgoing();
  // Bytes that the socket has not taken yet.
  void set_backlog(std::size_t bytes);
  // Passes a message on to the waiting call or session. A session or publication that nobody waits
  // for any more is ended.
  void deliver(Message message);

  // The first reason stays.
  void close(const Error& why);

 private:
  Result<std::uint64_t> queue(const Request& request, std::uint64_t session,
                              std::chrono::milliseconds deadline,
                              std::vector<UniqueFd> descriptors = {});
  void end_unwanted(const AgentMessage& message);

  std::mutex mutex_;
  std::uint64_t last_call_ = kHelloCall;
  std::vector<Outgoing> outgoing_;
  // Bytes in outgoing_ and behind it.
  std::size_t outgoing_bytes_ = 0;
  std::size_t backlog_bytes_ = 0;
  std::map<std::uint64_t, std::shared_ptr<Inbox>> calls_;
  std::map<std::uint64_t, std::shared_ptr<Inbox>> sessions_;
  std::optional<Error> closed_;
};

}  // namespace rekindle::client
