#include "src/bucket/round.h"

#include <algorithm>

#include "src/base/units.h"

namespace rekindle::bucket {

std::vector<std::uint32_t> share_out(const TensorSet& tensors, std::uint32_t ranks) {
  std::uint64_t left = 0;
  for (TensorIndex i = 0; i < tensors.size(); ++i) left += tensors[i].size_bytes();
  std::vector<std::uint32_t> owner(tensors.size());
  std::uint32_t rank = 0;
  std::uint64_t mine = 0;
  for (TensorIndex i = 0; i < tensors.size(); ++i) {
    const std::uint64_t bytes = tensors[i].size_bytes();
    const std::uint64_t fair = left / (ranks - rank);
    // To whom it brings closer to a fair share of what is left.
    if (rank + 1 < ranks && mine > 0 && mine + bytes / 2 > fair) {
      left -= mine;
      mine = 0;
      ++rank;
    }
    owner[i] = rank;
    mine += bytes;
  }
  return owner;
}

Result<RoundPlan> RoundPlan::create(const Contents& contents, std::span<const std::uint32_t> owner,
                                    std::uint32_t ranks, std::uint64_t bucket_bytes) {
  std::vector<std::vector<std::uint32_t>> pieces(ranks);
  for (std::uint32_t i = 0; i < contents.pieces().size(); ++i) {
    const Piece& piece = contents.pieces()[i];
    if (piece.shape != piece.full_shape) {
      return fail(ErrorCode::kInvalid, "a broadcast brings whole tensors, not {} of '{}'",
                  piece.box.to_string(), piece.name);
    }
    if (piece.tensor >= owner.size() || owner[piece.tensor] >= ranks) {
      return fail(ErrorCode::kInvalid, "no rank of the round owns '{}'", piece.name);
    }
    pieces[owner[piece.tensor]].push_back(i);
  }
  RoundPlan round;
  round.share_bytes_ = bucket_bytes / ranks / kPartAlignment * kPartAlignment;
  for (const auto& own : pieces) {
    TRY(Plan plan, Plan::in_order(contents, own, round.share_bytes_));
    round.size_ = std::max(round.size_, plan.size());
    round.plans_.push_back(std::move(plan));
  }
  return round;
}

std::vector<Part> RoundPlan::parts(std::size_t index) const {
  std::vector<Part> all;
  for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
    if (index >= plans_[rank].size()) continue;
    for (Part part : plans_[rank].parts(index)) {
      part.at += rank * share_bytes_;
      all.push_back(part);
    }
  }
  return all;
}

std::optional<std::size_t> RoundFetch::next() {
  if (next_ == plan_.size()) return std::nullopt;
  if (next_ < plan_.plan_of(rank_).size() && !own_.take(next_)) return std::nullopt;
  return next_++;
}

Result<void> RoundFetch::enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) {
  if (bucket >= plan_.plan_of(rank_).size()) return {};
  return own_.enqueue(bucket, to + rank_ * plan_.share_bytes(), stream);
}

}  // namespace rekindle::bucket
