#include "transport/read_op.h"

#include "src/store/fault_guard.h"

namespace rekindle::transport {

std::string_view to_string(OpStatus status) {
  switch (status) {
    case OpStatus::kOk:
      return "ok";
    case OpStatus::kStale:
      return "stale";
    case OpStatus::kDenied:
      return "denied";
    case OpStatus::kInvalid:
      return "invalid";
    case OpStatus::kPeerLost:
      return "peer lost";
    case OpStatus::kTimeout:
      return "timeout";
    case OpStatus::kAborted:
      return "aborted";
    case OpStatus::kFault:
      return "fault";
    case OpStatus::kLocalFault:
      return "the destination cannot be written";
  }
  return "unknown";
}

ErrorCode to_error_code(OpStatus status) {
  switch (status) {
    case OpStatus::kOk:
      break;  // not an error: asking is a bug
    case OpStatus::kStale:
      return ErrorCode::kStale;
    case OpStatus::kDenied:
      return ErrorCode::kDenied;
    case OpStatus::kInvalid:
      return ErrorCode::kInvalid;
    case OpStatus::kPeerLost:
      return ErrorCode::kPeerLost;
    case OpStatus::kTimeout:
      return ErrorCode::kTimeout;
    case OpStatus::kAborted:
      return ErrorCode::kUnavailable;
    case OpStatus::kFault:
      return ErrorCode::kCorrupt;
    case OpStatus::kLocalFault:
      return ErrorCode::kInternal;
  }
  return ErrorCode::kInternal;
}

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
