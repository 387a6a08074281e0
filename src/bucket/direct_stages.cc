#include "src/bucket/direct_stages.h"

#include <utility>

namespace rekindle::bucket {

std::vector<DirectBucket> direct_buckets(const Contents& contents, const Plan& plan) {
  std::vector<DirectBucket> direct;
  for (std::size_t bucket = 0; bucket < plan.size(); ++bucket) {
    const auto parts = plan.parts(bucket);
    const BucketChecks checks = checks_of(contents, parts);
    if (!checks.rests.empty() || checks.tiles.empty()) continue;
    DirectBucket& added = direct.emplace_back(DirectBucket{bucket, {}});
    for (const Part& part : parts) {
      if (part.bytes == 0) continue;
      const TensorIndex tensor = contents.pieces()[part.piece].tensor;
      added.entries.push_back({tensor, box_of(contents, part), 0, part.at});
    }
  }
  return direct;
}

std::optional<std::size_t> DirectFetch::next() {
  if (next_ == buckets_.size()) return std::nullopt;
  return buckets_[next_++];
}

Result<void> DirectFetch::enqueue(std::size_t bucket, DeviceAddress to, Stream& /*stream*/) {
  return read(bucket, to, {});
}

Result<void> DirectFetch::read(std::size_t bucket, DeviceAddress to,
                               std::span<const TileIndex> wrong) {
  const auto slot = static_cast<std::uint32_t>((to - slots_.at(0)) / slots_.bucket_bytes);
  TRY_VOID(reader_.read(bucket, slot, wrong));
  auto seen = device_.see_nic_writes();
  if (!seen) reader_.give_up();
  return seen;
}

DirectVerify::DirectVerify(const Means& means, PartsOf parts_of)
    : SlotVerify({means.device, means.contents, means.leaves, "direct read", "second direct read"}),
      means_(means),
      parts_of_(std::move(parts_of)) {}

Result<std::unique_ptr<DirectVerify>> DirectVerify::create(Means means, std::uint32_t slots,
                                                           std::size_t tiles, PartsOf parts_of) {
  std::unique_ptr<DirectVerify> verify(new DirectVerify(means, std::move(parts_of)));
  TRY_VOID(verify->make_slots(slots, tiles));
  return verify;
}

Result<void> DirectVerify::enqueue(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                                   Stream& stream) {
  Slot& mine = begin(bucket, slot, at);
  mine.shares.push_back({0, at, checks_of(means_.contents, parts_of_(bucket)), {}});
  return queue(mine, stream);
}

// Direct buckets have no rests. One that has some anyway does not pass.
std::optional<std::size_t> DirectVerify::wrong_rest(const Slot& /*slot*/, Share& /*share*/,
                                                    std::span<const Digest> /*values*/) {
  return 0;
}

Result<bool> DirectVerify::fill_again(Slot& slot, Stream& /*stream*/) {
  const auto values = slot.digests.values();
  const auto& tiles = slot.shares.front().checks.tiles;
  std::vector<TileIndex> wrong;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    if (values[i] != means_.leaves[tiles[i].tile]) wrong.push_back(tiles[i].tile);
  }
  TRY_VOID(means_.fetch.read(slot.bucket, slot.at, wrong));
  return true;
}

const char* DirectVerify::after(const Slot& /*slot*/) const { return "two direct reads"; }

}  // namespace rekindle::bucket
