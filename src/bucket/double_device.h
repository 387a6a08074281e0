#pragma once

#include <memory>
#include <string>

#include "src/bucket/device.h"

namespace rekindle::bucket {

// A GPU made of host memory, for machines without a GPU and for tests. Streams are threads; memory
// and events are memfds that other processes can open. `id` is "double:N".
std::unique_ptr<Device> make_double_device(std::string id, std::uint64_t memory_bytes);
bool is_double(std::string_view id);

// Collectives of double devices, of this and other processes of the user on this host. They meet in
// a file of shared memory, which the id names and which disappears after all have met. As with
// NCCL, a rank whose peer is gone waits until it is aborted.
std::unique_ptr<Collectives> make_double_collectives();

// The number of chunks (of up to 512 KiB) by which an owner may be ahead of the slowest rank. They
// wait in staging areas, like the chunks in NCCL's buffers.
constexpr std::uint64_t kDoubleChunksAhead = 2;

}  // namespace rekindle::bucket
