#pragma once

#include <optional>
#include <string_view>

#include <sys/types.h>

#include "src/base/clock.h"

namespace rekindle::ipc {

// How long a process runs already, to the hundredth of a second. nullopt: /proc does not show it.
std::optional<Duration> age_of_process(pid_t pid);
// The same from the text of its /proc/PID/stat and the time since the boot.
std::optional<Duration> age_of_process(std::string_view stat, Duration since_boot,
                                       long ticks_per_second);
// The process of a pidfd. -1: it has died; 0: it is in another PID namespace. nullopt: the
// descriptor is of something else.
std::optional<pid_t> pid_of(int pidfd);

}  // namespace rekindle::ipc
