#include "recovery/pull/tile_verifier.h"

#include <atomic>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "src/base/blake3.h"
#include "src/store/fault_guard.h"
#include "src/tensor/held_tile.h"
#include "src/tensor/tile_proof.h"

namespace rekindle::pull {

using transport::Verdict;

TileVerifier::TileVerifier(std::shared_ptr<store::PendingVersion> copy,
                           std::shared_ptr<VerifiedTiles> verified)
    : copy_(std::move(copy)),
      verified_(std::move(verified)),
      checkpoint_(*copy_->manifest().checkpoint),
      layout_(copy_->manifest().layout) {}

std::span<const std::byte> TileVerifier::array_of(const LayoutEntry& entry) const {
  const std::uint64_t bytes =
      entry.box.elements() * dtype_size_bytes(checkpoint_.tensors[entry.tensor].dtype);
  return copy_->segment(entry.segment).subspan(entry.offset_bytes, bytes);
}

const LayoutEntry* TileVerifier::entry_holding(TensorIndex tensor, const Box& box) const {
  for (const auto& entry : layout_.entries_of(tensor)) {
    if (contains(entry.box, box)) return &entry;
  }
  return nullptr;
}

bool TileVerifier::scatter(const planner::Expansion& expansion, const std::byte* staging) const {
  const auto written = store::guard_mapping_access("the destination", [&] {
    for (const auto& piece : expansion.scatter) {
      const auto& copy = piece.copy;
      std::byte* base = copy_->segment(piece.local_segment).data() + copy.dst_offset;
      for (std::uint64_t i = 0; i < copy.count; ++i) {
        std::memcpy(base + i * copy.dst_stride, staging + copy.src_offset + i * copy.src_stride,
                    copy.run_bytes);
      }
    }
  });
  return written.has_value();
}

// A file that was cut short reads as zeros up to the end of its last page, so bytes may differ
// although every access succeeds.
Verdict TileVerifier::compare(const Digest& expected, const std::function<Digest()>& digest) const {
  bool good = false;
  const auto read =
      store::guard_mapping_access("the destination", [&] { good = digest() == expected; });
  if (!read) return Verdict::kLocalFault;
  if (good) return Verdict::kAccept;
  return copy_->check_sizes() ? Verdict::kRetry : Verdict::kLocalFault;
}

Verdict TileVerifier::verify_tile(const planner::TileWork& work, const std::byte* staging) const {
  const TensorInfo& info = checkpoint_.tensors[work.tensor];
  const TileGrid& grid = checkpoint_.tiles.grid(work.tensor);
  const std::uint64_t local_tile = work.tile - checkpoint_.tiles.first_tile(work.tensor);
  const Digest& expected = checkpoint_.tile_digests[work.tile];
  if (staging != nullptr) {
    const std::uint64_t bytes = work.box.elements() * dtype_size_bytes(info.dtype);
    return verify_staged(work, {staging + work.staging_offset, static_cast<std::size_t>(bytes)});
  }
  const LayoutEntry* entry = entry_holding(work.tensor, work.box);
  if (entry == nullptr) return Verdict::kRetry;
  return compare(expected,
                 [&] { return digest_tile(info, grid, local_tile, array_of(*entry), entry->box); });
}

// A proof has the digests of all that lies beside its part. With the part's own digests that is the
// leaf, so a tile with one part is hashed only once.
Verdict TileVerifier::verify_staged(const planner::TileWork& work,
                                    std::span<const std::byte> tile) const {
  const std::vector<KeptProof> kept = kept_proofs(checkpoint_, layout_, work.tile);
  std::vector<std::string> proofs;
  for (const KeptProof& proof : kept) proofs.push_back(prove_range(tile, proof.range));
  const auto leaf = [&]() -> Digest {
    if (kept.empty()) return blake3(tile);
    const TileRange range = kept.front().range;
    return *leaf_by_proof(tile.subspan(range.begin, range.end - range.begin), range, tile.size(),
                          proofs.front());
  };
  if (leaf() != checkpoint_.tile_digests[work.tile]) return Verdict::kRetry;
  for (std::size_t i = 0; i < kept.size(); ++i) {
    copy_->keep_proof(work.tile, kept[i].part, proofs[i]);
  }
  return Verdict::kAccept;
}

Verdict TileVerifier::verify_part(const planner::TileWork& work, std::string_view proof) const {
  const LayoutEntry* entry = entry_holding(work.tensor, work.box);
  if (entry == nullptr) return Verdict::kRetry;
  const std::uint64_t element_bytes = dtype_size_bytes(checkpoint_.tensors[work.tensor].dtype);
  // Copied out first: leaf_by_proof() owns memory, and a fault in the mapping leaves by longjmp.
  std::vector<std::byte> part(work.box.elements() * element_bytes);
  const auto read = store::guard_mapping_access("the destination", [&] {
    copy_box(work.box, array_of(*entry), entry->box, part, work.box, element_bytes);
  });
  if (!read) return Verdict::kLocalFault;
  const Box tile = checkpoint_.tiles.tile_box(work.tile);
  const auto leaf = leaf_by_proof(part, range_in_tile(work.box, tile, element_bytes),
                                  tile.elements() * element_bytes, proof);
  if (leaf && *leaf == checkpoint_.tile_digests[work.tile]) {
    copy_->keep_proof(work.tile, work.box, proof);
    return Verdict::kAccept;
  }
  return copy_->check_sizes() ? Verdict::kRetry : Verdict::kLocalFault;
}

void TileVerifier::mark(TileIndex tile) const {
  copy_->mark_verified(tile);
  verified_->set(tile);
}

bool TileVerifier::whole_tile_is_right(TileIndex tile) const {
  const ArrayOf arrays = [this](const LayoutEntry& entry) { return array_of(entry); };
  bool good = false;
  const auto read = store::guard_mapping_access("a tile that was written in place", [&] {
    const auto digest = whole_tile_digest(checkpoint_, layout_, tile, arrays);
    good = digest && *digest == checkpoint_.tile_digests[tile];
  });
  return read && good;
}

std::size_t TileVerifier::verify_in_place(std::span<const TileIndex> tiles,
                                          WorkerPool& pool) const {
  std::atomic<std::size_t> good = 0;
  pool.parallel_for(tiles.size(), [&](std::size_t i) {
    if (!whole_tile_is_right(tiles[i])) return;
    mark(tiles[i]);
    good.fetch_add(1);
  });
  return good.load();
}

Result<void> check_file(const Checkpoint& checkpoint, TensorIndex tensor,
                        std::string_view content) {
  const TensorInfo& info = checkpoint.tensors[tensor];
  const TileGrid& grid = checkpoint.tiles.grid(tensor);
  bool good = content.size() == info.size_bytes();
  for (std::uint64_t tile = 0; good && tile < grid.tile_count(); ++tile) {
    good = digest_tile(info, grid, tile, as_bytes(content), Box::whole(info.shape)) ==
           checkpoint.tile_digests[checkpoint.tiles.first_tile(tensor) + tile];
  }
  if (!good) return fail(ErrorCode::kCorrupt, "{} does not match its digest", info.name);
  return {};
}

Result<std::string> read_verified_file(const Checkpoint& checkpoint, const Layout& layout,
                                       TensorIndex tensor, const ArrayOf& array_of) {
  const TensorInfo& info = checkpoint.tensors[tensor];
  std::optional<Error> why;
  for (const LayoutEntry& entry : layout.entries_of(tensor)) {
    if (entry.box != Box::whole(info.shape)) continue;
    const auto bytes = array_of(entry);
    // Allocated before the guard: a fault leaves it by longjmp.
    std::string content(bytes.size(), '\0');
    auto usable = store::guard_mapping_access(info.name.c_str(), [&] {
      if (!bytes.empty()) std::memcpy(content.data(), bytes.data(), bytes.size());
    });
    if (usable) usable = check_file(checkpoint, tensor, content);
    if (usable) return content;
    why = std::move(usable).error();
  }
  if (why) return fail(std::move(*why));
  return fail(ErrorCode::kNotFound, "{} is not held whole here", info.name);
}

}  // namespace rekindle::pull
