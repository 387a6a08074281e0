#include <algorithm>
#include <utility>

#include "src/base/failpoint.h"
#include "src/store/fault_guard.h"
#include "src/store/files.h"
#include "src/store/resume_file.h"
#include "src/store/store_directory.h"
#include "src/store/store_state.h"
#include "src/tensor/held_tile.h"

namespace rekindle::store {

namespace {

// Ends the leases, because the pull that continues this copy writes to the files.
Result<void> check_nobody_writes(const StoredVersion& copy) {
  TRY_VOID(copy.verification->stamp());  // the files are there, under their names, and whole
  for (const auto& segment : copy.segments) {
    TRY(const std::uint64_t lease, segment->lease());
    segment->end_lease();
    if (lease != 0) continue;
    return fail(ErrorCode::kUnavailable, "nobody can tell whether another process may write to {}",
                segment->path().string());
  }
  return {};
}

// Everything before the first tensor, byte for byte.
Result<std::vector<std::string>> read_headers(const StoredVersion& copy) {
  const Layout& layout = copy.manifest.layout;
  std::vector<std::uint64_t> sizes;
  for (const SegmentSpec& spec : layout.segments()) sizes.push_back(spec.size_bytes);
  for (const LayoutEntry& entry : layout.entries()) {
    if (entry.box.empty()) continue;
    sizes[entry.segment] = std::min(sizes[entry.segment], entry.offset_bytes);
  }
  std::vector<std::string> headers(sizes.size());
  TRY_VOID(guard_mapping_access("a segment", [&] {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const auto bytes = copy.segments[i]->bytes().first(sizes[i]);
      headers[i].assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }
  }));
  return headers;
}

// Writes the resume file of a pull that has verified all tiles but `bad`.
Result<void> write_resume_file(const StoredVersion& copy, std::span<const TileIndex> bad) {
  const Manifest& manifest = copy.manifest;
  const Checkpoint& checkpoint = *manifest.checkpoint;
  const LayoutTiles tiles = tiles_of_layout(checkpoint, manifest.layout);
  const std::filesystem::path path = copy.directory / kResumeName;
  TRY_VOID(unlink_if_present(path));
  TRY(const auto resume,
      ResumeFile::open(path, {checkpoint.root, manifest.layout.digest(),
                              checkpoint.tiles.tile_count(), tiles.partial, tiles.proofs_begin}));
  const auto is_bad = [&](TileIndex tile) { return std::ranges::binary_search(bad, tile); };
  const std::vector<TileIndex> held = tiles.held.tiles();
  return guard_mapping_access(kResumeName.data(), [&] {
    for (const TileIndex tile : held) {
      if (!is_bad(tile) && !tiles.is_partial(tile)) resume->mark(tile);
    }
    for (const PartDigest& part : manifest.part_digests) {
      if (is_bad(part.tile)) continue;
      if (!manifest.part_proofs.empty()) {
        const std::span<char> proofs = resume->proofs(part.tile);
        std::ranges::copy_n(manifest.part_proofs.data() + part.proofs_begin, std::ssize(proofs),
                            proofs.data());
      }
      resume->mark_partial(part.tile, part.digest);
    }
  });
}

}  // namespace

Result<SetAside> describe_copy(const StoredVersion& copy) {
  TRY(auto headers, read_headers(copy));
  return SetAside{copy.manifest.checkpoint, {copy.manifest.layout, std::move(headers)}};
}

// A crash before the rename leaves the committed copy, which the next open verifies. A crash after
// it leaves an unfinished pull.
Result<SetAside> set_aside(StoreState& state, const StoredVersion& copy,
                           std::span<const TileIndex> bad) {
  TRY_VOID(check_nobody_writes(copy));
  TRY(SetAside rest, describe_copy(copy));
  if (!state.take_off(copy)) {
    return fail(ErrorCode::kNotFound, "{} is not in the store any more", copy.directory.string());
  }
  const auto put_aside = [&]() -> Result<void> {
    TRY_VOID(write_resume_file(copy, bad));
    TRY_VOID(failpoint("store.set_aside.after_resume"));
    TRY_VOID(rename_file(copy.directory / kManifestName, copy.directory / kPartialManifestName));
    return sync_directory(copy.directory);
  };
  auto done = put_aside();
  state.release(copy.directory, rest.checkpoint->id, disk_bytes(copy.directory));
  TRY_VOID(std::move(done));
  return rest;
}

}  // namespace rekindle::store
