#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "recovery/planner/slice_plan.h"
#include "recovery/swarm/have_feed.h"
#include "src/base/result.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"
#include "src/tensor/held_tile.h"
#include "transport/engine.h"

namespace rekindle::pull {

// The tiles of a pull's copy that have verified, in this life of the process or an earlier one. An
// agent serves them on while the pull still runs.
using VerifiedTiles = swarm::HeldTiles;

// Compares bytes of a copy that is being filled with the digests of its publisher, and marks the
// tiles that are right. kLocalFault says that the copy itself cannot be read or written: somebody
// cut its file short. That is no source's fault. Any thread.
class TileVerifier {
 public:
  TileVerifier(std::shared_ptr<store::PendingVersion> copy,
               std::shared_ptr<VerifiedTiles> verified);

  store::PendingVersion& copy() const { return *copy_; }

  // Copies what has landed in staging to its places. False: the copy cannot be written.
  bool scatter(const planner::Expansion& expansion, const std::byte* staging) const;
  // A whole tile, in `staging` (null: in the copy). Keeps the proofs of its parts (kept_proofs()).
  transport::Verdict verify_tile(const planner::TileWork& work, const std::byte* staging) const;
  // A part of a tile, by a source's proof of the tile's other parts. Keeps what the proof tells.
  transport::Verdict verify_part(const planner::TileWork& work, std::string_view proof) const;
  // In the resume bitmap of the copy, and for whoever reads it while it is filled.
  void mark(TileIndex tile) const;

  // Verifies and marks these tiles where they lie. Returns how many are right. Skips tiles that the
  // copy holds only in part: their digests cover bytes that are not here. Blocking.
  std::size_t verify_in_place(std::span<const TileIndex> tiles, WorkerPool& pool) const;

 private:
  transport::Verdict verify_staged(const planner::TileWork& work,
                                   std::span<const std::byte> tile) const;
  transport::Verdict compare(const Digest& expected, const std::function<Digest()>& digest) const;
  bool whole_tile_is_right(TileIndex tile) const;
  std::span<const std::byte> array_of(const LayoutEntry& entry) const;
  const LayoutEntry* entry_holding(TensorIndex tensor, const Box& box) const;

  const std::shared_ptr<store::PendingVersion> copy_;
  const std::shared_ptr<VerifiedTiles> verified_;
  const Checkpoint& checkpoint_;
  const Layout& layout_;
};

// The small files of a checkpoint (config.json, tokenizer…) travel as tensors. Outside of a
// transfer they are read with these functions, which compare them with the publisher's digests.

// kCorrupt unless `content` is the file that this tensor carries. Any thread.
Result<void> check_file(const Checkpoint& checkpoint, TensorIndex tensor, std::string_view content);

// Copies the file out of a mapped copy and checks it. Survives a segment that is truncated under
// its mapping. kNotFound: the layout does not hold the whole file. Any other error: this copy of
// the file cannot be used; another one may.
Result<std::string> read_verified_file(const Checkpoint& checkpoint, const Layout& layout,
                                       TensorIndex tensor, const ArrayOf& array_of);

}  // namespace rekindle::pull
