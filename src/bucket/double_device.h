#pragma once

#include <memory>
#include <string>

#include "src/bucket/device.h"

namespace rekindle::bucket {

// A GPU made of host memory, for machines without a GPU and for tests. Streams are threads; memory
// and events are memfds that other processes can open. `id` is "double:N".
std::unique_ptr<Device> make_double_device(std::string id, std::uint64_t memory_bytes);
bool is_double(std::string_view id);

}  // namespace rekindle::bucket
