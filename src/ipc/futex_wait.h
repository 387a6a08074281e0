#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/base/clock.h"

// Private to src/ipc: waits for a change of one of many futex words.
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

}  // namespace rekindle::ipc
