#pragma once

#include <cstdint>

// Private to src/ipc.
namespace rekindle::ipc {

inline constexpr std::uint32_t kSpilled = 1;  // flag: the body is in the first descriptor

}  // namespace rekindle::ipc
