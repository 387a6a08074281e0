#pragma once

#include <cstdint>

#include "transport/types.h"

namespace rekindle::transport::verbs {

// The op with as few runs as it can be said with: runs that touch each other at both ends are one.
ReadOp with_merged_runs(const ReadOp& op);

// The next part of an op that fits `max_bytes` (at least 1), from payload byte `position` on: whole
// runs, or a piece of one run. Its remote side is dense in the block that it is gathered into.
ReadOp next_part(const ReadOp& op, std::uint64_t position, std::uint64_t max_bytes);

}  // namespace rekindle::transport::verbs
