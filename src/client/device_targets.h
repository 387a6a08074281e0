#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/bucket/contents.h"
#include "src/bucket/device.h"
#include "src/client/bucket_feed.h"
#include "src/client/rekindle.h"

namespace rekindle::client {

// How much of each piece has come in buckets.
class PieceProgress {
 public:
  // `contents` lives longer.
  explicit PieceProgress(const bucket::Contents& contents);

  // kInternal: the bucket has bytes that do not fit, or come twice. Its parts are only then safe to
  // become addresses.
  Result<void> account(const FilledBucket& bucket);
  std::size_t whole() const { return whole_; }
  std::size_t total() const { return missing_.size(); }
  bool begun(std::size_t piece) const { return missing_[piece] != at_first(piece); }
  bool half_done(std::size_t piece) const { return missing_[piece] != 0 && begun(piece); }

 private:
  std::uint64_t at_first(std::size_t piece) const;

  const bucket::Contents& contents_;
  // Bytes per piece; 1 for a piece without bytes, which comes as an empty part.
  std::vector<std::uint64_t> missing_;
  std::size_t whole_ = 0;
};

// Where the pieces of a session go (rk_load_into).
class DeviceTargets {
 public:
  // Replaces the targets; pieces without one go nowhere. kInvalid, kNotFound: the message names the
  // target. The old targets then stay.
  Result<void> aim(std::span<const bucket::Piece> pieces, std::span<const rk_target> targets,
                   const PieceProgress& progress);
  // The copies from a bucket to its targets.
  std::vector<bucket::Move> moves_of(const FilledBucket& bucket) const;

 private:
  // Per piece; 0: none.
  std::vector<bucket::DeviceAddress> addresses_;
};

}  // namespace rekindle::client
