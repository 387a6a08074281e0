#include "transport/verbs/direct/read_costs.h"

#include <algorithm>

namespace rekindle::transport::verbs {

RunReads cheaper_reads(const ReadOp& op, Landing landing, std::uint32_t entries,
                       const ReadCosts& costs) {
  const bool consecutive = op.remote_stride == op.run_bytes;
  // One READ of one entry brings them all.
  if (consecutive && op.local_stride == op.run_bytes) return RunReads::kInPlace;
  // The gaps of overlapping or descending runs cannot be read along.
  if (op.remote_stride < op.run_bytes) return RunReads::kInPlace;
  const auto run = static_cast<double>(op.run_bytes);
  const double copy_ns = costs.copied_run_ns + run * costs.copied_byte_ns;
  double request_ns = costs.request_ns;
  if (consecutive) request_ns = request_ns / static_cast<double>(entries) + costs.entry_ns;
  if (landing == Landing::kUnregistered) request_ns += copy_ns;

  const double in_place_ns = std::max(request_ns, run * costs.wire_byte_ns);
  const double together_ns =
      std::max(copy_ns, static_cast<double>(op.remote_stride) * costs.wire_byte_ns);
  return together_ns < in_place_ns ? RunReads::kTogether : RunReads::kInPlace;
}

}  // namespace rekindle::transport::verbs
