#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "src/base/digest.h"

// The pieces that members of a round have in common, although no two of them want the same contents
// (docs/internals/rounds.md, "Common pieces"). Pure.
namespace rekindle::coordinator {

// A box of a tensor. Members that want the same one have the same key.
struct WantedPiece {
  std::uint64_t key = 0;
  std::uint64_t bytes = 0;
  bool operator==(const WantedPiece&) const = default;
};
// Of one member's contents, in the order of its session.
using Pieces = std::vector<WantedPiece>;
// Ranges of indices into Pieces, ascending and disjoint.
using PieceRuns = std::vector<std::pair<std::uint32_t, std::uint32_t>>;

// Members that can share the uploads of some pieces.
struct CommonPieces {
  // Of the pieces that all of them want.
  std::uint64_t bytes = 0;
  // Indices, ascending, and where each one has these pieces.
  std::vector<std::size_t> members;
  std::vector<PieceRuns> runs;
};

// Puts members together so that they save many bytes of uploads, each in one set at most. The
// method is greedy: first the set of members that saves the most, then the next one of those that
// are left. The common bytes of a set are at least an eighth of what each of its members wants.
// `wanted`: of each member.
std::vector<CommonPieces> find_common_pieces(std::span<const Pieces* const> wanted);

// The contents that agents have described, up to `most` pieces in all.
class KnownPieces {
 public:
  explicit KnownPieces(std::size_t most = std::size_t{4} << 20) : most_(most) {}

  // Known contents stay as they are. `is_wanted`: whether any member has such contents. Others are
  // forgotten if there is no room. Contents without room count as known, and have no pieces, until
  // there is room for them.
  void add(const Digest& contents, Pieces pieces,
           const std::function<bool(const Digest&)>& is_wanted);
  bool knows(const Digest& contents) const { return known_.contains(contents); }
  // nullptr: not known.
  const Pieces* find(const Digest& contents) const;

 private:
  const std::size_t most_;
  std::size_t count_ = 0;
  struct Known {
    std::size_t count = 0;
    // Null: no room.
    std::unique_ptr<const Pieces> pieces;
  };
  std::map<Digest, Known> known_;
};

}  // namespace rekindle::coordinator
