#pragma once

#include <memory>
#include <span>
#include <vector>

#include "src/bucket/device.h"

namespace rekindle::bucket {

// Digests of boxes in a device's memory, one batch at a time. The device computes them; if it
// cannot, the boxes are copied to host memory and digested there, which is slow. One thread.
class BoxDigests {
 public:
  explicit BoxDigests(Device& device) : device_(device) {}

  // Makes room for a batch of so many boxes before the first one. A larger batch makes room itself.
  Result<void> reserve(std::size_t count);
  // The last batch must be done.
  Result<void> queue(std::span<const BoxBytes> boxes, Stream& stream);
  // Of the last batch, after the device has done it.
  std::vector<Digest> values() const;

 private:
  Result<void> queue_copies(std::span<const BoxBytes> boxes, Stream& stream);

  Device& device_;
  // Null: none yet, or the host computes them.
  std::unique_ptr<Digests> digests_;
  bool by_host_ = false;
  // Of the boxes in copied_.
  std::vector<std::uint64_t> lengths_;
  std::vector<std::byte> copied_;
};

}  // namespace rekindle::bucket
