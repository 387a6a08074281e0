#include "src/bucket/upload_verify.h"

#include <utility>

#include "src/base/log.h"

namespace rekindle::bucket {

Result<std::unique_ptr<UploadVerify>> UploadVerify::create(Means means, std::uint32_t slots,
                                                           std::size_t tiles, PartsOf parts_of) {
  if (means.leaves.size() != means.contents.tiles().tile_count()) {
    return fail(ErrorCode::kInvalid,
                "uploads cannot be verified: {} tile digests came for {} tiles",
                means.leaves.size(), means.contents.tiles().tile_count());
  }
  std::unique_ptr<UploadVerify> verify(new UploadVerify(means, std::move(parts_of)));
  for (std::uint32_t i = 0; i < slots; ++i) {
    verify->slots_.emplace_back(means.device);
    TRY_VOID(verify->slots_.back().digests.reserve(tiles));
  }
  return verify;
}

Result<void> UploadVerify::enqueue(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                                   Stream& stream) {
  Slot& mine = slots_[slot];
  mine.bucket = bucket;
  mine.at = at;
  mine.checks = checks_of(means_.contents, parts_of_(bucket));
  for (BoxBytes& box : mine.checks.boxes) box.address += at;
  mine.rests.reset();
  mine.refilled = false;
  return mine.digests.queue(mine.checks.boxes, stream);
}

std::optional<std::size_t> UploadVerify::wrong_box(Slot& slot) const {
  const auto values = slot.digests.values();
  if (const auto box = wrong_tile(slot.checks, values, means_.leaves)) return box;
  if (!slot.rests) {
    slot.rests = digests_of_rests(means_.contents, slot.checks, data_of(means_.segments));
  }
  const std::size_t tiles = slot.checks.tiles.size();
  for (std::size_t i = 0; i < slot.rests->size(); ++i) {
    if (values[tiles + i] != (*slot.rests)[i]) return tiles + i;
  }
  return std::nullopt;
}

Result<bool> UploadVerify::check(std::uint32_t slot) {
  Slot& mine = slots_[slot];
  const auto box = wrong_box(mine);
  if (!box) return true;
  mine.wrong = means_.contents.pieces()[mine.checks.piece_of(*box)].name;
  return false;
}

Result<bool> UploadVerify::refill(std::uint32_t slot, Stream& stream) {
  Slot& mine = slots_[slot];
  log::warn("device.wrong_bytes", "device", means_.device.id(), "bucket", mine.bucket, "tensor",
            mine.wrong, "after", mine.refilled ? "second upload" : "upload");
  if (std::exchange(mine.refilled, true)) return false;
  TRY_VOID(means_.fetch.enqueue(mine.bucket, mine.at, stream));
  ++refilled_;
  TRY_VOID(mine.digests.queue(mine.checks.boxes, stream));
  return true;
}

Error UploadVerify::wrong(std::uint32_t slot) const {
  return Error(
      ErrorCode::kCorrupt,
      fmt::format("on {}: bytes of tensor '{}' do not match their digest after two uploads "
                  "from host memory",
                  means_.device.id(), slots_[slot].wrong));
}

}  // namespace rekindle::bucket
