#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/store/segment_store.h"
#include "src/tensor/joint_plan.h"

namespace rekindle::joint {

// The ranks of a joint publication that are at this agent. A declaration stays when its rank goes,
// so that a restarted rank can go on.
class LocalRanks {
 public:
  LocalRanks(ModelVersion id, std::uint32_t world) : id_(std::move(id)), world_(world) {}

  const ModelVersion& id() const { return id_; }
  std::uint32_t world() const { return world_; }
  // kInvalid: another world, or no rank of it. kDenied: the rank is here already, or, once the
  // declarations are sealed, has declared something else or at another agent.
  // `owner`: names the process that publishes the rank; never used before.
  Result<void> declare(std::uint32_t world, Declaration declaration, std::uint64_t owner);
  // The roster is complete, and `ranks` are those of this agent. Their declarations go to other
  // agents, so they do not change. Other ranks that declared here are at another agent: they are
  // forgotten, and have no owner.
  void seal(std::span<const std::uint32_t> ranks);
  // Nothing if the rank has another owner by now.
  void leave(std::uint32_t rank, std::uint64_t owner);
  bool owns(std::uint32_t rank, std::uint64_t owner) const;
  // kStale: the rank has another owner, or none.
  Result<void> fill(std::uint32_t rank, std::uint64_t owner, store::FilledSegments filled);

  // With a process that writes, or whose commit waits.
  std::vector<std::uint32_t> present() const;
  // Those of `ranks` that have not committed.
  std::vector<std::uint32_t> unfilled(std::span<const std::uint32_t> ranks) const;
  // No rank has a process.
  bool deserted() const;
  // kStale: one of `ranks` is not here.
  Result<std::vector<Declaration>> declarations(std::span<const std::uint32_t> ranks) const;
  // Of a rank that has committed.
  store::FilledSegments take(std::uint32_t rank);
  // The files of all ranks that were not taken.
  std::vector<store::FilledSegments> take_rest();

 private:
  struct Rank {
    Declaration declaration;
    std::optional<std::uint64_t> owner;
    std::optional<store::FilledSegments> filled;
    bool taken = false;  // of `filled`, which then is empty
  };
  const ModelVersion id_;
  const std::uint32_t world_;
  bool sealed_ = false;
  std::map<std::uint32_t, Rank> ranks_;
};

}  // namespace rekindle::joint
