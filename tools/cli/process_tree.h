#pragma once

#include <chrono>
#include <span>
#include <vector>

#include <sys/types.h>

#include "src/base/unique_fd.h"

// The processes below a process, as /proc shows them.
namespace rekindle::cli {

struct HeldProcess {
  pid_t pid = 0;
  // Of exactly that process.
  UniqueFd pidfd;

  bool has_ended() const;
  void signal(int number) const;
};

bool has_ended(pid_t pid);
// False also for `ancestor` itself.
bool is_below(pid_t pid, pid_t ancestor);
// An empty pidfd: the process is not below `ancestor`, or has ended.
HeldProcess hold_below(pid_t pid, pid_t ancestor);
// Adds the processes below `ancestor` that are not in `held`. Returns those it has added.
std::span<const HeldProcess> hold_all_below(pid_t ancestor, std::vector<HeldProcess>& held);
// Waits until all have ended, or `patience` is over. Returns the number that are left.
std::size_t wait_for_ends(std::span<const HeldProcess> held, std::chrono::milliseconds patience);

}  // namespace rekindle::cli
