#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "proto/resident.pb.h"
#include "src/base/digest.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/bucket/block_digests.h"
#include "src/store/segment_store.h"

namespace rekindle::worker {

// A MiB of a block, or what is left of the block. Tiles are counted over all blocks, in order.
struct ResidentTile {
  std::uint32_t block = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// A resident copy as the keeper has it: what its record says of each tile, and the blocks. It keeps
// the memory. Immutable.
class OpenResident {
 public:
  // kCorrupt: the record is malformed, or has other blocks.
  static Result<std::shared_ptr<const OpenResident>> open(std::string_view record,
                                                          std::vector<UniqueFd> blocks);

  const proto::ResidentRecord& record() const { return record_; }
  const std::vector<UniqueFd>& blocks() const { return blocks_; }
  std::size_t tiles() const { return compared_.size(); }
  ResidentTile tile(std::size_t index) const;
  Digest sealed(std::size_t tile) const;
  // Tensors with bytes in the tile.
  std::vector<const proto::ResidentTensor*> tensors_in(std::size_t tile) const;
  // Tiles at `first` and after it that have other digests than at the seal. Tiles with bytes of a
  // tensor that changes are not among them.
  std::vector<std::size_t> differing(std::size_t first, std::span<const Digest> digests) const;

  // Descriptors of the blocks, for a process or a message.
  Result<std::vector<UniqueFd>> share() const;
  Result<std::vector<bucket::BlockFile>> whole() const;
  // Tiles of one block, which follow each other.
  Result<bucket::BlockFile> part(std::size_t first, std::size_t count) const;

 private:
  OpenResident(proto::ResidentRecord record, std::vector<UniqueFd> blocks);

  const proto::ResidentRecord record_;
  const std::vector<UniqueFd> blocks_;
  // The first tile of each block, one more for the end.
  std::vector<std::size_t> first_tiles_;
  // Per tile: whether no tensor that changes has bytes in it.
  std::vector<bool> compared_;
};
using OpenResidentPtr = std::shared_ptr<const OpenResident>;

// Whether tensors lie in their blocks. kInvalid.
Result<void> check_tensors(const proto::SealResident& request);

// Replaces the bytes of a tile by those of the store's copy, for tensors that say where theirs come
// from. The caller compares digests: bytes that the copy does not have stay as they were.
Result<void> refill(const OpenResident& resident, std::size_t tile,
                    const store::StoredVersion& stored, std::span<std::byte> bytes);

}  // namespace rekindle::worker
