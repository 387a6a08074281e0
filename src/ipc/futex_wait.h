#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/base/clock.h"

// Private to src/ipc: waiting for a change of one of many futex words.
namespace rekindle::ipc {

struct FutexWord {
  std::uint32_t* word = nullptr;
  std::uint32_t value = 0;  // wait while it is this
};

enum class FutexWake { kWoken, kChanged, kTimeout };

// Waits on `own` (of this process) and on as many of `shared` as the kernel takes, 127; kernels
// before 5.16 wait on `own` alone, so that the others are found by looking. Needs no lock; a word
// that has changed already returns kChanged at once.
class FutexWaiter {
 public:
  FutexWake wait(FutexWord own, std::span<const FutexWord> shared, TimePoint deadline);

 private:
  bool have_waitv_ = true;
};

void futex_wake_own(std::uint32_t* own);  // one waiter of this process

}  // namespace rekindle::ipc
