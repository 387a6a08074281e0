#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"

namespace rekindle::device {

// The exit code of `rekindle device-process` after a device has failed for good.
inline constexpr int kDeviceLostExit = 70;

// The device process as its parent sees it. It is started with one end of a socket.
class Child {
 public:
  // Runs `command`, a path and its arguments. The process gets the socket as descriptor kSocket;
  // the caller names that number in the arguments.
  static constexpr int kSocket = 3;
  static Result<std::unique_ptr<Child>> start(const std::vector<std::string>& command);
  // Kills the process, and waits 50 ms for its end.
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // The parent's end.
  UniqueFd take_socket() { return std::move(socket_); }
  pid_t pid() const { return pid_; }
  void kill() const;
  // How it ended: "exited with code 70"; nullopt: it runs.
  std::optional<std::string> ended();
  // Returns when the process has ended, at the deadline, or when the coroutine is cancelled.
  async::Task<void> wait_ended(TimePoint deadline) const;

 private:
  Child(pid_t pid, UniqueFd socket);
  const pid_t pid_;
  // Empty where the kernel has no pidfds.
  const UniqueFd pidfd_;
  UniqueFd socket_;
  std::optional<std::string> ended_;
};

}  // namespace rekindle::device
