#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "src/base/clock.h"
#include "src/base/unique_fd.h"
#include "src/ipc/futex_wait.h"
#include "src/ipc/life.h"

// Private to src/ipc: one worker, looked at.
namespace rekindle::ipc {

class LifeSigns {
 public:
  LifeSigns(std::uint64_t worker, std::unique_ptr<LifePage> page, Peer peer);

  TimePoint since() const { return since_; }  // it was alive then
  std::uint64_t worker() const { return worker_; }
  // The word alone: no system call.
  bool owner_died() const;
  // Everything that can be looked at.
  std::optional<DeathSign> look() const;
  // Asks the kernel to wake us when the holder dies, and returns what to wait on.
  FutexWord watched_word() const;

 private:
  bool dumps_core() const;
  bool has_ended() const;

  const TimePoint since_ = SteadyClock().now();
  const std::uint64_t worker_;
  const std::unique_ptr<LifePage> page_;
  const UniqueFd status_;  // /proc/PID/status: of that process only, also when its number is reused
  const UniqueFd pidfd_;
};

// "CoreDumping:\t1" in the text of a /proc/PID/status.
bool says_core_dumping(std::string_view status);

}  // namespace rekindle::ipc
