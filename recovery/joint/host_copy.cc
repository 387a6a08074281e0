#include "recovery/joint/host_copy.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "src/async/offload.h"
#include "src/tensor/checkpoint.h"

namespace rekindle::joint {

using async::Task;

namespace {

Result<PackedLayout> join(const TensorSet& tensors, std::vector<PackedLayout> ranks) {
  std::vector<SegmentSpec> specs;
  std::vector<LayoutEntry> entries;
  std::vector<std::string> headers;
  for (PackedLayout& rank : ranks) {
    const auto first = static_cast<std::uint32_t>(specs.size());
    for (const SegmentSpec& spec : rank.layout.segments()) specs.push_back(spec);
    for (LayoutEntry entry : rank.layout.entries()) {
      entry.segment += first;
      entries.push_back(std::move(entry));
    }
    std::ranges::move(rank.headers, std::back_inserter(headers));
  }
  std::ranges::sort(entries, {},
                    [](const LayoutEntry& entry) { return std::pair(entry.tensor, entry.box); });
  TRY(Layout layout, Layout::create(tensors, std::move(specs), std::move(entries)));
  return PackedLayout{std::move(layout), std::move(headers)};
}

}  // namespace

// pack_layout() gives the files of every rank the same names.
Result<PackedLayout> pack_rank(const JointPlan& plan, std::uint32_t rank) {
  const auto writes = plan.writes(rank);
  std::uint64_t bytes = 0;
  for (const auto& [tensor, box] : writes) {
    bytes += box.elements() * dtype_size_bytes(plan.tensors()[tensor].dtype);
  }
  TRY(PackedLayout packed,
      pack_layout(plan.tensors(), writes, store::published_segment_bytes(bytes)));
  const auto segments = packed.layout.segments();
  std::vector<SegmentSpec> named(segments.begin(), segments.end());
  for (SegmentSpec& segment : named)
    segment.name = fmt::format("rank-{:05}-{}", rank, segment.name);
  const auto entries = packed.layout.entries();
  TRY(packed.layout,
      Layout::create(plan.tensors(), std::move(named), {entries.begin(), entries.end()}));
  return packed;
}

Result<std::optional<Layout>> layout_of_host(const JointPlan& plan, std::uint32_t host) {
  std::vector<PackedLayout> ranks;
  for (const std::uint32_t rank : plan.ranks(host)) {
    TRY(PackedLayout packed, pack_rank(plan, rank));
    ranks.push_back(std::move(packed));
  }
  TRY(PackedLayout joined, join(plan.tensors(), std::move(ranks)));
  if (joined.layout.entries().empty()) return std::nullopt;
  return std::move(joined.layout);
}

Result<std::unique_ptr<HostCopy>> HostCopy::create(JointAgent& agent, ModelVersion id,
                                                   std::shared_ptr<const JointPlan> plan,
                                                   std::uint32_t host) {
  std::unique_ptr<HostCopy> copy(new HostCopy(agent, std::move(id), std::move(plan), host));
  for (const std::uint32_t rank : copy->plan_->ranks(host)) {
    TRY(auto packed, pack_rank(*copy->plan_, rank));
    copy->packed_.emplace(rank, std::move(packed));
  }
  return copy;
}

const PackedLayout* HostCopy::files_of(std::uint32_t rank) const {
  const auto found = packed_.find(rank);
  return found == packed_.end() ? nullptr : &found->second;
}

Task<Result<void>> HostCopy::stage(std::vector<store::FilledSegments> ranks) {
  const auto work = [this, &ranks]() -> Result<void> {
    std::vector<PackedLayout> packed;
    std::vector<std::shared_ptr<store::MappedSegment>> segments;
    std::vector<std::shared_ptr<const store::SealedSegment>> sealed;
    for (store::FilledSegments& rank : ranks) {
      packed.push_back(std::move(rank.packed));
      rank.sealed.resize(rank.segments.size());
      std::ranges::move(rank.sealed, std::back_inserter(sealed));
      std::ranges::move(rank.segments, std::back_inserter(segments));
    }
    TRY(PackedLayout joined, join(plan_->tensors(), std::move(packed)));
    if (joined.layout.entries().empty()) return {};
    const Layout layout = joined.layout;
    store::FilledSegments filled{plan_->tensors(), std::move(joined), std::move(segments),
                                 std::move(sealed)};
    TRY(staged_, agent_.store().stage_part(id_, std::move(filled)));
    part_ = std::make_unique<PartReader>(agent_.store(), agent_.digest_pool(), id_, plan_, host_,
                                         staged_, layout);
    return {};
  };
  co_return co_await async::offload(agent_.blocking_pool(), work);
}

Task<Result<void>> HostCopy::digest() {
  if (part_ == nullptr) co_return Result<void>();
  const auto work = [this] { return part_->leaves(); };
  CO_TRY(leaves_, co_await async::offload(agent_.blocking_pool(), work));
  co_return Result<void>();
}

// This host has digested these tiles itself, so it need not believe the lead.
Result<void> HostCopy::check_own_leaves(const Checkpoint& checkpoint) const {
  const std::span<const TileIndex> whole = part_->tiles().whole;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    if (checkpoint.tile_digests[whole[i]] == leaves_[i]) continue;
    const TensorIndex tensor = plan_->tiles().tensor_of(whole[i]);
    return fail(ErrorCode::kCorrupt,
                "{}: the lead has another digest of '{}' {} than this host; publish it again",
                id_.to_string(), plan_->tensors()[tensor].name,
                plan_->tiles().tile_box(whole[i]).to_string());
  }
  return {};
}

Task<Result<void>> HostCopy::commit(std::vector<Digest> leaves, std::vector<Digest> layouts,
                                    Digest root, std::vector<VersionSignature> signatures) {
  if (!lists_layout(layouts, part_->layout().digest())) {
    co_return fail(ErrorCode::kCorrupt,
                   "{}: the lead has other layouts than that of this host; publish it again",
                   id_.to_string());
  }
  const auto work = [this, &leaves, &layouts, &root,
                     &signatures]() -> Result<std::shared_ptr<const store::StoredVersion>> {
    TRY(auto checkpoint,
        Checkpoint::create(id_, plan_->tensors(), std::move(leaves), root, signatures));
    TRY_VOID(agent_.check_trusted(*checkpoint));
    TRY_VOID(check_own_leaves(*checkpoint));
    TRY(auto parts, part_->part_digests());
    TRY(auto staged, agent_.store().finish_part(staged_, std::move(checkpoint), std::move(parts),
                                                std::move(layouts)));
    return agent_.store().commit_staged(std::move(staged));
  };
  CO_TRY(auto stored, co_await async::offload(agent_.blocking_pool(), work));
  co_return co_await agent_.serve(std::move(stored));
}

Task<void> HostCopy::drop(std::vector<store::FilledSegments> untaken) {
  auto drop =
      [part = std::shared_ptr<PartReader>(std::move(part_)), staged = std::move(staged_),
       files = std::move(files_),
       rest = std::make_shared<std::vector<store::FilledSegments>>(std::move(untaken))]() mutable {
        part.reset();
        staged.reset();
        rest.reset();
        files.clear();
        return true;
      };
  auto dropped = async::offload(agent_.blocking_pool(), std::move(drop));
  co_await std::move(dropped);
}

}  // namespace rekindle::joint
