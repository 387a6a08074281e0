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

}  // namespace rekindle::ipc
