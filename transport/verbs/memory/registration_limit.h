#pragma once

#include <cstdint>
#include <string>

#include "src/base/result.h"

// Why memory could not be registered, and the user's remedies. Pure except for read_lock_limit().
namespace rekindle::transport::verbs {

// How much memory this process may pin.
struct LockLimit {
  std::uint64_t limit_bytes = ~std::uint64_t{0};  // RLIMIT_MEMLOCK; all ones: unlimited
  bool may_lock_any = false;                      // CAP_IPC_LOCK where the kernel heeds it
  std::uint64_t pinned_bytes = 0;                 // by now, once per device
};
LockLimit read_lock_limit();

enum class Cause : std::uint8_t {
  kMemlock,      // RLIMIT_MEMLOCK
  kOwnLimit,     // RegistrarOptions::max_bytes_per_device
  kRegionCount,  // the device's max_mr
  kDeviceFull,   // ENOMEM that nothing else explains: its tables, or the host's memory
  kCutShort,     // the file has no pages there (any more)
  kReadOnly,     // it takes writable mappings only, and the file cannot be opened for writing
  kDeviceGone,
  kNoWindows,  // served memory only: the device has no memory windows of type 2B
  kOther,
};

struct Refusal {
  int error = 0;                 // of the call
  std::uint64_t bytes = 0;       // of the piece
  std::uint64_t registered = 0;  // regions of the device
  std::uint64_t max_mr = 0;      // 0: unknown
  bool cut_short = false;
  bool no_writable_mapping = false;
  LockLimit lock;
};
Cause find_cause(const Refusal& refusal);
// Whether pieces of the failed size or more need not be tried. After kRegionCount no piece is
// tried.
bool stops_the_rest(Cause cause);

// The failed part of a region on one device, for one cause.
struct Shortfall {
  Cause cause = Cause::kOther;
  int error = 0;
  std::string device;
  std::size_t devices = 1;  // in use: memory is pinned once for each
  std::uint64_t region_bytes = 0;
  std::uint64_t registered_bytes = 0;  // of the region on this device
  std::uint64_t missing_bytes = 0;
  std::uint64_t own_limit_bytes = 0;
  std::uint64_t max_mr = 0;
  LockLimit lock;
};
Error to_error(const Shortfall& shortfall);

}  // namespace rekindle::transport::verbs
