#pragma once

#include <functional>

#include "transport/read_op.h"

namespace rekindle::transport {

// Runs a part of an op's copy between mappings, either of which somebody may cut short meanwhile:
// kOk, kFault when the source could not be read, kLocalFault when the destination could not be
// written.
OpStatus guard_op(const ReadOp& op, const std::function<void()>& copy);

}  // namespace rekindle::transport
