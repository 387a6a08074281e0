#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <boost/asio/any_io_executor.hpp>

#include "proto/agent.pb.h"
#include "recovery/joint/course.h"
#include "recovery/joint/host_copy.h"
#include "recovery/joint/joint_agent.h"
#include "recovery/joint/joint_metrics.h"
#include "recovery/joint/joint_roster.h"
#include "recovery/joint/joint_trace.h"
#include "recovery/joint/lead_desk.h"
#include "recovery/joint/lead_link.h"
#include "recovery/joint/local_ranks.h"
#include "recovery/joint/shared_tiles.h"
#include "src/async/task_group.h"
#include "src/store/segment_store.h"
#include "src/tensor/joint_plan.h"

namespace rekindle::joint {

// Where a rank writes: the places of its boxes in files that its agent makes.
struct RankPlaces {
  TensorSet tensors;
  PackedLayout packed;
};

// One agent's share in one joint publication: takes the steps of
// docs/internals/joint-publication.md in order, and answers its ranks and the other agents. Control
// thread only.
class JointShare : public std::enable_shared_from_this<JointShare> {
 public:
  // `metrics` outlives it; nullptr: nobody counts.
  JointShare(boost::asio::any_io_executor executor, JointAgent& agent, ModelVersion id,
             std::uint32_t world, JointMetrics* metrics = nullptr);

  const ModelVersion& id() const { return id_; }
  // 0: the roster is not complete.
  std::uint64_t roster() const { return roster_.number; }
  // Complete or ended: new ranks begin another share.
  bool over() const { return course_.over(); }

  // The calls of ranks. kTimeout names what is missing.
  async::Task<Result<RankPlaces>> declare(std::uint32_t world, Declaration declaration,
                                          std::uint64_t owner, TimePoint give_up);
  // Returns the root when every agent has confirmed. A failed call leaves the committed bytes
  // where they are, for the other ranks: `files` is kept as long as they are needed.
  async::Task<Result<Digest>> commit(std::uint32_t rank, std::uint64_t owner,
                                     store::FilledSegments filled, std::shared_ptr<void> files,
                                     TimePoint give_up);
  void leave(std::uint32_t rank, std::uint64_t owner);

  // A call of another agent of the roster.
  async::Task<Result<proto::JointResponse>> answer(rpc::Peer peer, proto::JointRequest request);

  // Takes all steps, then answers other agents for a while.
  async::Task<void> run();
  void end(Error why);

 private:
  async::Task<Result<void>> take_steps();
  // Waits for the roster. The agent of rank 0 becomes the lead.
  async::Task<Result<void>> gather();
  async::Task<Result<void>> make_plan();
  // Until the lead has the leaves of all tiles that this agent finishes.
  async::Task<void> finish_shared();
  async::Task<Result<void>> send_leaves();
  async::Task<Result<void>> commit_copy();
  // Until run() closes it: the lead misses silent agents, and a share without ranks ends.
  async::Task<void> keep_time();
  async::Task<void> say_goodbye();
  // The task keeps this object.
  void spawn(std::string_view name, async::Task<void> task);
  std::string whom_it_lacks() const;

  JointAgent& agent_;
  const ModelVersion id_;
  JointMetrics* const metrics_;
  JointWork work_;
  Course course_;
  LocalRanks ranks_;
  RankReports reports_;
  Roster roster_;
  LeadLink lead_;
  // Null at other agents than the lead.
  std::shared_ptr<LeadDesk> desk_;
  // From here on null until there is a plan.
  std::shared_ptr<const JointPlan> plan_;
  std::unique_ptr<HostCopy> copy_;
  std::unique_ptr<SharedTiles> shared_;
  bool shared_finished_ = false;
  JointTrace trace_;
  async::TaskGroup tasks_;
};

}  // namespace rekindle::joint
