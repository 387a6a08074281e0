#pragma once

#include <memory>
#include <string>

#include "recovery/agent/agent_core.h"
#include "recovery/worker/host.h"

namespace rekindle::agent {

// What the workers' service takes from this agent. Control thread only.
class WorkerHost final : public worker::Host {
 public:
  explicit WorkerHost(AgentCore& core) : core_(core) {}

  store::SegmentStore& store() override { return core_.store(); }
  WorkerPool& blocking_pool() override { return core_.blocking_pool(); }
  WorkerPool& digest_pool() override { return core_.digest_pool(); }
  rpc::Task<Result<ModelVersion>> newest(std::string model) override;
  rpc::Task<Result<std::shared_ptr<const store::StoredVersion>>> pull(
      pull::PullRequest request, pull::OnProgress progress, pull::PullWatch watch) override;
  rpc::Task<Result<Digest128>> publish(ModelVersion id, std::filesystem::path directory) override;
  rpc::Task<void> drop(std::shared_ptr<const store::StoredVersion> copy) override;
  bool has_fleet() const override { return core_.link() != nullptr; }
  rpc::Task<Result<worker::FleetWord>> report(worker::RankWord word) override;

 private:
  Result<ModelVersion> newest_here(const std::string& model) const;
  Result<ModelVersion> newest_without_fleet(const std::string& model, const Error& why) const;
  AgentCore& core_;
};

}  // namespace rekindle::agent
