#pragma once

#include <cstddef>

namespace rekindle {

// memcpy for bytes that this core will not touch again soon. Large copies bypass the cache on the
// way out: without a read-for-ownership of the destination there is a quarter less memory traffic.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t size);

// Smaller copies use plain memcpy.
inline constexpr std::size_t kStreamingBytes = 128 << 10;

}  // namespace rekindle
