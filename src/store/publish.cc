#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include "src/base/failpoint.h"
#include "src/base/units.h"
#include "src/base/worker_pool.h"
#include "src/store/fault_guard.h"
#include "src/store/files.h"
#include "src/store/publish_copy.h"
#include "src/store/pull_copy.h"

// Publishing: every byte is read once. A thread copies a range of a file into its segment and
// digests the tiles in it before it takes the next.
namespace rekindle::store {

namespace {

constexpr std::uint64_t kUnitBytes = 4 * kMiB;

// Tiles [begin, end) of one layout entry, local to its tensor.
struct UnitPiece {
  std::uint32_t entry = 0;
  std::uint64_t tile_begin = 0;
  std::uint64_t tile_end = 0;
};

// A contiguous range of a segment file and the tiles that lie in it. One thread copies it and then
// digests it while the bytes are in its cache.
struct PublishUnit {
  std::uint32_t segment = 0;
  std::uint64_t offset_bytes = 0;
  std::uint64_t size_bytes = 0;
  std::vector<UnitPiece> pieces;
};

class UnitBuilder {
 public:
  explicit UnitBuilder(std::uint64_t target_bytes) : target_bytes_(target_bytes) {}

  void add(std::uint32_t segment, std::uint64_t offset, std::uint64_t bytes, UnitPiece piece) {
    const bool joins = !units_.empty() && units_.back().segment == segment &&
                       units_.back().offset_bytes + units_.back().size_bytes == offset &&
                       units_.back().size_bytes + bytes <= target_bytes_;
    if (!joins) units_.push_back({segment, offset, 0, {}});
    units_.back().size_bytes += bytes;
    units_.back().pieces.push_back(piece);
  }
  std::vector<PublishUnit> take() { return std::move(units_); }

 private:
  const std::uint64_t target_bytes_;
  std::vector<PublishUnit> units_;
};

// Units of about `target_bytes` that cover all entries of a layout of whole tensors. A range never
// splits a row of tiles, so wide tensors make larger ones. Headers are not covered.
std::vector<PublishUnit> publish_units(const TensorSet& tensors, const TileMap& tiles,
                                       const Layout& layout, std::uint64_t target_bytes) {
  const auto entries = layout.entries();
  std::vector<std::uint32_t> order(entries.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::pair(entries[a].segment, entries[a].offset_bytes) <
           std::pair(entries[b].segment, entries[b].offset_bytes);
  });
  UnitBuilder builder(target_bytes);
  for (const std::uint32_t i : order) {
    const LayoutEntry& entry = entries[i];
    const TensorInfo& tensor = tensors[entry.tensor];
    const TileGrid& grid = tiles.grid(entry.tensor);
    const std::uint64_t count = grid.tile_count();
    const std::uint64_t bytes = tensor.size_bytes();
    if (count == 0) continue;
    if (count == 1) {
      builder.add(entry.segment, entry.offset_bytes, bytes, {i, 0, 1});
      continue;
    }
    // Tiles with the same first coordinate make a slab: consecutive tiles, a contiguous range.
    const std::uint64_t rows = grid.tile_extent()[0];
    const std::uint64_t slabs = (tensor.shape[0] - 1) / rows + 1;
    const std::uint64_t slab_bytes = bytes / tensor.shape[0] * rows;
    const std::uint64_t slab_tiles = count / slabs;
    const std::uint64_t group = std::max<std::uint64_t>(1, target_bytes / slab_bytes);
    for (std::uint64_t slab = 0; slab < slabs; slab += group) {
      const std::uint64_t end = std::min(slabs, slab + group);
      const std::uint64_t begin_bytes = slab * slab_bytes;
      builder.add(entry.segment, entry.offset_bytes + begin_bytes,
                  std::min(bytes, end * slab_bytes) - begin_bytes,
                  {i, slab * slab_tiles, end * slab_tiles});
    }
  }
  return builder.take();
}

// Counts bytes and keeps the first error of many threads.
class Tally {
 public:
  Tally(std::uint64_t total, const std::function<void(const PublishProgress&)>& report)
      : report_(report), progress_{0, total} {}

  bool failed() const { return failed_.load(std::memory_order_relaxed); }
  void fail_with(Error error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
    failed_ = true;
  }
  void add(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    progress_.bytes_done += bytes;
    if (report_) report_(progress_);
  }
  Result<void> result() {
    if (error_) return fail(*std::move(error_));
    return {};
  }

 private:
  const std::function<void(const PublishProgress&)>& report_;
  std::mutex mutex_;
  PublishProgress progress_;    // guarded by mutex_
  std::optional<Error> error_;  // guarded by mutex_ until the threads are done
  std::atomic<bool> failed_ = false;
};

// Runs `run` for each unit on a pool with this name, until one fails.
template <typename Units, typename Run>
Result<void> run_units(const char* pool_name, const Units& units, Tally& tally, Run run) {
  WorkerPool pool(pool_name, store_threads(), 64);
  pool.parallel_for(units.size(), [&](std::size_t i) {
    if (tally.failed()) return;
    if (auto done = run(units[i]); !done) {
      tally.fail_with(std::move(done).error());
    } else {
      tally.add(units[i].size_bytes);
    }
  });
  return tally.result();
}

class Publisher {
 public:
  Publisher(const PublishSources& sources, const TileMap& tiles, PublishCopy& copy)
      : sources_(sources),
        tiles_(tiles),
        copy_(copy),
        digests_(tiles.tile_count()),
        digested_(tiles.tile_count()) {}

  // Takes over the segments of `filled` that no other process can write to. `sources.weights` has
  // all of them for reading. Null: publishes files.
  Result<std::vector<Digest>> run(const FilledSegments* filled,
                                  const std::function<void(const PublishProgress&)>& progress) {
    const auto specs = sources_.layout.segments();
    for (std::uint32_t i = 0; i < specs.size(); ++i) {
      bool there = false;
      const SealedSegment* const sealed = filled == nullptr ? nullptr : filled->seal_of(i);
      if (filled != nullptr) {
        TRY(there, copy_.take_over(specs[i], filled->segments[i], sealed));
      } else if (is_weights(i)) {
        TRY(there, copy_.add_clone(specs[i], sources_.weights[i]));
      }
      fill_.push_back(there ? 0 : 1);
      if (sealed != nullptr) {
        for (const auto& [tile, leaf] : sealed->leaves) {
          digests_[tile] = leaf;
          digested_[tile] = 1;
        }
      }
      if (there) continue;
      TRY_VOID(copy_.add_segment(specs[i]));
      TRY_VOID(fill_header(i));
    }
    map_files();
    const auto units = publish_units(sources_.tensors, tiles_, sources_.layout, kUnitBytes);
    Tally tally(sources_.layout.payload_bytes(), progress);
    TRY_VOID(
        run_units("rk-publish", units, tally, [this](const auto& unit) { return run_unit(unit); }));
    return std::move(digests_);
  }

 private:
  bool is_weights(std::uint32_t segment) const { return segment < sources_.weights.size(); }

  // The bytes before the tensors.
  Result<void> fill_header(std::uint32_t segment) {
    const auto bytes = copy_.segment(segment).writable();
    if (!is_weights(segment)) {
      std::memcpy(bytes.data(), sources_.files_header.data(), sources_.files_header.size());
      return {};
    }
    const SourceFile& source = sources_.weights[segment];
    return read_exactly(source.fd.get(), bytes.first(source.data_offset_bytes), 0, source.path);
  }

  // Finds the small file of each entry of the files segment: both are sorted by name.
  void map_files() {
    const auto entries = sources_.layout.entries();
    for (std::uint32_t i = 0; i < entries.size(); ++i) {
      if (!is_weights(entries[i].segment)) file_of_entry_.emplace(i, file_of_entry_.size());
    }
  }

  Result<void> fill_unit(const PublishUnit& unit) {
    const auto segment = copy_.segment(unit.segment).writable();
    if (is_weights(unit.segment)) {
      const SourceFile& source = sources_.weights[unit.segment];
      return read_exactly(source.fd.get(), segment.subspan(unit.offset_bytes, unit.size_bytes),
                          unit.offset_bytes, source.path);
    }
    for (const UnitPiece& piece : unit.pieces) {
      const LayoutEntry& entry = sources_.layout.entries()[piece.entry];
      const SourceFile& source = sources_.files[file_of_entry_.at(piece.entry)];
      // A file is U8 of rank 1: its tiles are consecutive ranges.
      const std::uint64_t tile_bytes = tiles_.grid(entry.tensor).tile_extent()[0];
      const std::uint64_t begin = piece.tile_begin * tile_bytes;
      const std::uint64_t end = std::min(source.size_bytes(), piece.tile_end * tile_bytes);
      TRY_VOID(read_exactly(source.fd.get(),
                            segment.subspan(entry.offset_bytes + begin, end - begin), begin,
                            source.path));
    }
    return {};
  }

  Result<void> run_unit(const PublishUnit& unit) {
    if (fill_[unit.segment]) TRY_VOID(fill_unit(unit));
    const MappedSegment& segment = copy_.segment(unit.segment);
    return guard_mapping_access(segment.path().filename().c_str(), [&] {
      for (const UnitPiece& piece : unit.pieces) digest(piece, segment.bytes());
    });
  }

  void digest(const UnitPiece& piece, std::span<const std::byte> segment) {
    const LayoutEntry& entry = sources_.layout.entries()[piece.entry];
    const TensorInfo& tensor = sources_.tensors[entry.tensor];
    const auto array = segment.subspan(entry.offset_bytes, tensor.size_bytes());
    const TileIndex first = tiles_.first_tile(entry.tensor);
    for (std::uint64_t tile = piece.tile_begin; tile < piece.tile_end; ++tile) {
      if (digested_[first + tile]) continue;
      digests_[first + tile] =
          digest_tile(tensor, tiles_.grid(entry.tensor), tile, array, entry.box);
    }
  }

  const PublishSources& sources_;
  const TileMap& tiles_;
  PublishCopy& copy_;
  std::vector<Digest> digests_;
  // Per tile: its leaf came with a sealed segment.
  std::vector<char> digested_;
  std::vector<char> fill_;  // per segment: to be copied
  std::map<std::uint32_t, std::size_t> file_of_entry_;
};

// Digests files where they lie.
class SourceDigester {
 public:
  SourceDigester(const PublishSources& sources, const TileMap& tiles)
      : sources_(sources), tiles_(tiles), digests_(tiles.tile_count()) {}

  Result<std::vector<Digest>> run(const std::function<void(const PublishProgress&)>& progress) {
    for (const auto* list : {&sources_.weights, &sources_.files}) {
      for (const SourceFile& file : *list) {
        if (file.size_bytes() == 0) {
          files_.push_back(nullptr);
          continue;
        }
        TRY(auto mapped, MappedSegment::open_read(fmt::format("/proc/self/fd/{}", file.fd.get()),
                                                  file.size_bytes()));
        files_.push_back(std::move(mapped));
      }
    }
    std::size_t small = sources_.weights.size();
    for (const LayoutEntry& entry : sources_.layout.entries()) {
      const bool weights = entry.segment < sources_.weights.size();
      place_.push_back(weights ? Place{entry.segment, entry.offset_bytes} : Place{small++, 0});
    }
    const auto units = publish_units(sources_.tensors, tiles_, sources_.layout, kUnitBytes);
    Tally tally(sources_.layout.payload_bytes(), progress);
    TRY_VOID(run_units("rk-sign", units, tally, [this](const auto& unit) { return digest(unit); }));
    return std::move(digests_);
  }

 private:
  struct Place {
    std::size_t file;
    std::uint64_t offset_bytes;
  };

  Result<void> digest(const PublishUnit& unit) {
    for (const UnitPiece& piece : unit.pieces) {
      const Place place = place_[piece.entry];
      const LayoutEntry& entry = sources_.layout.entries()[piece.entry];
      const TensorInfo& tensor = sources_.tensors[entry.tensor];
      const std::size_t small = place.file - std::min(place.file, sources_.weights.size());
      const SourceFile& source = place.file < sources_.weights.size() ? sources_.weights[place.file]
                                                                      : sources_.files[small];
      TRY_VOID(guard_mapping_access(source.path.c_str(), [&] {
        const auto array =
            files_[place.file]->bytes().subspan(place.offset_bytes, tensor.size_bytes());
        const TileIndex first = tiles_.first_tile(entry.tensor);
        for (std::uint64_t tile = piece.tile_begin; tile < piece.tile_end; ++tile) {
          digests_[first + tile] =
              digest_tile(tensor, tiles_.grid(entry.tensor), tile, array, entry.box);
        }
      }));
    }
    return {};
  }

  const PublishSources& sources_;
  const TileMap& tiles_;
  std::vector<Digest> digests_;
  // The weights, then the small files. Null: the file is empty.
  std::vector<std::unique_ptr<MappedSegment>> files_;
  // Of each entry of the layout. The small files come in the order of their entries.
  std::vector<Place> place_;
};

// The end of both ways of publishing: writes the copy's manifest, or finds the copy that is here
// already.
Result<std::shared_ptr<SegmentStore::Staged>> finish(StoreState& state, const ModelVersion& id,
                                                     std::unique_ptr<PublishCopy> copy,
                                                     PublishSources sources, const TileMap& tiles,
                                                     std::vector<Digest> digests) {
  const Digest root = checkpoint_root(id, sources.tensors, tiles, digests);
  TRY_VOID(state.check_root(id, root));
  TRY(auto checkpoint,
      Checkpoint::create(id, std::move(sources.tensors), std::move(digests), root));
  for (auto& version : state.find(id)) {
    if (version->verification->state() == CopyState::kVerified &&
        version->manifest.layout.payload_bytes() == checkpoint->tensors.total_bytes()) {
      const Manifest manifest = version->manifest;
      return std::make_shared<SegmentStore::Staged>(
          SegmentStore::Staged{manifest, nullptr, std::move(version)});
    }
  }
  Manifest manifest{std::move(checkpoint), std::move(sources.layout), state.next_generation(), {}};
  TRY_VOID(copy->write_manifest(manifest));
  return std::make_shared<SegmentStore::Staged>(
      SegmentStore::Staged{std::move(manifest), std::move(copy), nullptr});
}

}  // namespace

Result<void> check_headers(const FilledSegments& filled, PublishCopy& copy) {
  for (std::uint32_t i = 0; i < filled.segments.size(); ++i) {
    const std::string& header = filled.packed.headers[i];
    const std::string& name = filled.packed.layout.segments()[i].name;
    bool same = false;
    TRY_VOID(guard_mapping_access(name.c_str(), [&] {
      same = std::memcmp(copy.segment(i).bytes().data(), header.data(), header.size()) == 0;
    }));
    if (same) continue;
    return fail(ErrorCode::kCorrupt,
                "the header of segment {} was overwritten: write to the tensors' places only",
                name);
  }
  return {};
}

Result<Digest> root_of_files(const ModelVersion& id, std::span<const fs::path> paths,
                             const std::function<void(const PublishProgress&)>& progress) {
  TRY_VOID(check_model_name(id.model));
  TRY(const PublishSources sources, open_sources(paths));
  TRY(const TileMap tiles, TileMap::create(sources.tensors));
  TRY(const auto digests, SourceDigester(sources, tiles).run(progress));
  for (const SourceFile& file : sources.weights) TRY_VOID(file.check_unchanged());
  for (const SourceFile& file : sources.files) TRY_VOID(file.check_unchanged());
  return checkpoint_root(id, sources.tensors, tiles, digests);
}

Result<std::shared_ptr<SegmentStore::Staged>> stage_files(
    std::shared_ptr<StoreState> state, const ModelVersion& id, std::span<const fs::path> paths,
    const std::function<void(const PublishProgress&)>& progress) {
  TRY_VOID(check_model_name(id.model));
  TRY(PublishSources sources, open_sources(paths));
  TRY(const TileMap tiles, TileMap::create(sources.tensors));
  TRY(auto copy, PublishCopy::create(state, id, sources.layout.segment_bytes()));
  TRY_VOID(failpoint("store.stage.after_mkdir"));
  TRY(auto digests, Publisher(sources, tiles, *copy).run(nullptr, progress));
  for (const SourceFile& file : sources.weights) TRY_VOID(file.check_unchanged());
  for (const SourceFile& file : sources.files) TRY_VOID(file.check_unchanged());
  return finish(*state, id, std::move(copy), std::move(sources), tiles, std::move(digests));
}

Result<std::shared_ptr<SegmentStore::Staged>> stage_filled(
    std::shared_ptr<StoreState> state, const ModelVersion& id, FilledSegments filled,
    const std::function<void(const PublishProgress&)>& progress) {
  TRY_VOID(check_model_name(id.model));
  TRY(const TileMap tiles, TileMap::create(filled.tensors));
  TRY(auto copy, PublishCopy::create(state, id, filled.packed.layout.segment_bytes()));
  TRY_VOID(failpoint("store.stage.after_mkdir"));
  PublishSources sources{{}, {}, {}, filled.tensors, filled.packed.layout};
  for (std::size_t i = 0; i < filled.segments.size(); ++i) {
    TRY(SourceFile file, open_segment_as_source(*filled.segments[i]));
    file.data_offset_bytes = filled.packed.headers[i].size();
    sources.weights.push_back(std::move(file));
  }
  TRY(auto digests, Publisher(sources, tiles, *copy).run(&filled, progress));
  TRY_VOID(check_headers(filled, *copy));
  return finish(*state, id, std::move(copy), std::move(sources), tiles, std::move(digests));
}

}  // namespace rekindle::store
