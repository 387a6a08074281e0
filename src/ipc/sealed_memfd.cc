#include <cerrno>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/ipc/frame.h"

namespace rekindle::ipc {

Result<UniqueFd> sealed_memfd(std::string_view bytes) {
  UniqueFd fd(::memfd_create("rekindle-frame", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return fail_errno(errno, "create a memfd");
  for (std::string_view left = bytes; !left.empty();) {
    const ssize_t written = ::write(fd.get(), left.data(), left.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return fail_errno(errno, "write a memfd");
    left.remove_prefix(static_cast<std::size_t>(written));
  }
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) return fail_errno(errno, "seal a memfd");
  return fd;
}

Result<std::string> read_sealed_memfd(int fd, std::size_t size) {
  // Only memory can be sealed: a pipe or a file of a stuck file system, on which read() would wait,
  // does not get past this.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_WRITE) == 0 || (seals & F_SEAL_SHRINK) == 0) {
    return fail(ErrorCode::kInvalid, "the descriptor of a large frame is not a sealed memfd");
  }
  struct stat info {};
  if (::fstat(fd, &info) != 0) return fail_errno(errno, "stat the memfd of a large frame");
  if (info.st_size < 0 || static_cast<std::uint64_t>(info.st_size) != size) {
    return fail(ErrorCode::kInvalid, "a large frame of {} bytes lies in a memfd of {}", size,
                info.st_size);
  }
  std::string bytes(size, '\0');
  for (std::size_t at = 0; at < size;) {
    const ssize_t got = ::pread(fd, bytes.data() + at, size - at, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return fail_errno(got == 0 ? EIO : errno, "read the memfd of a large frame");
    at += static_cast<std::size_t>(got);
  }
  return bytes;
}

}  // namespace rekindle::ipc
