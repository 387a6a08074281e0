#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/client/wire.h"

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
    changed.notify_all();
  }
  void close(const Error& why) {
    {
      const std::lock_guard lock(mutex);
      if (!closed) closed = why;
    }
    changed.notify_all();
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Message> messages;  // guarded by mutex
  std::optional<Error> closed;   // guarded by mutex: nothing more will come, and why
};

}  // namespace rekindle::client
