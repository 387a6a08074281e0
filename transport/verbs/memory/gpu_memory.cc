#include "transport/verbs/memory/gpu_memory.h"

#include <cerrno>

#include "src/base/units.h"

namespace rekindle::transport::verbs {

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
