#include <array>
#include <cerrno>

#include <fcntl.h>
#include <unistd.h>

#include "src/base/unique_fd.h"
#include "transport/shm/shm_transport.h"

namespace rekindle::transport::shm {

Result<std::string> host_boot_id() {
  constexpr const char* kFile = "/proc/sys/kernel/random/boot_id";
  const UniqueFd fd(::open(kFile, O_RDONLY | O_CLOEXEC));
  if (!fd) return fail_errno(errno, fmt::format("read {}", kFile));
  std::array<char, 64> text{};
  const ssize_t n = ::read(fd.get(), text.data(), text.size());
  if (n < 36) return fail(ErrorCode::kUnavailable, "read {}: no boot id in it", kFile);
  return std::string(text.data(), 36);
}

std::string Endpoint::to_string() const { return fmt::format("{}/{}", boot_id, socket_name); }

Result<Endpoint> Endpoint::parse(std::string_view text) {
  const auto slash = text.find('/');
  // 100: abstract names have 107 bytes at most.
  if (slash == std::string_view::npos || slash == 0 || slash + 1 == text.size() ||
      text.size() - slash - 1 > 100 || slash > 64) {
    return fail(ErrorCode::kInvalid, "shm endpoint '{}' is not BOOT_ID/SOCKET",
                text.substr(0, 200));
  }
  return Endpoint{std::string(text.substr(0, slash)), std::string(text.substr(slash + 1))};
}

}  // namespace rekindle::transport::shm
