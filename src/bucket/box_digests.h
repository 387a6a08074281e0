#pragma once

#include <memory>
#include <span>
#include <vector>

#include "src/bucket/device.h"

namespace rekindle::bucket {

// Digests of boxes in a device's memory, a batch at a time: by the device, or, where that cannot
// compute them, of what was copied to host memory, which is slow. One thread.
class BoxDigests {
 public:
  explicit BoxDigests(Device& device) : device_(device) {}

  // Room for a batch of so many boxes, before the first: a larger one is made when it is needed.
  Result<void> reserve(std::size_t count);
  // The batch before has been done.
  Result<void> queue(std::span<const BoxBytes> boxes, Stream& stream);
  // Of the last batch, once the device has done it.
  std::vector<Digest> values() const;

 private:
  Result<void> queue_copies(std::span<const BoxBytes> boxes, Stream& stream);

  Device& device_;
  std::unique_ptr<Digests> digests_;  // null: none yet, or by the host
  bool by_host_ = false;
  std::vector<std::uint64_t> lengths_;  // of the boxes in copied_
  std::vector<std::byte> copied_;
};

}  // namespace rekindle::bucket
