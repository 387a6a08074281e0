#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "recovery/joint/joint_agent.h"
#include "recovery/joint/part_digests.h"
#include "src/async/task.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/store/segment_store.h"
#include "src/tensor/joint_plan.h"
#include "src/tensor/layout.h"

namespace rekindle::joint {

// The files of a rank. The files of all ranks of a host have different names.
Result<PackedLayout> pack_rank(const JointPlan& plan, std::uint32_t rank);
// The layout of a host's copy: the files of its ranks, in order. It follows from the plan alone.
// nullopt: its ranks have no elements, so it has no copy.
Result<std::optional<Layout>> layout_of_host(const JointPlan& plan, std::uint32_t host);

// What the ranks of one host publish: the files that they fill, and the copy that the store makes
// of them. Control thread only; `agent` outlives it.
class HostCopy {
 public:
  // Costs time; any thread.
  static Result<std::unique_ptr<HostCopy>> create(JointAgent& agent, ModelVersion id,
                                                  std::shared_ptr<const JointPlan> plan,
                                                  std::uint32_t host);

  // Where the rank writes. nullptr: it is not a rank of this host.
  const PackedLayout* files_of(std::uint32_t rank) const;
  // Nobody can write to the files any more. `ranks`: in the order of the plan.
  async::Task<Result<void>> stage(std::vector<store::FilledSegments> ranks);
  // After stage(). nullptr: this host has no copy.
  const PartReader* part() const { return part_.get(); }
  // Digests the whole tiles.
  async::Task<Result<void>> digest();
  // One for each of part()->tiles().whole.
  std::span<const Digest> leaves() const { return leaves_; }
  // Makes the copy durable and serves it. `leaves`: of the whole version; `layouts`: of all copies;
  // both as the lead has them. kCorrupt: they are not those of this host.
  async::Task<Result<void>> commit(std::vector<Digest> leaves, std::vector<Digest> layouts,
                                   Digest root, std::vector<VersionSignature> signatures);

  // Keeps the files of a rank that has committed, until drop().
  void keep(std::shared_ptr<void> files) { files_.push_back(std::move(files)); }
  // Frees what the version did not get, on the pool: unmapping files takes seconds.
  async::Task<void> drop(std::vector<store::FilledSegments> untaken);

 private:
  HostCopy(JointAgent& agent, ModelVersion id, std::shared_ptr<const JointPlan> plan,
           std::uint32_t host)
      : agent_(agent), id_(std::move(id)), plan_(std::move(plan)), host_(host) {}
  Result<void> check_own_leaves(const Checkpoint& checkpoint) const;

  JointAgent& agent_;
  const ModelVersion id_;
  const std::shared_ptr<const JointPlan> plan_;
  const std::uint32_t host_;
  std::map<std::uint32_t, PackedLayout> packed_;
  std::vector<std::shared_ptr<void>> files_;
  std::shared_ptr<store::SegmentStore::StagedPart> staged_;
  std::unique_ptr<PartReader> part_;
  std::vector<Digest> leaves_;
};

}  // namespace rekindle::joint
