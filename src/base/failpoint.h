#pragma once

#include <string_view>

#include "src/base/result.h"

// Failpoints: named places where a test can make the process die, fail or wait. Compiled in always
// (an unarmed one costs a relaxed load), armed only by arm_failpoints().
//   TRY_VOID(failpoint("store.commit.before_manifest_rename"));
namespace rekindle {

// "NAME=ACTION[@HIT]" joined with ';'. Actions: kill (SIGKILL to this process), error:ENOSPC,
// error:EIO, sleep:MILLISECONDS, hold (until arm_failpoints() is called again). HIT counts from 1
// and limits the action to that passage. Replaces the armed failpoints; "" disarms all. kInvalid:
// the error names the item that does not parse, and nothing changes.
Result<void> arm_failpoints(std::string_view spec);

namespace failpoint_detail {
bool any_armed();
Result<void> pass(std::string_view name);
}  // namespace failpoint_detail

// The armed action, or success. Any thread.
inline Result<void> failpoint(std::string_view name) {
  if (!failpoint_detail::any_armed()) return {};
  return failpoint_detail::pass(name);
}

}  // namespace rekindle
