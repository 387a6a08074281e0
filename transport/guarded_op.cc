#include "transport/guarded_op.h"

#include "src/store/fault_guard.h"

namespace rekindle::transport {

namespace {

bool writes_to(const ReadOp& op, const void* address) {
  if (op.count == 0) return false;
  const auto* const at = static_cast<const std::byte*>(address);
  const auto* const end = op.local + (op.count - 1) * op.local_stride + op.run_bytes;
  return !std::less<>()(at, op.local) && std::less<>()(at, end);
}

}  // namespace

OpStatus guard_op(const ReadOp& op, const std::function<void()>& copy) {
  const auto fault = store::find_mapping_fault(copy);
  if (!fault) return OpStatus::kFault;
  if (*fault == nullptr) return OpStatus::kOk;
  return writes_to(op, *fault) ? OpStatus::kLocalFault : OpStatus::kFault;
}

}  // namespace rekindle::transport
