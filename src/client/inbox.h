#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
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

// Where the connection's thread leaves what belongs to one session or call. Its mutex also guards
// the state of the session that owns it: whoever waits applies what has come.
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
  // Wakes those who wait for `changed` or poll `wake`.
  void notify() {
    changed.notify_all();
    const std::uint64_t one = 1;
    if (wake) [[maybe_unused]]
      const ssize_t written = ::write(wake.get(), &one, sizeof one);
  }

  std::mutex mutex;
  std::condition_variable changed;
  UniqueFd wake;  // an eventfd, for who waits for other descriptors, too; set before the first call
  std::deque<Message> messages;  // guarded by mutex
  std::optional<Error> closed;   // guarded by mutex: nothing more will come, and why
};

}  // namespace rekindle::client
