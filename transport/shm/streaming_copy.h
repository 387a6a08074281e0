#pragma once

#include <cstddef>

namespace rekindle::transport::shm {

// memcpy for bytes that this core will not touch again soon: large copies bypass the cache on the
// way out (no read-for-ownership of the destination: a quarter less memory traffic).
void copy_bytes(std::byte* to, const std::byte* from, std::size_t size);

// Below this, plain memcpy.
inline constexpr std::size_t kStreamingBytes = 128 << 10;

}  // namespace rekindle::transport::shm
