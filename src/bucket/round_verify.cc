#include "src/bucket/round_verify.h"

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

Digest seal_of(std::span<const Digest> rests) { return blake3(std::as_bytes(rests)); }

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

}  // namespace

void PinnedDigests::Free::operator()(Digest* memory) const {
  ::operator delete (memory, std::align_val_t{kPage});
}

Result<std::unique_ptr<PinnedDigests>> PinnedDigests::create(Device& device, std::size_t count) {
  const std::size_t bytes = round_up(std::max<std::size_t>(count, 1) * sizeof(Digest), kPage);
  auto* const memory = static_cast<Digest*>(::operator new (bytes, std::align_val_t{kPage}));
  std::uninitialized_default_construct_n(memory, count);
  std::unique_ptr<PinnedDigests> made(new PinnedDigests(memory, count));
  // Memory that is not pinned works, too.
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
  seal = seal_of(digests_of_rests(contents_, checks, data_of(segments_)));
  const Upload upload{.from = reinterpret_cast<const std::byte*>(&seal),
                      .to = to + plan_.seal_at(),
                      .run_bytes = sizeof(seal)};
  return stream.upload({&upload, 1});
}

RoundVerify::RoundVerify(Means means, OwnCopy own_copy, std::unique_ptr<PinnedDigests> seals)
    : means_(means), own_copy_(std::move(own_copy)), seals_(std::move(seals)) {}

Result<std::unique_ptr<RoundVerify>> RoundVerify::create(Means means, std::uint32_t slots,
                                                         OwnCopy own_copy) {
  if (means.leaves.size() != means.contents.tiles().tile_count()) {
    return fail(ErrorCode::kInvalid,
                "what a round brings cannot be verified: there are digests of {} tiles, of {}",
                means.leaves.size(), means.contents.tiles().tile_count());
  }
  TRY(auto seals, PinnedDigests::create(means.device, std::size_t{slots} * means.plan.shares()));
  std::unique_ptr<RoundVerify> verify(
      new RoundVerify(means, std::move(own_copy), std::move(seals)));
  const std::size_t boxes = most_tiles(means.plan);
  for (std::uint32_t i = 0; i < slots; ++i) {
    verify->slots_.emplace_back(means.device);
    TRY_VOID(verify->slots_.back().digests.reserve(boxes));
  }
  return verify;
}

Result<void> RoundVerify::enqueue(std::size_t bucket, std::uint32_t slot, DeviceAddress at,
                                  Stream& stream) {
  Slot& mine = slots_[slot];
  mine.bucket = bucket;
  mine.at = at;
  mine.refilled = false;
  mine.shares.clear();
  for (std::uint32_t share = 0; share < means_.plan.shares(); ++share) {
    const Plan& plan = means_.plan.plan_of(share);
    if (bucket >= plan.size()) continue;
    mine.shares.push_back({share, checks_of(means_.contents, plan.parts(bucket)), {}});
  }
  return queue(slot, stream);
}

Result<void> RoundVerify::queue(std::uint32_t slot, Stream& stream) {
  Slot& mine = slots_[slot];
  boxes_.clear();
  std::vector<Download> seals;
  for (const Share& share : mine.shares) {
    const DeviceAddress from = mine.at + share.share * means_.plan.share_bytes();
    for (BoxBytes box : share.checks.boxes) {
      box.address += from;
      boxes_.push_back(box);
    }
    if (share.checks.rests.empty() || share.came) continue;
    Digest& seal = seals_->all()[slot * means_.plan.shares() + share.share];
    seals.push_back({.from = from + means_.plan.seal_at(),
                     .to = reinterpret_cast<std::byte*>(&seal),
                     .bytes = sizeof(seal)});
  }
  TRY_VOID(mine.digests.queue(boxes_, stream));
  if (seals.empty()) return {};
  return stream.download(seals);
}

// `values`: of its boxes.
bool RoundVerify::is_right(const Share& share, std::span<const Digest> values, const Digest& seal,
                           std::string& wrong) const {
  const BucketChecks& checks = share.checks;
  const auto fails = [&](std::size_t box) {
    wrong = means_.contents.pieces()[checks.piece_of(box)].name;
    return false;
  };
  if (const auto box = wrong_tile(checks, values, means_.leaves)) return fails(*box);
  const auto rests = values.subspan(checks.tiles.size());
  if (rests.empty() || seal == seal_of(rests)) return true;
  if (!share.came) return fails(checks.tiles.size());
  for (std::size_t i = 0; i < rests.size(); ++i) {
    if (rests[i] != (*share.came)[i]) return fails(checks.tiles.size() + i);
  }
  return true;
}

Result<bool> RoundVerify::check(std::uint32_t slot) {
  Slot& mine = slots_[slot];
  const auto values = mine.digests.values();
  std::span<const Digest> left = values;
  for (const Share& share : mine.shares) {
    const std::size_t count = share.checks.boxes.size();
    const Digest& seal = seals_->all()[slot * means_.plan.shares() + share.share];
    if (!is_right(share, left.first(count), seal, mine.wrong)) return false;
    left = left.subspan(count);
  }
  return true;
}

Result<bool> RoundVerify::refill(std::uint32_t slot, Stream& stream) {
  Slot& mine = slots_[slot];
  log::warn("device.wrong_bytes", "device", means_.device.id(), "bucket", mine.bucket, "tensor",
            mine.wrong, "after", mine.refilled ? "upload" : "broadcast");
  if (std::exchange(mine.refilled, true)) return false;
  TRY(const auto fetches, own_copy_());
  for (const Share& share : mine.shares) {
    fetches[share.share]->wait_for_no_pins();
    if (!fetches[share.share]->take(mine.bucket)) {
      mine.refilled = false;
      return false;
    }
  }
  const auto values = mine.digests.values();
  auto value = values.begin();
  for (Share& share : mine.shares) {
    const DeviceAddress to = mine.at + share.share * means_.plan.share_bytes();
    TRY_VOID(fetches[share.share]->enqueue(mine.bucket, to, stream));
    const auto end = value + static_cast<std::ptrdiff_t>(share.checks.boxes.size());
    share.came.emplace(value + static_cast<std::ptrdiff_t>(share.checks.tiles.size()), end);
    value = end;
  }
  ++refilled_;
  TRY_VOID(queue(slot, stream));
  return true;
}

Error RoundVerify::wrong(std::uint32_t slot) const {
  const Slot& mine = slots_[slot];
  return Error(
      ErrorCode::kCorrupt,
      fmt::format("on {}: bytes of tensor '{}' do not match their digest after broadcast{}",
                  means_.device.id(), mine.wrong,
                  mine.refilled ? " and after upload from host memory"
                                : ", and this host has no copy to take them from"));
}

}  // namespace rekindle::bucket
