#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "recovery/agent/agent_parts.h"
#include "recovery/agent/partial_sources.h"
#include "recovery/agent/publisher.h"
#include "recovery/agent/version_retirement.h"
#include "recovery/joint/joint_agent.h"

namespace rekindle::agent {

// Gives joint publications their access to this agent and to the coordinator. Control thread only.
class AgentJoint final : public joint::JointAgent {
 public:
  // `self`: the address of this agent, when it listens.
  AgentJoint(AgentParts parts, Publisher& publisher, PartialSources& sources,
             const VersionRetirement& retirement, std::function<proto::NodeAddress()> self)
      : parts_(parts),
        publisher_(publisher),
        sources_(sources),
        retirement_(retirement),
        self_(std::move(self)) {}

  const rpc::Identity& identity() const override { return parts_.identity; }
  store::SegmentStore& store() override { return parts_.store; }
  WorkerPool& blocking_pool() override { return parts_.blocking_pool; }
  WorkerPool& digest_pool() override { return parts_.digest_pool; }
  trace::Tracer* tracer() const override { return publisher_.tracer(); }
  async::Task<Result<proto::JointRoster>> report_ranks(proto::JointReport report) override;
  std::vector<VersionSignature> sign(const ModelVersion& id, const Digest& root) const override {
    return publisher_.sign_for_workers(id, root);
  }
  Result<void> check_trusted(const Checkpoint& checkpoint) const override {
    return parts_.publishers.trust.check(checkpoint.id, checkpoint.root, checkpoint.signatures);
  }
  async::Task<Result<void>> claim(std::shared_ptr<const Checkpoint> checkpoint,
                                  std::vector<Digest> layouts) override;
  async::Task<Result<void>> serve(std::shared_ptr<const store::StoredVersion> stored) override;
  Result<void> check_not_retiring(const ModelVersion& id) const override;

 private:
  // Without a coordinator, this agent's ranks are the whole world.
  proto::JointRoster roster_of_this_host(const proto::JointReport& report) const;

  const AgentParts parts_;
  Publisher& publisher_;
  PartialSources& sources_;
  const VersionRetirement& retirement_;
  const std::function<proto::NodeAddress()> self_;
};

}  // namespace rekindle::agent
