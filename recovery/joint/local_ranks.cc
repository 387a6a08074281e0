#include "recovery/joint/local_ranks.h"

#include <algorithm>
#include <utility>

namespace rekindle::joint {

Result<void> LocalRanks::declare(std::uint32_t world, Declaration declaration,
                                 std::uint64_t owner) {
  const std::uint32_t rank = declaration.rank;
  if (world != world_) {
    return fail(ErrorCode::kInvalid, "{}: rank {} says that there are {} ranks, others say {}",
                id_.to_string(), rank, world, world_);
  }
  if (rank >= world_) {
    return fail(ErrorCode::kInvalid, "{}: rank {} of {} ranks", id_.to_string(), rank, world_);
  }
  const auto found = ranks_.find(rank);
  if (found == ranks_.end()) {
    if (sealed_) {
      return fail(ErrorCode::kDenied,
                  "{}: rank {} declares at this host, but the publication began with this rank on "
                  "another one",
                  id_.to_string(), rank);
    }
    ranks_[rank] = {std::move(declaration), owner, std::nullopt};
    return {};
  }
  Rank& state = found->second;
  if (state.filled) {
    return fail(ErrorCode::kDenied, "{}: rank {} has committed already; wait for the other ranks",
                id_.to_string(), rank);
  }
  if (state.owner) {
    return fail(ErrorCode::kDenied, "{}: another process publishes rank {} on this host",
                id_.to_string(), rank);
  }
  if (sealed_ && state.declaration != declaration) {
    return fail(ErrorCode::kDenied,
                "{}: rank {} came back with other tensors or boxes than it had declared",
                id_.to_string(), rank);
  }
  state.declaration = std::move(declaration);
  state.owner = owner;
  return {};
}

void LocalRanks::seal(std::span<const std::uint32_t> ranks) {
  sealed_ = true;
  std::erase_if(ranks_, [&](const auto& entry) {
    return std::ranges::find(ranks, entry.first) == ranks.end();
  });
}

bool LocalRanks::owns(std::uint32_t rank, std::uint64_t owner) const {
  const auto found = ranks_.find(rank);
  return found != ranks_.end() && found->second.owner == owner;
}

void LocalRanks::leave(std::uint32_t rank, std::uint64_t owner) {
  if (owns(rank, owner)) ranks_.at(rank).owner.reset();
}

Result<void> LocalRanks::fill(std::uint32_t rank, std::uint64_t owner,
                              store::FilledSegments filled) {
  if (!owns(rank, owner) || ranks_.at(rank).filled) {
    return fail(ErrorCode::kStale, "{}: rank {} has nothing to commit", id_.to_string(), rank);
  }
  ranks_.at(rank).filled = std::move(filled);
  return {};
}

std::vector<std::uint32_t> LocalRanks::present() const {
  std::vector<std::uint32_t> ranks;
  for (const auto& [rank, state] : ranks_) {
    if (state.owner) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<std::uint32_t> LocalRanks::unfilled(std::span<const std::uint32_t> ranks) const {
  std::vector<std::uint32_t> unfilled;
  for (const std::uint32_t rank : ranks) {
    const auto found = ranks_.find(rank);
    if (found == ranks_.end() || !found->second.filled) unfilled.push_back(rank);
  }
  return unfilled;
}

bool LocalRanks::deserted() const {
  return std::ranges::none_of(ranks_,
                              [](const auto& entry) { return entry.second.owner.has_value(); });
}

Result<std::vector<Declaration>> LocalRanks::declarations(
    std::span<const std::uint32_t> ranks) const {
  std::vector<Declaration> declarations;
  for (const std::uint32_t rank : ranks) {
    const auto found = ranks_.find(rank);
    if (found == ranks_.end()) {
      return fail(ErrorCode::kStale, "{}: rank {} is not at this host any more", id_.to_string(),
                  rank);
    }
    declarations.push_back(found->second.declaration);
  }
  return declarations;
}

store::FilledSegments LocalRanks::take(std::uint32_t rank) {
  Rank& state = ranks_.at(rank);
  state.taken = true;
  return *std::move(state.filled);
}

std::vector<store::FilledSegments> LocalRanks::take_rest() {
  std::vector<store::FilledSegments> rest;
  for (auto& [rank, state] : ranks_) {
    if (state.filled && !std::exchange(state.taken, true)) rest.push_back(*std::move(state.filled));
  }
  return rest;
}

}  // namespace rekindle::joint
