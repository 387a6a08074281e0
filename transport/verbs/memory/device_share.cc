#include "transport/verbs/memory/device_share.h"

#include <cerrno>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/base/unique_fd.h"
#include "src/base/units.h"
#include "transport/verbs/memory/page_touch.h"

namespace rekindle::transport::verbs {
namespace {

int access_flags(MemoryUse use) {
  return use == MemoryUse::kLand ? IBV_ACCESS_LOCAL_WRITE : IBV_ACCESS_MW_BIND;
}

// What drivers say to a mapping or to flags that they do not take.
bool is_refusal(int error) {
  return error == EFAULT || error == EACCES || error == EPERM || error == EINVAL ||
         error == EOPNOTSUPP;
}

struct Place {
  const std::byte* address;
  std::uint64_t bytes;
};

// With relaxed ordering, or without where the device refuses that.
int try_place(DeviceShare& share, const Place& place, int access, MrHandle& mr) {
  Api& api = share.device.api();
  const auto attempt = [&](int flags) {
    // Registering takes a pointer that may be written to; the flags say that it is not.
    auto* const address = const_cast<std::byte*>(place.address);  // NOLINT
    errno = 0;
    mr = MrHandle(api.reg_mr(share.device.pd(), address, place.bytes, flags), {&api});
    if (mr) return 0;
    return errno != 0 ? errno : EIO;
  };
  if (share.refuses_relaxed_ordering.load(std::memory_order_relaxed)) return attempt(access);
  const int error = attempt(access | IBV_ACCESS_RELAXED_ORDERING);
  if (!is_refusal(error)) return error;
  const int plain = attempt(access);
  if (plain == 0) share.refuses_relaxed_ordering.store(true, std::memory_order_relaxed);
  return plain;
}

}  // namespace

bool DeviceShare::reserve(std::uint64_t piece_bytes) {
  std::uint64_t used = bytes.load();
  do {
    if (limit_bytes != 0 && !in_range(used, piece_bytes, limit_bytes)) return false;
  } while (!bytes.compare_exchange_weak(used, used + piece_bytes));
  return true;
}

RegionMemory::~RegionMemory() {
  if (mapping_ != nullptr) ::munmap(mapping_, mapping_bytes_);
}

const std::byte* RegionMemory::writable() {
  std::call_once(once_, [this] { map_writable(); });
  return writable_.load(std::memory_order_acquire);
}

const std::byte* RegionMemory::latest() const {
  const std::byte* const writable = writable_.load(std::memory_order_acquire);
  return writable != nullptr ? writable : bytes_.data();
}

void RegionMemory::map_writable() {
  if (fd_ < 0 || bytes_.empty()) return;
  // The descriptor may be open for reading only: opened anew, with the rights of the file itself.
  const UniqueFd file(::open(fmt::format("/proc/self/fd/{}", fd_).c_str(), O_RDWR | O_CLOEXEC));
  if (!file) return;
  const std::uint64_t lead = fd_offset_ % kPageBytes;
  const std::size_t size = bytes_.size() + lead;
  void* const mapped = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(),
                              static_cast<off_t>(fd_offset_ - lead));
  if (mapped == MAP_FAILED) return;
  mapping_ = static_cast<std::byte*>(mapped);
  mapping_bytes_ = size;
  advise_huge_pages({mapping_, size}, fd_);
  writable_.store(mapping_ + lead, std::memory_order_release);
}

bool RegionMemory::ends_before(std::uint64_t offset, std::uint64_t bytes) const {
  struct stat file {};
  if (fd_ < 0 || ::fstat(fd_, &file) != 0 || !S_ISREG(file.st_mode)) return false;
  const auto size = static_cast<std::uint64_t>(file.st_size);
  return size < fd_offset_ || !in_range(offset, bytes, size - fd_offset_);
}

Registration register_memory(DeviceShare& share, RegionMemory& memory, std::uint64_t offset,
                             std::uint64_t bytes, MemoryUse use) {
  const int access = access_flags(use);
  Registration result;
  const auto attempt = [&](const std::byte* base) {
    result.address = base + offset;
    // Kernels before 6.2 pin shared memory as if it were written to. A page that nobody has touched
    // in this mapping would be faulted in by that write, which changes the file's ctime: the copy
    // would count as changed by a stranger. A page that was read is taken as it is.
    if (use == MemoryUse::kServe && base != memory.bytes().data()) {
      (void)touch_pages({result.address, bytes}, TouchMode::kRead);  // the device says what fails
    }
    result.error = try_place(share, {result.address, bytes}, access, result.mr);
  };
  const std::byte* const plain = memory.bytes().data();
  // Reads must land in the mapping that its owner looks at.
  const bool has_choice = use == MemoryUse::kServe && memory.fd() >= 0;
  const bool prefers_writable =
      has_choice && share.refuses_read_only.load(std::memory_order_relaxed);
  const std::byte* const first = prefers_writable ? memory.writable() : nullptr;
  attempt(first != nullptr ? first : plain);
  if (result.mr || !has_choice || first != nullptr || !is_refusal(result.error)) return result;

  const std::byte* const writable = memory.writable();
  if (writable == nullptr) {
    result.no_writable_mapping = true;
    return result;
  }
  attempt(writable);
  if (result.mr) share.refuses_read_only.store(true, std::memory_order_relaxed);
  return result;
}

bool serves_by_windows(const Device& device) { return device.limits().memory_windows_2b; }

bool refuses_read_only(DeviceShare& share) {
  if (!serves_by_windows(share.device)) return false;
  const UniqueFd file(::memfd_create("rekindle-probe", MFD_CLOEXEC));
  if (!file || ::ftruncate(file.get(), kPageBytes) != 0) return false;
  void* const mapped = ::mmap(nullptr, kPageBytes, PROT_READ, MAP_SHARED, file.get(), 0);
  if (mapped == MAP_FAILED) return false;
  RegionMemory memory({static_cast<const std::byte*>(mapped), kPageBytes}, -1, 0);
  auto probe = register_memory(share, memory, 0, kPageBytes, MemoryUse::kServe);
  const bool refused = !probe.mr && is_refusal(probe.error);
  probe.mr.reset();
  ::munmap(mapped, kPageBytes);
  if (refused) share.refuses_read_only.store(true, std::memory_order_relaxed);
  return refused;
}

bool takes_dmabuf(const Device& device) {
  errno = 0;
  const MrHandle mr(device.api().reg_dmabuf_mr(device.pd(), 0, kPageBytes, 0, -1, 0),
                    {&device.api()});
  return mr != nullptr || errno == EBADF;
}

Result<MrHandle> register_gpu_range(const Device& device, int fd, std::uint64_t offset,
                                    std::uint64_t bytes, std::uint64_t gpu_address, int access) {
  errno = 0;
  MrHandle mr(device.api().reg_dmabuf_mr(device.pd(), offset, bytes, gpu_address, fd, access),
              {&device.api()});
  if (mr) return mr;
  const int error = errno == 0 ? EIO : errno;
  return fail_errno(error, fmt::format("register {} of GPU memory with {} by dmabuf",
                                       format_bytes(bytes), device.name()));
}

}  // namespace rekindle::transport::verbs
