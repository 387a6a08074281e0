#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/agent.pb.h"
#include "recovery/joint/joint_agent.h"
#include "recovery/joint/joint_lead.h"
#include "src/async/task_group.h"

namespace rekindle::joint {

// The lead of a joint publication: answers the agents of its roster, and claims the version when
// every leaf is there. Control thread only.
class LeadDesk : public std::enable_shared_from_this<LeadDesk> {
 public:
  LeadDesk(boost::asio::any_io_executor executor, JointAgent& agent, ModelVersion id,
           std::vector<JointLead::Host> hosts);

  // `from`: the caller's place in the roster.
  async::Task<Result<proto::JointResponse>> answer(std::uint32_t from, proto::JointRequest request);
  // `layouts`: as for JointLead.
  void set_plan(std::shared_ptr<const JointPlan> plan, std::vector<std::optional<Digest>> layouts);
  // Time has passed; for `slept` of it this process was stopped.
  void advance(TimePoint now, Duration slept);
  void end(Error why);
  // Waits for a claim that still runs, which keeps this object, for up to a minute.
  async::Task<void> close();

 private:
  async::Task<Result<void>> watch(proto::JointWatch watch);
  Result<void> take_leaves(std::uint32_t from, const proto::JointLeaves& leaves);
  Result<void> read(const proto::JointRead& read, proto::JointResponse& answer) const;
  async::Task<void> claim();
  async::Task<Result<void>> ask_coordinator(std::shared_ptr<const Checkpoint> checkpoint);
  proto::JointState state() const;
  // To be called when the lead may have another phase.
  void look();

  JointAgent& agent_;
  // Of the root, once it is claimed.
  std::vector<VersionSignature> signatures_;
  const ModelVersion id_;
  JointLead lead_;
  std::shared_ptr<const JointPlan> plan_;
  bool claiming_ = false;
  async::Notifier changed_;
  async::TaskGroup tasks_;
};

}  // namespace rekindle::joint
