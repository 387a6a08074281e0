#include <algorithm>
#include <cstring>

#include "src/base/units.h"
#include "src/base/worker_pool.h"
#include "src/store/fault_guard.h"
#include "src/store/files.h"
#include "src/store/publish_copy.h"

// One host's part of a joint publication: its files are taken over at once, and get their manifest
// when the digests of all hosts are known.
namespace rekindle::store {

namespace {

constexpr std::uint64_t kUnitBytes = 16 * kMiB;

// Fills the last segment of `copy`, on several threads, from a file that another process may still
// write to.
Result<void> copy_file(const SourceFile& source, MappedSegment& segment) {
  const auto to = segment.writable();
  const std::size_t units = (to.size() + kUnitBytes - 1) / kUnitBytes;
  std::vector<Result<void>> done(units);
  WorkerPool pool("rk-publish", std::min(units, store_threads()), 64);
  pool.parallel_for(units, [&](std::size_t i) {
    const std::uint64_t begin = i * kUnitBytes;
    const std::uint64_t bytes = std::min<std::uint64_t>(kUnitBytes, to.size() - begin);
    done[i] = read_exactly(source.fd.get(), to.subspan(begin, bytes), begin, source.path);
  });
  for (auto& one : done) TRY_VOID(std::move(one));
  return {};
}

}  // namespace

Result<std::shared_ptr<SegmentStore::StagedPart>> stage_part(std::shared_ptr<StoreState> state,
                                                             const ModelVersion& id,
                                                             FilledSegments filled) {
  TRY_VOID(check_model_name(id.model));
  TRY(auto copy, PublishCopy::create(std::move(state), id, filled.packed.layout.segment_bytes()));
  const auto specs = filled.packed.layout.segments();
  for (std::uint32_t i = 0; i < specs.size(); ++i) {
    TRY(const SourceFile source, open_segment_as_source(*filled.segments[i]));
    TRY(const bool taken, copy->take_over(specs[i], filled.segments[i], filled.seal_of(i)));
    if (!taken) {
      TRY_VOID(copy->add_segment(specs[i]));
      TRY_VOID(copy_file(source, copy->segment(i)));
    }
  }
  TRY_VOID(check_headers(filled, *copy));
  std::map<TileIndex, Digest> leaves;
  for (const auto& sealed : filled.sealed) {
    if (sealed != nullptr) leaves.insert(sealed->leaves.begin(), sealed->leaves.end());
  }
  return std::make_shared<SegmentStore::StagedPart>(
      SegmentStore::StagedPart{id, std::move(filled.tensors), std::move(filled.packed.layout),
                               std::move(copy), std::move(leaves)});
}

Result<std::shared_ptr<SegmentStore::Staged>> finish_part(
    StoreState& state, std::shared_ptr<SegmentStore::StagedPart> part,
    std::shared_ptr<const Checkpoint> checkpoint, std::vector<PartDigest> part_digests,
    std::vector<Digest> part_layouts) {
  TRY_VOID(state.check_root(part->id, checkpoint->root));
  Manifest manifest{std::move(checkpoint),   part->layout, state.next_generation(),
                    std::move(part_digests), {},           std::move(part_layouts)};
  auto same = state.find(part->id, part->layout.digest());
  if (same != nullptr && same->verification->state() == CopyState::kVerified) {
    return std::make_shared<SegmentStore::Staged>(
        SegmentStore::Staged{std::move(manifest), nullptr, std::move(same)});
  }
  TRY_VOID(part->copy->write_manifest(manifest));
  return std::make_shared<SegmentStore::Staged>(
      SegmentStore::Staged{std::move(manifest), std::move(part->copy), nullptr});
}

}  // namespace rekindle::store
