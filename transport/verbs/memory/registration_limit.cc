#include "transport/verbs/memory/registration_limit.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include <linux/capability.h>
#include <sys/resource.h>

#include "src/base/units.h"

namespace rekindle::transport::verbs {
namespace {

// In a user namespace the capability counts for nothing: limits are the host's.
bool in_first_user_namespace() {
  std::ifstream file("/proc/self/uid_map");
  std::uint64_t inside = 1, outside = 1, count = 0;
  file >> inside >> outside >> count;
  return inside == 0 && outside == 0 && count == 0xffffffff;
}

std::string advice(const Shortfall& shortfall) {
  switch (shortfall.cause) {
    case Cause::kMemlock:
      return fmt::format(
          "the memlock limit is {} and {} are pinned already; all of it needs {}: `ulimit -l "
          "unlimited` (systemd: LimitMEMLOCK=infinity) or CAP_IPC_LOCK",
          format_bytes(shortfall.lock.limit_bytes), format_bytes(shortfall.lock.pinned_bytes),
          shortfall.devices > 1
              ? fmt::format("{} ({} devices)",
                            format_bytes(shortfall.region_bytes * shortfall.devices),
                            shortfall.devices)
              : format_bytes(shortfall.region_bytes));
    case Cause::kOwnLimit:
      return fmt::format("the limit set for each device is {}: raise it, or serve less",
                         format_bytes(shortfall.own_limit_bytes));
    case Cause::kRegionCount:
      return fmt::format("the device takes {} regions at most: larger pieces or fewer files",
                         shortfall.max_mr);
    case Cause::kDeviceFull:
      return "out of memory, or of the device's translation tables: huge pages need fewer entries";
    case Cause::kCutShort:
      return "its file has no bytes there: some other process cut it short, or the file system is "
             "full; publish or pull it again";
    case Cause::kReadOnly:
      return "the device takes writable mappings only and the file cannot be opened for writing: "
             "run as its owner, or make it writable (chmod u+w)";
    case Cause::kDeviceGone:
      return "the device is gone; the other ones are used";
    case Cause::kNoWindows:
      return "the device has no memory windows (type 2B), so a puller's key would open it to all: "
             "reads are staged, which takes CPU time";
    case Cause::kOther:
      break;
  }
  return "see the kernel's log (dmesg)";
}

ErrorCode code_of(Cause cause) {
  switch (cause) {
    case Cause::kCutShort:
      return ErrorCode::kCorrupt;
    case Cause::kReadOnly:
      return ErrorCode::kDenied;
    case Cause::kDeviceGone:
    case Cause::kNoWindows:
      return ErrorCode::kUnavailable;
    case Cause::kOther:
      return ErrorCode::kInternal;
    default:
      return ErrorCode::kExhausted;
  }
}

}  // namespace

LockLimit read_lock_limit() {
  LockLimit lock;
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    lock.limit_bytes = limit.rlim_cur;
  }
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    std::istringstream fields(line);
    std::string name;
    fields >> name;
    if (name == "VmPin:") {
      std::uint64_t kib = 0;
      fields >> kib;
      lock.pinned_bytes = kib * kKiB;
    } else if (name == "CapEff:") {
      std::uint64_t capabilities = 0;
      fields >> std::hex >> capabilities;
      lock.may_lock_any = (capabilities >> CAP_IPC_LOCK & 1U) != 0 && in_first_user_namespace();
    }
  }
  return lock;
}

Cause find_cause(const Refusal& refusal) {
  if (refusal.error == ENODEV || refusal.error == EIO) return Cause::kDeviceGone;
  if (refusal.cut_short) return Cause::kCutShort;
  if (refusal.error != ENOMEM) {
    return refusal.no_writable_mapping ? Cause::kReadOnly : Cause::kOther;
  }
  const LockLimit& lock = refusal.lock;
  if (!lock.may_lock_any && !in_range(lock.pinned_bytes, refusal.bytes, lock.limit_bytes)) {
    return Cause::kMemlock;
  }
  if (refusal.max_mr != 0 && refusal.registered >= refusal.max_mr) return Cause::kRegionCount;
  return Cause::kDeviceFull;
}

bool stops_the_rest(Cause cause) {
  return cause == Cause::kMemlock || cause == Cause::kOwnLimit || cause == Cause::kRegionCount;
}

Error to_error(const Shortfall& shortfall) {
  std::string what =
      fmt::format("{}: {} of {} not registered ({} are): ", shortfall.device,
                  format_bytes(shortfall.missing_bytes), format_bytes(shortfall.region_bytes),
                  format_bytes(shortfall.registered_bytes));
  if (shortfall.error != 0) what += fmt::format("{}: ", std::strerror(shortfall.error));
  return {code_of(shortfall.cause), what + advice(shortfall)};
}

}  // namespace rekindle::transport::verbs
