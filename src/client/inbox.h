#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <unistd.h>

#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/client/agent_messages.h"

namespace rekindle::client {

struct Message {
  AgentMessage agent;
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

}  // namespace rekindle::client
