#pragma once

#include <list>
#include <memory>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/joint/joint_agent.h"
#include "recovery/joint/joint_share.h"
#include "recovery/rpc/rpc.h"
#include "src/async/task_group.h"

namespace rekindle::joint {

// The joint publications in which this agent takes part (docs/internals/joint-publication.md).
// Control thread only.
class JointPublications {
 public:
  // `agent` outlives it.
  JointPublications(boost::asio::any_io_executor executor, JointAgent& agent);

  // `metrics` outlives it.
  void count_in(JointMetrics* metrics) { metrics_ = metrics; }
  // Answers the calls of other agents.
  void install(rpc::RpcServer& server);

  // A rank declares its tensors and boxes. Returns where to write when all ranks have declared.
  // kInvalid: the ranks disagree, or leave a hole; the line names tensor and ranks. kDenied: the
  // rank is here already. kTimeout: names the ranks that are missing.
  async::Task<Result<RankPlaces>> declare(ModelVersion id, std::uint32_t world,
                                          Declaration declaration, std::uint64_t owner,
                                          TimePoint give_up);
  // The rank has written everything. `files` keeps the files of `filled` under their names; the
  // publication needs them also after a call that timed out. Returns the root when the version is
  // complete everywhere.
  async::Task<Result<Digest>> commit(ModelVersion id, std::uint32_t rank, std::uint64_t owner,
                                     store::FilledSegments filled, std::shared_ptr<void> files,
                                     TimePoint give_up);
  // The rank ends without a commit. It may come back.
  void leave(const ModelVersion& id, std::uint32_t rank, std::uint64_t owner);

  async::Task<void> close(std::chrono::milliseconds deadline);

 private:
  std::shared_ptr<JointShare> find(const ModelVersion& id) const;
  async::Task<void> run(std::shared_ptr<JointShare> share);
  async::Task<Result<proto::JointResponse>> answer(rpc::Peer peer, proto::JointRequest request);

  const boost::asio::any_io_executor executor_;
  JointAgent& agent_;
  JointMetrics* metrics_ = nullptr;
  // Those that are over still answer other agents for a while.
  std::list<std::shared_ptr<JointShare>> shares_;
  async::TaskGroup tasks_;
};

}  // namespace rekindle::joint
