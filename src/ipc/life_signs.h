#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "src/base/clock.h"
#include "src/base/unique_fd.h"
#include "src/ipc/life.h"

// Private to src/ipc: the signs of life of one worker, and the wait for a change of them.
namespace rekindle::ipc {

struct FutexWord {
  std::uint32_t* word = nullptr;
  // The wait goes on while the word has this value.
  std::uint32_t value = 0;
};

enum class FutexWake { kWoken, kChanged, kTimeout };

// Waits on `own`, a word of this process, and on up to 127 of `shared`, as many as the kernel
// takes. Kernels before 5.16 wait on `own` alone, and the caller finds changes of the others by
// looking. Needs no lock: a word that has changed already returns kChanged at once.
class FutexWaiter {
 public:
  FutexWake wait(FutexWord own, std::span<const FutexWord> shared, TimePoint deadline);

 private:
  bool have_waitv_ = true;
};

// Wakes one waiter of this process.
void futex_wake_own(std::uint32_t* own);

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
