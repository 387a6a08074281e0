#include "src/bucket/bucket_verify.h"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "src/base/blake3.h"
#include "src/base/log.h"
#include "src/base/units.h"

namespace rekindle::bucket {

namespace {

constexpr std::size_t kPage = 4096;

Digest seal_over(std::span<const Digest> rests) { return blake3(std::as_bytes(rests)); }

// Of all shares; tiles that lie in several boxes are counted once for each bucket.
std::size_t most_tiles(const RoundPlan& plan) {
  std::size_t most = 0;
  for (std::size_t bucket = 0; bucket < plan.size(); ++bucket) {
    std::size_t tiles = 0;
    for (std::uint32_t share = 0; share < plan.shares(); ++share) {
      if (bucket < plan.plan_of(share).size()) tiles += plan.plan_of(share).tile_count(bucket);
    }
    most = std::max(most, tiles);
  }
  return most;
}

std::optional<std::size_t> first_difference(std::span<const Digest> a, std::span<const Digest> b) {
  const auto [in_a, in_b] = std::ranges::mismatch(a, b);
  if (in_a == a.end()) return std::nullopt;
  return static_cast<std::size_t>(in_a - a.begin());
}

}  // namespace

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

// --- slots

Result<void> SlotVerify::make_slots(std::uint32_t count, std::size_t tiles) {
  if (subject_.leaves.size() != subject_.contents.tiles().tile_count()) {
    return fail(ErrorCode::kInvalid, "{}s cannot be verified: {} tile digests came for {} tiles",
                subject_.first, subject_.leaves.size(), subject_.contents.tiles().tile_count());
  }
  for (std::uint32_t i = 0; i < count; ++i) {
    slots_.emplace_back(subject_.device);
    TRY_VOID(slots_.back().digests.reserve(tiles));
  }
  return {};
}

SlotVerify::Slot& SlotVerify::begin(std::size_t bucket, std::uint32_t slot, DeviceAddress at) {
  Slot& mine = slots_[slot];
  mine.bucket = bucket;
  mine.at = at;
  mine.refilled = false;
  mine.shares.clear();
  return mine;
}

Result<void> SlotVerify::queue(Slot& slot, Stream& stream) {
  boxes_.clear();
  for (const Share& share : slot.shares) {
    for (BoxBytes box : share.checks.boxes) {
      box.address += share.at;
      boxes_.push_back(box);
    }
  }
  return slot.digests.queue(boxes_, stream);
}

Result<bool> SlotVerify::check(std::uint32_t slot) {
  Slot& mine = slots_[slot];
  const auto values = mine.digests.values();
  std::span<const Digest> left = values;
  for (Share& share : mine.shares) {
    const BucketChecks& checks = share.checks;
    const auto own = left.first(checks.boxes.size());
    left = left.subspan(own.size());
    auto box = wrong_tile(checks, own, subject_.leaves);
    const std::size_t tiles = checks.tiles.size();
    if (!box && own.size() > tiles) {
      if (const auto rest = wrong_rest(mine, share, own.subspan(tiles))) box = tiles + *rest;
    }
    if (!box) continue;
    mine.wrong = subject_.contents.pieces()[checks.piece_of(*box)].name();
    return false;
  }
  return true;
}

Result<bool> SlotVerify::refill(std::uint32_t slot, Stream& stream) {
  Slot& mine = slots_[slot];
  log::warn("device.wrong_bytes", "device", subject_.device.id(), "bucket", mine.bucket, "tensor",
            mine.wrong, "after", mine.refilled ? subject_.again : subject_.first);
  if (mine.refilled) return false;
  TRY(mine.refilled, fill_again(mine, stream));
  if (!mine.refilled) return false;
  ++refilled_;
  TRY_VOID(queue(mine, stream));
  return true;
}

Error SlotVerify::wrong(std::uint32_t slot) const {
  const Slot& mine = slots_[slot];
  return Error(ErrorCode::kCorrupt,
               fmt::format("on {}: bytes of tensor '{}' do not match their digest after {}",
                           subject_.device.id(), mine.wrong, after(mine)));
}

// --- uploads

UploadVerify::UploadVerify(const Means& means, PartsOf parts_of)
    : SlotVerify({means.device, means.contents, means.leaves, "upload", "second upload"}),
      means_(means),
      parts_of_(std::move(parts_of)) {}

Result<std::unique_ptr<UploadVerify>> UploadVerify::create(Means means, std::uint32_t slots,
                                                           std::size_t tiles, PartsOf parts_of) {
  std::unique_ptr<UploadVerify> verify(new UploadVerify(means, std::move(parts_of)));
  TRY_VOID(verify->make_slots(slots, tiles));
  return verify;
}

Result<void> UploadVerify::enqueue(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                                   Stream& stream) {
  Slot& mine = begin(bucket, slot, at);
  mine.shares.push_back({0, at, checks_of(means_.contents, parts_of_(bucket)), {}});
  return queue(mine, stream);
}

std::optional<std::size_t> UploadVerify::wrong_rest(const Slot& /*slot*/, Share& share,
                                                    std::span<const Digest> values) {
  if (!share.rests) {
    share.rests = digests_of_rests(means_.contents, share.checks, data_of(means_.segments));
  }
  return first_difference(values, *share.rests);
}

Result<bool> UploadVerify::fill_again(Slot& slot, Stream& stream) {
  TRY_VOID(means_.fetch.enqueue(slot.bucket, slot.at, stream));
  return true;
}

const char* UploadVerify::after(const Slot& /*slot*/) const {
  return "two uploads from host memory";
}

// --- rounds

void PinnedDigests::Free::operator()(Digest* memory) const {
  ::operator delete (memory, std::align_val_t{kPage});
}

Result<std::unique_ptr<PinnedDigests>> PinnedDigests::create(Device& device, std::size_t count) {
  const std::size_t bytes = round_up(std::max<std::size_t>(count, 1) * sizeof(Digest), kPage);
  auto* const memory = static_cast<Digest*>(::operator new (bytes, std::align_val_t{kPage}));
  std::uninitialized_default_construct_n(memory, count);
  std::unique_ptr<PinnedDigests> made(new PinnedDigests(memory, count));
  // Memory that is not pinned works as well.
  auto pin = device.pin({reinterpret_cast<const std::byte*>(memory), bytes});
  if (pin) made->pin_ = std::move(*pin);
  return made;
}

RoundSeal::RoundSeal(const RoundPlan& plan, const Contents& contents,
                     SegmentFetch::Segments segments, std::uint32_t share,
                     std::unique_ptr<PinnedDigests> seals)
    : plan_(plan),
      contents_(contents),
      segments_(std::move(segments)),
      share_(share),
      seals_(std::move(seals)) {}

Result<std::unique_ptr<RoundSeal>> RoundSeal::create(Device& device, const RoundPlan& plan,
                                                     const Contents& contents,
                                                     const SegmentFetch::Segments& segments,
                                                     std::uint32_t share) {
  TRY(auto seals, PinnedDigests::create(device, plan.plan_of(share).size()));
  return std::unique_ptr<RoundSeal>(
      new RoundSeal(plan, contents, segments, share, std::move(seals)));
}

Result<void> RoundSeal::enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) {
  const BucketChecks checks = checks_of(contents_, plan_.plan_of(share_).parts(bucket));
  if (checks.rests.empty()) return {};
  Digest& seal = seals_->all()[bucket];
  seal = seal_over(digests_of_rests(contents_, checks, data_of(segments_)));
  const Upload upload{.from = reinterpret_cast<const std::byte*>(&seal),
                      .to = to + plan_.seal_at(),
                      .run_bytes = sizeof(seal)};
  return stream.upload({&upload, 1});
}

RoundVerify::RoundVerify(const Means& means, OwnCopy own_copy, std::unique_ptr<PinnedDigests> seals)
    : SlotVerify({means.device, means.contents, means.leaves, "broadcast", "upload"}),
      means_(means),
      own_copy_(std::move(own_copy)),
      seals_(std::move(seals)) {}

Result<std::unique_ptr<RoundVerify>> RoundVerify::create(Means means, std::uint32_t slots,
                                                         OwnCopy own_copy) {
  TRY(auto seals, PinnedDigests::create(means.device, std::size_t{slots} * means.plan.shares()));
  std::unique_ptr<RoundVerify> verify(
      new RoundVerify(means, std::move(own_copy), std::move(seals)));
  TRY_VOID(verify->make_slots(slots, most_tiles(means.plan)));
  return verify;
}

Digest& RoundVerify::seal_of(const Slot& slot, const Share& share) {
  return seals_->all()[number_of(slot) * means_.plan.shares() + share.share];
}

Result<void> RoundVerify::enqueue(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                                  Stream& stream) {
  Slot& mine = begin(bucket, slot, at);
  std::vector<Download> seals;
  for (std::uint32_t i = 0; i < means_.plan.shares(); ++i) {
    const Plan& plan = means_.plan.plan_of(i);
    if (bucket >= plan.size()) continue;
    const Share& share = mine.shares.emplace_back(Share{
        i, at + i * means_.plan.share_bytes(), checks_of(means_.contents, plan.parts(bucket)), {}});
    if (share.checks.rests.empty()) continue;
    seals.push_back({.from = share.at + means_.plan.seal_at(),
                     .to = reinterpret_cast<std::byte*>(&seal_of(mine, share)),
                     .bytes = sizeof(Digest)});
  }
  TRY_VOID(queue(mine, stream));
  if (seals.empty()) return {};
  return stream.download(seals);
}

std::optional<std::size_t> RoundVerify::wrong_rest(const Slot& slot, Share& share,
                                                   std::span<const Digest> values) {
  if (seal_of(slot, share) == seal_over(values)) return std::nullopt;
  if (!share.rests) return 0;
  return first_difference(values, *share.rests);
}

Result<bool> RoundVerify::fill_again(Slot& slot, Stream& stream) {
  TRY(const auto fetches, own_copy_());
  for (const Share& share : slot.shares) {
    fetches[share.share]->wait_for_no_pins();
    if (!fetches[share.share]->take(slot.bucket)) return false;
  }
  const auto values = slot.digests.values();
  auto value = values.begin();
  for (Share& share : slot.shares) {
    TRY_VOID(fetches[share.share]->enqueue(slot.bucket, share.at, stream));
    const auto end = value + static_cast<std::ptrdiff_t>(share.checks.boxes.size());
    share.rests.emplace(value + static_cast<std::ptrdiff_t>(share.checks.tiles.size()), end);
    value = end;
  }
  return true;
}

const char* RoundVerify::after(const Slot& slot) const {
  return slot.refilled ? "broadcast and after upload from host memory"
                       : "broadcast, and this host has no copy to take them from";
}

}  // namespace rekindle::bucket
