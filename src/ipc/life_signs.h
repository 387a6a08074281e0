#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "src/base/clock.h"
#include "src/base/unique_fd.h"
#include "src/ipc/futex_wait.h"
#include "src/ipc/life.h"

// Private to src/ipc: the signs of life of one worker.
namespace rekindle::ipc {

class LifeSigns {
 public:
  LifeSigns(std::uint64_t worker, std::unique_ptr<LifePage> page, Peer peer);

  // The worker was alive then.
  TimePoint since() const { return since_; }
  std::uint64_t worker() const { return worker_; }
  // Reads the word only, without a system call.
  bool owner_died() const;
  // Reads every sign.
  std::optional<DeathSign> look() const;
  // Asks the kernel to wake us when the holder dies, and returns the word to wait on.
  FutexWord watched_word() const;

 private:
  bool dumps_core() const;
  bool has_ended() const;

  const TimePoint since_ = SteadyClock().now();
  const std::uint64_t worker_;
  const std::unique_ptr<LifePage> page_;
  // /proc/PID/status of this process only, also if its number is reused.
  const UniqueFd status_;
  const UniqueFd pidfd_;
};

// "CoreDumping:\t1" in the text of a /proc/PID/status.
bool says_core_dumping(std::string_view status);

}  // namespace rekindle::ipc
