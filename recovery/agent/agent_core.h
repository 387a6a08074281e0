#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/cancellation_signal.hpp>

#include "recovery/agent/coordinator_link.h"
#include "recovery/agent/copy_mender.h"
#include "recovery/agent/fleet_duties.h"
#include "recovery/agent/host.h"
#include "recovery/agent/peer_service.h"
#include "recovery/agent/rdma.h"
#include "recovery/agent/room_maker.h"
#include "recovery/agent/served_versions.h"
#include "recovery/agent/shared_pulls.h"
#include "recovery/pull/pull_environment.h"
#include "recovery/pull/pull_job.h"
#include "recovery/swarm/have_feed.h"
#include "recovery/worker/copy_verifier.h"
#include "recovery/worker/scrubber.h"
#include "src/async/task_group.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"
#include "transport/engine.h"
#include "transport/registry.h"

namespace rekindle::agent {

struct CoreOptions {
  std::string node_id;  // "" = host name
  std::filesystem::path store_directory;
  std::uint64_t store_budget_bytes = 0;
  bool keep_memory = false;  // of versions that go, for the next ones
  store::NumaPolicy numa;    // where copies lie
  worker::ScrubOptions scrub;
  std::string coordinator;
  std::string secret;
  proto::Role role = proto::ROLE_AGENT;
  RdmaOptions rdma;
};

// What the daemon and a command's embedded agent have in common: store, engine, pools, the link to
// the coordinator; publishing, pulling, retiring. Control thread only, except where it says
// otherwise.
class AgentCore {
 public:
  // Opens and locks the store (blocking).
  static Result<std::unique_ptr<AgentCore>> create(boost::asio::any_io_executor executor,
                                                   const CoreOptions& options);
  ~AgentCore();
  AgentCore(const AgentCore&) = delete;
  AgentCore& operator=(const AgentCore&) = delete;

  // Starts the link to the coordinator, if one is configured. A member registers and heartbeats.
  void connect_coordinator(bool member, const std::string& failure_domain,
                           const std::string& control_endpoint);
  async::Task<void> stop();

  async::Task<Result<TransferSummary>> publish(PublishRequest request, OnProgress progress);
  // What a worker has filled.
  async::Task<Result<TransferSummary>> publish_filled(ModelVersion id,
                                                      store::FilledSegments filled);
  async::Task<Result<pull::PullJob::Outcome>> pull(PullRequest request, OnProgress progress,
                                                   pull::PullWatch watch = {});
  async::Task<Result<PlanSummary>> plan(PullRequest request);
  // Ends its readers, then lets go of it.
  async::Task<Result<std::uint64_t>> retire(ModelVersion id);
  // The same of one copy, which does not verify; its readers are not waited for.
  async::Task<Result<std::uint64_t>> drop(std::shared_ptr<const store::StoredVersion> copy);

  // From here on copies are looked at, verified and read again in the background.
  void watch_copies();
  // Reads all copies of a version again, now, and mends what is wrong where peers can help.
  // kNotFound: there is none.
  async::Task<Result<std::vector<proto::CopyStatus>>> verify(ModelVersion id);
  // Whole copies here, and those that are set aside.
  std::vector<proto::CopyStatus> copies() const;
  // Told of copies that are found wrong: CopyMender::Hooks::event.
  using CopyEvent = std::function<void(std::string kind, const ModelVersion& id, std::string why)>;
  void tell_copy_events(CopyEvent hook) { copy_event_ = std::move(hook); }

  // Who else reads versions here, beside pullers: they are let go only when nobody does.
  void count_readers_with(std::function<std::uint32_t(const ModelVersion&)> readers) {
    other_readers_ = std::move(readers);
  }
  // From here on what pulls have verified is served while they still run.
  void serve_through(PeerService& service);
  // Before a version is let go: waits for the workers that use it, or ends them.
  using BeforeRetire = std::function<async::Task<void>(ModelVersion)>;
  void before_retire(BeforeRetire hook) { before_retire_ = std::move(hook); }

  const rpc::Identity& identity() const { return identity_; }
  store::SegmentStore& store() { return *store_; }
  ServedVersions& served() { return *served_; }
  transport::SegmentRegistry& registry() { return *registry_; }
  Rdma* rdma() { return rdma_.get(); }  // nullptr: none here
  GrantClock& grant_clock() { return grant_clock_; }
  worker::CopyVerifier& verifier() { return *verifier_; }
  WorkerPool& digest_pool() { return *digest_pool_; }
  WorkerPool& blocking_pool() { return *blocking_pool_; }
  CoordinatorLink* link() const { return link_.get(); }
  proto::NodeAddress address() const;
  boost::asio::any_io_executor executor() const { return executor_; }

 private:
  AgentCore(boost::asio::any_io_executor executor, const CoreOptions& options);
  async::Task<Result<void>> claim(const Manifest& manifest, std::optional<std::uint32_t> replicas);
  void changed();
  std::uint32_t readers_of(const ModelVersion& id) const;
  RoomMaker::Hooks room_hooks();
  async::Task<Result<std::uint64_t>> discard_unfinished_before(ModelVersion id);
  async::Task<Result<void>> fetch(ModelVersion id);
  void share(const store::PendingVersion& pending, std::shared_ptr<const swarm::HeldTiles> held,
             bool for_round);
  async::Task<void> unshare(ModelVersion id, Digest root, Digest layout);
  bool is_being_filled(const ModelVersion& id) const;
  async::Task<void> let_go_of_unlisted(ModelVersion id);
  using Staged = Result<std::shared_ptr<store::SegmentStore::Staged>>;
  using Stage = std::function<Staged(const std::function<void(const store::PublishProgress&)>&)>;
  async::Task<Result<TransferSummary>> publish_staged(ModelVersion id,
                                                      std::optional<std::uint32_t> replicas,
                                                      Stage stage, OnProgress progress);
  worker::CopyVerifier::Hooks verifier_hooks();
  CopyMender::Hooks mender_hooks();
  Result<void> check_not_retiring(const ModelVersion& id) const;
  // False: it is being let go of, or the store has let go of it meanwhile.
  bool serve(const std::shared_ptr<const store::StoredVersion>& stored);
  async::Task<void> forget(std::shared_ptr<const store::StoredVersion> stored);
  async::Task<void> announce_growth();
  async::Task<Result<pull::PullJob::Outcome>> pull_alone(PullRequest request, OnProgress progress,
                                                         pull::PullWatch watch);

  const boost::asio::any_io_executor executor_;
  const CoreOptions options_;
  rpc::Identity identity_;
  std::string control_endpoint_;
  std::unique_ptr<WorkerPool> digest_pool_;
  std::unique_ptr<WorkerPool> blocking_pool_;
  std::unique_ptr<store::SegmentStore> store_;
  std::unique_ptr<worker::CopyVerifier> verifier_;
  std::unique_ptr<worker::Scrubber> scrubber_;
  std::unique_ptr<CopyMender> mender_;
  CopyEvent copy_event_;
  std::unique_ptr<transport::SegmentRegistry> registry_;
  std::unique_ptr<Rdma> rdma_;
  std::unique_ptr<ServedVersions> served_;
  std::vector<std::unique_ptr<transport::Connector>> connectors_;
  std::unique_ptr<transport::Engine> engine_;
  GrantClock grant_clock_;
  std::shared_ptr<CoordinatorLink> link_;
  boost::asio::cancellation_signal link_cancel_;
  bool link_running_ = false;
  bool member_ = false;
  PeerService* service_ = nullptr;
  std::function<std::uint32_t(const ModelVersion&)> other_readers_;
  std::unique_ptr<FleetDuties> duties_;
  std::unique_ptr<RoomMaker> room_;
  std::map<CopyKey, swarm::AnnouncePolicy> growing_;  // copies that are being filled
  bool announcing_growth_ = false;
  SharedPulls pulls_;
  bool stopping_ = false;
  async::TaskGroup suspects_{executor_};  // sessions that end because a file has changed
  BeforeRetire before_retire_;
  // Versions that a retire() is letting go of: nobody is told that one of them is here. Once per
  // call.
  std::multiset<ModelVersion> retiring_;
  pull::PullEnvironment environment_;
};

// The boot id: equal on two agents of one host.
std::string host_id();
std::string default_node_id();

}  // namespace rekindle::agent
