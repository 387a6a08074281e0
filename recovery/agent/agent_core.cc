#include "recovery/agent/agent_core.h"

#include <algorithm>
#include <fstream>
#include <optional>
#include <thread>
#include <utility>

#include <unistd.h>

#include "src/base/clock.h"
#include "src/base/log.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::agent {

using async::Task;

namespace {

constexpr std::chrono::milliseconds kStopDeadline{2000};
// A cancelled pull drains.
constexpr std::chrono::milliseconds kDutiesDeadline{10000};
constexpr std::size_t kDigestQueue = 8192;
constexpr std::size_t kBlockingQueue = 256;

// 400 GB/s of NICs want 80 (docs/internals/scale.md); without work they sleep. Two CPUs have two.
std::size_t digest_threads() {
  return std::clamp((std::thread::hardware_concurrency() * 3 + 3) / 4, 1u, 96u);
}

std::size_t blocking_threads() { return std::clamp(std::thread::hardware_concurrency(), 4u, 16u); }

Result<std::unique_ptr<store::SegmentStore>> open_store(const CoreOptions& options,
                                                        const Rdma* rdma) {
  // Where a device can register only memory that is mapped for writing, read leases on the store's
  // own files cannot be taken.
  const bool only_stamps = rdma != nullptr && rdma->maps_files_for_writing();
  if (only_stamps) {
    log::info("store.no_leases", "why",
              "this kernel lets RDMA devices register only what is mapped for writing", "effect",
              "writes through a mapping to a copy's files may be found by the scrub only");
  }
  store::NumaPolicy numa = options.numa;
  if (numa.kind == store::NumaPolicy::Kind::kAuto && rdma != nullptr) numa.node = rdma->numa_node();
  return store::SegmentStore::open(
      {options.store_directory, options.store_budget_bytes,
       options.keep_memory ? std::nullopt : std::optional(0ull), options.reserve_bytes, numa,
       only_stamps ? store::Evidence::kStamps : store::Evidence::kLeases,
       options.publishers.trust});
}

std::unique_ptr<WorkerPool> make_digest_pool() {
  const auto groups = worker_groups(usable_numa_nodes(), allowed_cpus(), digest_threads());
  for (const WorkerGroup& group : groups) {
    if (group.node < 0) continue;
    log::info("digest.threads", "node", group.node, "threads", group.threads, "cpus",
              number_list(group.cpus));
  }
  return std::make_unique<WorkerPool>("rk-digest", groups, kDigestQueue);
}

}  // namespace

std::string host_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

std::string default_node_id() {
  char name[256] = {};
  if (gethostname(name, sizeof name - 1) != 0 || name[0] == 0) return "localhost";
  return name;
}

Result<std::unique_ptr<AgentCore>> AgentCore::create(boost::asio::any_io_executor executor,
                                                     const CoreOptions& options) {
  const auto& fabric = options.rdma.fabric;
  TRY(auto topology, transport::verbs::Topology::open(fabric.sysfs, fabric.topology_file));
  TRY(auto rdma, Rdma::open(options.rdma));
  TRY(auto store, open_store(options, rdma.get()));
  return std::unique_ptr<AgentCore>(new AgentCore(std::move(executor), options,
                                                  NumaChoice(std::move(topology), "/proc"),
                                                  std::move(rdma), std::move(store)));
}

// The hooks refer to units that are made later: they are called only once the agent runs.
AgentCore::AgentCore(boost::asio::any_io_executor executor, const CoreOptions& options,
                     NumaChoice numa, std::unique_ptr<Rdma> rdma,
                     std::unique_ptr<store::SegmentStore> store)
    : executor_(std::move(executor)),
      identity_(make_identity(options)),
      publishers_(options.publishers),
      audit_(options.audit != nullptr ? *options.audit : unheard_),
      numa_(std::move(numa)),
      rdma_(std::move(rdma)),
      digest_pool_(make_digest_pool()),
      blocking_pool_(
          std::make_unique<WorkerPool>("rk-blocking", blocking_threads(), kBlockingQueue)),
      plans_(std::make_unique<pull::PullPlans>(executor_, pull::PullPlans::for_this_host())),
      store_(std::move(store)),
      served_(registry_),
      engine_(transport::Engine::create({.nodes = usable_numa_nodes()})),
      link_(executor_, identity_, grant_clock_, options.coordinator),
      sources_(executor_, parts(),
               [this](const ModelVersion& id) {
                 return room_.is_leaving(id) || retirement_.is_retiring(id);
               }),
      retirement_(parts(),
                  {.is_being_filled =
                       [this](const ModelVersion& id) { return sources_.is_being_filled(id); },
                   .copies_removed = [this] { health_.verifier().let_go_of_unlisted(); }}),
      room_(executor_, parts(),
            {.is_being_filled =
                 [this](const ModelVersion& id) { return sources_.is_being_filled(id); },
             .retire = [this](ModelVersion id) { return retirement_.retire(std::move(id)); }}),
      publisher_(executor_, parts(), retirement_, sources_),
      joint_agent_(parts(), publisher_, sources_, retirement_, [this] { return address(); }),
      joint_(executor_, joint_agent_),
      environment_(make_environment(options)),
      pulls_(parts(), retirement_, sources_, environment_),
      health_(executor_, parts(), options.scrub,
              {.drop =
                   [this](std::shared_ptr<const store::StoredVersion> copy) {
                     return retirement_.drop(std::move(copy));
                   },
               .pull = [this](pull::PullRequest request) -> Task<Result<void>> {
                 pull::PullWatch nobody_watches;
                 auto outcome = co_await pulls_.pull_alone(std::move(request), OnProgress(),
                                                           std::move(nobody_watches));
                 if (!outcome) co_return fail(std::move(outcome).error());
                 co_return Result<void>();
               }}),
      duties_(executor_, served_, duties_hooks()) {
  for (const auto& stored : store_->versions()) served_.add(stored);
  environment_.tracer = options.tracer;
  environment_.links = options.links;
  publisher_.trace_in(options.tracer);
  if (options.metrics == nullptr) return;
  publish_metrics_ = std::make_unique<PublishMetrics>(*options.metrics);
  pull_metrics_ = std::make_unique<pull::PullMetrics>(*options.metrics);
  joint_metrics_ = std::make_unique<joint::JointMetrics>(*options.metrics);
  publisher_.count_in(publish_metrics_.get());
  joint_.count_in(joint_metrics_.get());
  environment_.metrics = pull_metrics_.get();
}

// The pools' work uses the store, the servers' tables and the verifier, so it ends first. The
// engine ends before the pools, because it gives them work.
AgentCore::~AgentCore() {
  engine_.reset();
  plans_.reset();
  blocking_pool_.reset();
  digest_pool_.reset();
}

AgentParts AgentCore::parts() {
  return {identity_, *store_, *blocking_pool_, *digest_pool_, registry_,
          served_,   link_,   readers_,        publishers_};
}

rpc::Identity AgentCore::make_identity(const CoreOptions& options) {
  rpc::Identity identity = rpc::make_identity(
      options.role, options.node_id.empty() ? default_node_id() : options.node_id,
      options.credentials);
  identity.epoch = [this] { return grant_clock_.epochs().highest(); };
  identity.heard_epoch = [this](std::uint64_t epoch) {
    grant_clock_.epochs().hear(epoch, steady_now());
  };
  return identity;
}

pull::PullEnvironment AgentCore::make_environment(const CoreOptions& options) {
  connectors_.push_back(transport::shm::make_connector());
  const auto make_tcp = [&](transport::tcp::Encryption encryption) {
    connectors_.push_back(transport::tcp::make_connector(options.tcp_congestion, encryption));
    return connectors_.back().get();
  };
  auto* const tcp = make_tcp(transport::tcp::Encryption::kWhereDemanded);
  auto* const encrypting = make_tcp(transport::tcp::Encryption::kAlways);
  pull::PullEnvironment environment;
  environment.executor = executor_;
  environment.identity = identity_;
  environment.store = store_.get();
  environment.engine = engine_.get();
  environment.digest_pool = digest_pool_.get();
  environment.blocking_pool = blocking_pool_.get();
  environment.plans = plans_.get();
  environment.trust = &publishers_.trust;
  environment.connectors = {connectors_.front().get(), options.encrypt ? encrypting : tcp};
  environment.encrypting = encrypting;
  environment.trusts_rails = options.rdma.trusted_only;
  if (rdma_ != nullptr) environment.handshakes.push_back(&rdma_->connector());
  environment.coordinator = [this] { return link_.client(); };
  environment.coordinator_problem = [this] { return link_.problem(); };
  environment.has_coordinator = link_.configured();
  environment.self = address();
  environment.require_verified = [this](std::shared_ptr<const store::StoredVersion> stored) {
    return health_.require_settled(std::move(stored));
  };
  environment.numa_node = [this](const pull::PullRequest& request) {
    return numa_.node_for(request);
  };
  environment.make_room = [this](ModelVersion wanted, RoomMaker::MissingBytes missing) {
    return room_.make(std::move(wanted), std::move(missing));
  };
  return environment;
}

proto::NodeAddress AgentCore::address() const {
  proto::NodeAddress address;
  address.set_node_id(identity_.node_id);
  address.set_incarnation(identity_.incarnation.to_bytes());
  address.set_control_endpoint(control_endpoint_);
  address.set_host_id(host_id());
  return address;
}

void AgentCore::connect_coordinator(const std::string& failure_domain,
                                    const std::string& control_endpoint) {
  control_endpoint_ = control_endpoint;
  environment_.self = address();
  link_.start(failure_domain, link_callbacks());
}

CoordinatorLink::Callbacks AgentCore::link_callbacks() {
  CoordinatorLink::Callbacks callbacks;
  callbacks.self = [this] { return address(); };
  callbacks.holdings = [this] { return holdings(); };
  callbacks.registered = [this](const Incarnation& term) { duties_.registered(term); };
  callbacks.fill = [this](proto::HeartbeatRequest& request) {
    // The engine's threads make progress for as long as the engine lives.
    request.set_progress(1);
    duties_.fill(request);
  };
  callbacks.obey = [this](const proto::HeartbeatResponse& answer) { duties_.obey(answer); };
  callbacks.other_root = [this](const ModelVersion& id, const std::string& why) {
    for (const auto& stored : store_->find(id)) health_.verifier().reject(stored, why);
  };
  return callbacks;
}

std::vector<proto::Holding> AgentCore::holdings() const {
  std::vector<proto::Holding> holdings;
  for (const auto& [key, served] : served_.all()) {
    const bool quarantined = served.stored != nullptr &&
                             served.stored->verification->state() == store::CopyState::kQuarantined;
    const bool empty = !served.complete() && served.held->count() == 0;
    if (!quarantined && !empty) holdings.push_back(make_holding(served));
  }
  return holdings;
}

FleetDuties::Hooks AgentCore::duties_hooks() {
  FleetDuties::Hooks hooks;
  hooks.free_bytes = [this] {
    return store_->budget_bytes() - std::min(store_->used_bytes(), store_->budget_bytes());
  };
  hooks.readers = [this](const ModelVersion& id) { return readers_.count(id); };
  hooks.retire = [this](ModelVersion id) -> Task<Result<void>> {
    const auto freed = co_await retirement_.retire(id);
    const Result<void> done = freed ? Result<void>() : fail(freed.error());
    // The coordinator orders it until it hears that the version is gone.
    if (done || done.error().code() != ErrorCode::kNotFound) {
      note_order("ordered_retire", id.to_string(), done);
    }
    co_return done;
  };
  hooks.fetch = [this](ModelVersion id) -> Task<Result<void>> {
    auto fetching = pulls_.fetch_replica(id);
    const Result<void> done = co_await std::move(fetching);
    note_order("ordered_fetch", id.to_string(), done);
    co_return done;
  };
  hooks.drained = [this](bool drained) {
    note_order(drained ? "ordered_drain" : "ordered_undrain", identity_.node_id, {});
  };
  hooks.announce_soon = [this] { link_.announce_soon(); };
  return hooks;
}

void AgentCore::note_order(const char* act, const std::string& object,
                           const Result<void>& outcome) {
  const auto coordinator = link_.client();
  // It may have gone meanwhile.
  audit_.note(rpc::audit_entry(coordinator != nullptr ? coordinator->peer() : rpc::Peer(), act,
                               object, outcome));
}

void AgentCore::serve_through(PeerSessions& sessions) {
  readers_.set_peers(sessions);
  environment_.share = [this](const store::PendingVersion& pending,
                              std::shared_ptr<const swarm::HeldTiles> held, bool for_round) {
    sources_.begin(pending, std::move(held), for_round);
  };
  environment_.unshare = [this](ModelVersion id, Digest root, Digest layout) {
    return sources_.abandon({std::move(id), root, layout});
  };
}

Task<void> AgentCore::stop() {
  co_await joint_.close(kStopDeadline);
  co_await duties_.stop(kDutiesDeadline);
  co_await health_.close(kStopDeadline);
  co_await link_.close(kStopDeadline);
  co_await sources_.close(kStopDeadline);
}

}  // namespace rekindle::agent
