#pragma once

#include <cstdint>

#include "src/base/result.h"
#include "transport/verbs/device/fabric.h"

// GPU memory on a NIC, by dmabuf. Not yet run with a NIC that takes it.
namespace rekindle::transport::verbs {

// Asks the device's driver with a descriptor that cannot be right: one that knows the call
// complains about it (EBADF), one that does not about the call.
bool takes_dmabuf(const Device& device);

// [offset, offset + bytes) of the dmabuf `fd`, which may be closed afterwards. The device knows it
// as `gpu_address`, so that offsets into it are those of the GPU's own pointer. `access`: as
// ibv_reg_mr.
Result<MrHandle> register_gpu_range(const Device& device, int fd, std::uint64_t offset,
                                    std::uint64_t bytes, std::uint64_t gpu_address, int access);

}  // namespace rekindle::transport::verbs
