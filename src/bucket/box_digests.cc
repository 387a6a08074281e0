#include "src/bucket/box_digests.h"

#include <algorithm>

#include "src/base/blake3.h"
#include "src/base/log.h"

namespace rekindle::bucket {

Result<void> BoxDigests::reserve(std::size_t count) {
  if (by_host_ || (digests_ != nullptr && digests_->capacity() >= count)) return {};
  digests_.reset();
  auto made = device_.make_digests(std::max<std::size_t>(count, 1));
  if (made) {
    digests_ = std::move(*made);
    return {};
  }
  if (made.error().code() != ErrorCode::kUnavailable) return fail(std::move(made).error());
  by_host_ = true;
  log::warn("device.digests_by_host", "device", device_.id(), "why", made.error());
  return {};
}

Result<void> BoxDigests::queue(std::span<const BoxBytes> boxes, Stream& stream) {
  TRY_VOID(reserve(boxes.size()));
  if (by_host_) return queue_copies(boxes, stream);
  return stream.digest(boxes, *digests_);
}

Result<void> BoxDigests::queue_copies(std::span<const BoxBytes> boxes, Stream& stream) {
  lengths_.clear();
  std::uint64_t bytes = 0;
  for (const BoxBytes& box : boxes) {
    lengths_.push_back(std::uint64_t{box.run_bytes} * box.rows * box.planes);
    bytes += lengths_.back();
  }
  copied_.resize(bytes);
  std::vector<Download> copies;
  std::byte* to = copied_.data();
  for (const BoxBytes& box : boxes) {
    for (std::uint32_t plane = 0; plane < box.planes; ++plane) {
      copies.push_back({box.address + plane * box.plane_stride, to, box.run_bytes, box.rows,
                        box.row_stride, box.run_bytes});
      to += std::uint64_t{box.run_bytes} * box.rows;
    }
  }
  return stream.download(copies);
}

std::vector<Digest> BoxDigests::values() const {
  if (!by_host_) {
    const auto values = digests_->values();
    return {values.begin(), values.end()};
  }
  std::vector<Digest> values;
  std::span<const std::byte> left = copied_;
  for (const std::uint64_t length : lengths_) {
    values.push_back(blake3(left.first(length)));
    left = left.subspan(length);
  }
  return values;
}

}  // namespace rekindle::bucket
