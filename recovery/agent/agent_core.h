#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/agent/agent_joint.h"
#include "recovery/agent/agent_parts.h"
#include "recovery/agent/agent_pulls.h"
#include "recovery/agent/copy_health.h"
#include "recovery/agent/fleet_duties.h"
#include "recovery/agent/numa_choice.h"
#include "recovery/agent/partial_sources.h"
#include "recovery/agent/publisher.h"
#include "recovery/agent/rdma.h"
#include "recovery/agent/room_maker.h"
#include "recovery/agent/version_retirement.h"
#include "recovery/joint/joint_publications.h"
#include "recovery/metrics/metrics.h"
#include "recovery/pull/pull_environment.h"
#include "recovery/pull/pull_metrics.h"
#include "recovery/pull/pull_plans.h"
#include "recovery/rpc/audited_calls.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"
#include "transport/engine.h"
#include "transport/link_cuts.h"
#include "transport/registry.h"

namespace rekindle::agent {

struct CoreOptions {
  // "" = the host name.
  std::string node_id;
  std::filesystem::path store_directory;
  std::uint64_t store_budget_bytes = 0;
  // Keeps the memory of versions that go for the next ones.
  bool keep_memory = false;
  // Memory that the store holds ready for the next version.
  std::uint64_t reserve_bytes = 0;
  // Where copies lie.
  store::NumaPolicy numa;
  worker::ScrubOptions scrub;
  std::string coordinator;
  // nullptr: it proves nothing, and demands nothing.
  std::shared_ptr<rpc::Credentials> credentials;
  // ROLE_AGENT for a member of the fleet, ROLE_PULLER for the embedded agent of a command.
  proto::Role role = proto::ROLE_AGENT;
  RdmaOptions rdma;
  std::string tcp_congestion;
  // Pulls over encrypted data streams only, or over RdmaOptions::fabric.trusted.
  bool encrypt = false;
  PublisherKeys publishers;
  // Outlives the agent. nullptr: nobody asks for metrics.
  metrics::Metrics* metrics = nullptr;
  // Outlives the agent. nullptr: nobody writes down what the coordinator orders, and what workers
  // do.
  rpc::AuditedCalls* audit = nullptr;
  // Outlives the agent. nullptr: no drill may cut links.
  transport::LinkCuts* links = nullptr;
  // Outlives the agent and its executor. nullptr: operations leave no spans.
  trace::Tracer* tracer = nullptr;
};

// Makes the units of an agent and connects them: the store, the transfer engine and the pools; the
// link to the coordinator; publishing, pulling, serving and retiring copies. The daemon and the
// embedded agent of a command share it. Control thread only, except where it says otherwise.
class AgentCore {
 public:
  // Opens and locks the store (blocking).
  static Result<std::unique_ptr<AgentCore>> create(boost::asio::any_io_executor executor,
                                                   const CoreOptions& options);
  ~AgentCore();
  AgentCore(const AgentCore&) = delete;
  AgentCore& operator=(const AgentCore&) = delete;

  // Starts the link to the coordinator, if one is configured. A member registers and sends
  // heartbeats.
  void connect_coordinator(const std::string& failure_domain, const std::string& control_endpoint);
  // From here on verified tiles of pulls that still run are served, through these sessions.
  void serve_through(PeerSessions& sessions);
  async::Task<void> stop();

  Publisher& publisher() { return publisher_; }
  joint::JointPublications& joint() { return joint_; }
  AgentPulls& pulls() { return pulls_; }
  VersionRetirement& retirement() { return retirement_; }
  CopyHealth& health() { return health_; }
  FleetDuties& duties() { return duties_; }
  VersionReaders& readers() { return readers_; }
  CoordinatorLink& link() { return link_; }
  rpc::AuditedCalls& audit() { return audit_; }
  ServedVersions& served() { return served_; }
  GrantClock& grant_clock() { return grant_clock_; }
  const pull::PullEnvironment& environment() const { return environment_; }

  const rpc::Identity& identity() const { return identity_; }
  store::SegmentStore& store() { return *store_; }
  transport::SegmentRegistry& registry() { return registry_; }
  // nullptr: this host has no usable RDMA device.
  Rdma* rdma() { return rdma_.get(); }
  WorkerPool& digest_pool() { return *digest_pool_; }
  WorkerPool& blocking_pool() { return *blocking_pool_; }
  proto::NodeAddress address() const;

 private:
  AgentCore(boost::asio::any_io_executor executor, const CoreOptions& options, NumaChoice numa,
            std::unique_ptr<Rdma> rdma, std::unique_ptr<store::SegmentStore> store);
  AgentParts parts();
  rpc::Identity make_identity(const CoreOptions& options);
  pull::PullEnvironment make_environment(const CoreOptions& options);
  CoordinatorLink::Callbacks link_callbacks();
  std::vector<proto::Holding> holdings() const;
  FleetDuties::Hooks duties_hooks();
  // What the coordinator ordered has been done, or not.
  void note_order(const char* act, const std::string& object, const Result<void>& outcome);

  const boost::asio::any_io_executor executor_;
  GrantClock grant_clock_;
  const rpc::Identity identity_;
  const PublisherKeys publishers_;
  rpc::AuditedCalls unheard_;
  rpc::AuditedCalls& audit_;
  std::string control_endpoint_;
  const NumaChoice numa_;
  std::unique_ptr<Rdma> rdma_;
  std::unique_ptr<WorkerPool> digest_pool_;
  std::unique_ptr<WorkerPool> blocking_pool_;
  std::unique_ptr<pull::PullPlans> plans_;
  std::unique_ptr<store::SegmentStore> store_;
  transport::SegmentRegistry registry_;
  ServedVersions served_;
  std::vector<std::unique_ptr<transport::Connector>> connectors_;
  std::unique_ptr<transport::Engine> engine_;
  CoordinatorLink link_;
  VersionReaders readers_;
  PartialSources sources_;
  VersionRetirement retirement_;
  RoomMaker room_;
  Publisher publisher_;
  AgentJoint joint_agent_;
  joint::JointPublications joint_;
  // nullptr: nobody asks for metrics.
  std::unique_ptr<PublishMetrics> publish_metrics_;
  std::unique_ptr<joint::JointMetrics> joint_metrics_;
  std::unique_ptr<pull::PullMetrics> pull_metrics_;
  pull::PullEnvironment environment_;
  AgentPulls pulls_;
  CopyHealth health_;
  FleetDuties duties_;
};

// The boot id: equal for two agents of one host.
std::string host_id();
std::string default_node_id();

}  // namespace rekindle::agent
