#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

#include "src/base/units.h"
#include "src/base/worker_pool.h"
#include "src/store/fault_guard.h"
#include "src/store/files.h"
#include "src/store/segment_store.h"

// Segments of a publication that are digested before the others are filled.
namespace rekindle::store {

namespace {

// A third of the CPU time of other threads, where all CPUs are busy. At the lowest priority, a
// commit would wait too long there for the tile that is being digested.
constexpr int kNice = 5;
// One segment after another is digested while the trainer writes, so the last one, which it waits
// for, should be short. Files below 64 MiB are reused for their own size only.
constexpr std::uint64_t kSegmentsOfPublication = 16;
constexpr std::uint64_t kLeastSegmentBytes = 64 * kMiB;

}  // namespace

std::uint64_t published_segment_bytes(std::uint64_t total_bytes) {
  return std::clamp(total_bytes / kSegmentsOfPublication, kLeastSegmentBytes, kMaxSegmentBytes);
}

Result<std::shared_ptr<const SealedSegment>> seal_segment(const FilledSegments& filled,
                                                          const TileMap& tiles,
                                                          std::uint32_t segment,
                                                          const std::atomic<bool>& stop) {
  MappedSegment& file = *filled.segments[segment];
  // First this process, then the kernel says whether there are others.
  TRY_VOID(file.make_read_only());
  auto sealed = std::make_shared<SealedSegment>();
  TRY(sealed->lease, file.lease());
  if (sealed->lease == 0) {
    return fail(ErrorCode::kUnavailable,
                "segment {} is digested later: nobody can tell whether a process may write to it",
                file.path().string());
  }
  struct Tile {
    const LayoutEntry* entry;
    std::uint64_t local;
    std::optional<Digest> leaf;
  };
  std::vector<Tile> whole;
  for (const LayoutEntry& entry : filled.packed.layout.entries()) {
    if (entry.segment != segment) continue;
    const TileGrid& grid = tiles.grid(entry.tensor);
    for (std::uint64_t local = 0; local < grid.tile_count(); ++local) {
      if (contains(entry.box, grid.tile_box(local))) whole.push_back({&entry, local, {}});
    }
  }
  const auto digest_one = [&](std::size_t i) {
    if (stop) return;
    // The trainer's copies go first: it waits for them.
    (void)::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNice);
    // A tile that cannot be read has no leaf. The error comes when the segment is staged.
    (void)guard_mapping_access(file.path().filename().c_str(), [&] {
      const LayoutEntry& entry = *whole[i].entry;
      const TensorInfo& tensor = filled.tensors[entry.tensor];
      const auto array = file.bytes().subspan(
          entry.offset_bytes, entry.box.elements() * dtype_size_bytes(tensor.dtype));
      whole[i].leaf =
          digest_tile(tensor, tiles.grid(entry.tensor), whole[i].local, array, entry.box);
    });
  };
  {
    WorkerPool pool("rk-publish", std::clamp<std::size_t>(whole.size(), 1, store_threads()), 64);
    pool.parallel_for(whole.size(), digest_one);
  }
  for (const Tile& tile : whole) {
    if (!tile.leaf) continue;
    sealed->leaves.emplace(
        static_cast<TileIndex>(tiles.first_tile(tile.entry->tensor) + tile.local), *tile.leaf);
  }
  return sealed;
}

}  // namespace rekindle::store
