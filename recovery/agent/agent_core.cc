#include "recovery/agent/agent_core.h"

#include <algorithm>
#include <fstream>
#include <thread>
#include <utility>

#include <unistd.h>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>

#include "recovery/agent/announced.h"
#include "recovery/rpc/address.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "src/async/offload.h"
#include "src/async/task.h"
#include "src/base/log.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::agent {

using async::Task;

namespace {

constexpr std::chrono::milliseconds kCoordinatorWait{3000};
constexpr std::chrono::milliseconds kClaimDeadline{3000};
constexpr std::chrono::milliseconds kStopDeadline{2000};
constexpr std::chrono::milliseconds kDutiesDeadline{10000};  // a cancelled pull drains
constexpr std::chrono::milliseconds kGrowthLook{100};
constexpr std::chrono::hours kVerifyDeadline{1};  // 1 TB at 300 MB/s
constexpr std::size_t kDigestQueue = 8192;
constexpr std::size_t kBlockingQueue = 256;

// 400 GB/s of NICs want 80 (docs/scale.md); without work they sleep.
std::size_t digest_threads() {
  return std::clamp(std::thread::hardware_concurrency() * 3 / 4, 1u, 96u);
}

std::size_t blocking_threads() { return std::clamp(std::thread::hardware_concurrency(), 4u, 16u); }

// A copy that does not verify is being mended when the verifier says so, and its place is taken. A
// pull goes on when that has ended: with the mended copy, or with the rest of it.
Task<Result<void>> require_settled(worker::CopyVerifier& verifier, CopyMender& mender,
                                   std::shared_ptr<const store::StoredVersion> stored) {
  const ModelVersion id = stored->manifest.checkpoint->id;
  auto verified = co_await verifier.require(std::move(stored), kVerifyDeadline);
  if (!verified && verified.error().code() == ErrorCode::kCorrupt) co_await mender.settle(id);
  co_return verified;
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

AgentCore::AgentCore(boost::asio::any_io_executor executor, const CoreOptions& options)
    : executor_(std::move(executor)), options_(options) {}

Result<std::unique_ptr<AgentCore>> AgentCore::create(boost::asio::any_io_executor executor,
                                                     const CoreOptions& options) {
  auto core = std::unique_ptr<AgentCore>(new AgentCore(std::move(executor), options));
  TRY(core->rdma_, Rdma::open(options.rdma));
  // The store's own files under a read lease could not be mapped for writing.
  const bool only_stamps = core->rdma_ != nullptr && core->rdma_->maps_files_for_writing();
  if (only_stamps) {
    log::info("store.no_leases", "why",
              "this kernel lets RDMA devices register only what is mapped for writing", "effect",
              "writes through a mapping to a copy's files may be found by the scrub only");
  }
  TRY(core->store_, store::SegmentStore::open(
                        {options.store_directory, options.store_budget_bytes,
                         options.keep_memory ? std::nullopt : std::optional(0ull), options.numa,
                         only_stamps ? store::Evidence::kStamps : store::Evidence::kLeases}));
  core->identity_.role = options.role;
  core->identity_.node_id = options.node_id.empty() ? default_node_id() : options.node_id;
  core->identity_.incarnation = Incarnation::random();
  core->identity_.secret = options.secret;
  core->identity_.epoch = [raw = core.get()] { return raw->grant_clock_.epochs().highest(); };
  core->identity_.heard_epoch = [raw = core.get()](std::uint64_t epoch) {
    raw->grant_clock_.epochs().hear(epoch, std::chrono::steady_clock::now());
  };
  core->digest_pool_ = std::make_unique<WorkerPool>("rk-digest", digest_threads(), kDigestQueue);
  core->blocking_pool_ =
      std::make_unique<WorkerPool>("rk-blocking", blocking_threads(), kBlockingQueue);
  core->verifier_ =
      std::make_unique<worker::CopyVerifier>(core->executor_, *core->store_, *core->blocking_pool_,
                                             *core->digest_pool_, core->verifier_hooks());
  core->scrubber_ = std::make_unique<worker::Scrubber>(
      core->executor_, *core->store_, *core->verifier_, *core->blocking_pool_, options.scrub);
  core->mender_ = std::make_unique<CopyMender>(core->executor_, *core->store_,
                                               *core->blocking_pool_, core->mender_hooks());
  core->registry_ = std::make_unique<transport::SegmentRegistry>();
  core->served_ = std::make_unique<ServedVersions>(*core->registry_);
  for (const auto& stored : core->store_->versions()) core->served_->add(stored);
  core->connectors_.push_back(transport::shm::make_connector());
  core->connectors_.push_back(transport::tcp::make_connector());
  core->engine_ = transport::Engine::create({});

  auto& environment = core->environment_;
  environment.executor = core->executor_;
  environment.identity = core->identity_;
  environment.store = core->store_.get();
  environment.engine = core->engine_.get();
  environment.digest_pool = core->digest_pool_.get();
  environment.blocking_pool = core->blocking_pool_.get();
  for (const auto& connector : core->connectors_) environment.connectors.push_back(connector.get());
  if (core->rdma_ != nullptr) environment.handshakes.push_back(&core->rdma_->connector());
  environment.coordinator = [raw = core.get()]() -> std::shared_ptr<rpc::RpcClient> {
    return raw->link_ != nullptr ? raw->link_->client() : nullptr;
  };
  environment.coordinator_problem = [raw = core.get()] {
    if (raw->link_ == nullptr) return Error(ErrorCode::kUnavailable, "no coordinator");
    return Error(raw->link_->last_error()).with_context("coordinator " + raw->link_->address());
  };
  environment.has_coordinator = !options.coordinator.empty();
  environment.self = core->address();
  environment.require_verified =
      [raw = core.get()](std::shared_ptr<const store::StoredVersion> stored) {
        return require_settled(*raw->verifier_, *raw->mender_, std::move(stored));
      };
  core->room_ = std::make_unique<RoomMaker>(core->identity_, *core->store_, core->room_hooks());
  environment.make_room = [room = core->room_.get()](ModelVersion wanted,
                                                     RoomMaker::MissingBytes missing) {
    return room->make(std::move(wanted), std::move(missing));
  };
  return core;
}

// What the pools still run uses the store, the servers' tables and the verifier: it ends first. The
// engine before the pools: it gives them work.
AgentCore::~AgentCore() {
  engine_.reset();
  blocking_pool_.reset();
  digest_pool_.reset();
}

proto::NodeAddress AgentCore::address() const {
  proto::NodeAddress address;
  address.set_node_id(identity_.node_id);
  address.set_incarnation(identity_.incarnation.to_bytes());
  address.set_control_endpoint(control_endpoint_);
  address.set_host_id(host_id());
  return address;
}

void AgentCore::connect_coordinator(bool member, const std::string& failure_domain,
                                    const std::string& control_endpoint) {
  member_ = member;
  control_endpoint_ = control_endpoint;
  environment_.self = address();
  if (options_.coordinator.empty()) return;
  CoordinatorLink::Callbacks callbacks;
  callbacks.self = [this] { return address(); };
  callbacks.holdings = [this] {
    std::vector<proto::Holding> holdings;
    for (const auto& [key, served] : served_->all()) {
      if (served.stored != nullptr &&
          served.stored->verification->state() == store::CopyState::kQuarantined) {
        continue;
      }
      if (served.complete() || served.held->count() > 0) holdings.push_back(make_holding(served));
    }
    return holdings;
  };
  callbacks.progress = [this] { return environment_.engine != nullptr ? std::uint64_t{1} : 0; };
  FleetDuties::Hooks hooks;
  hooks.free_bytes = [this] {
    return store_->budget_bytes() - std::min(store_->used_bytes(), store_->budget_bytes());
  };
  hooks.readers = [this](const ModelVersion& id) { return readers_of(id); };
  hooks.retire = [this](ModelVersion id) -> Task<Result<void>> {
    CO_TRY(const auto freed, co_await retire(std::move(id)));
    (void)freed;
    co_return Result<void>();
  };
  hooks.fetch = [this](ModelVersion id) { return fetch(std::move(id)); };
  hooks.announce_soon = [this] { changed(); };
  duties_ = std::make_unique<FleetDuties>(executor_, *served_, std::move(hooks));
  callbacks.fill = [this](proto::HeartbeatRequest& request) { duties_->fill(request); };
  callbacks.obey = [this](const proto::HeartbeatResponse& answer) { duties_->obey(answer); };
  callbacks.other_root = [this](const ModelVersion& id, const std::string& why) {
    for (const auto& stored : store_->find(id)) verifier_->reject(stored, why);
  };
  // One that is no address is told by the attempt to connect to it.
  auto addresses = rpc::parse_addresses(options_.coordinator)
                       .value_or(std::vector<std::string>{options_.coordinator});
  link_ =
      std::make_shared<CoordinatorLink>(executor_, std::move(addresses), identity_, failure_domain,
                                        member, grant_clock_, std::move(callbacks));
  link_running_ = true;
  boost::asio::co_spawn(
      executor_,
      [](AgentCore* self, std::shared_ptr<CoordinatorLink> link) -> Task<void> {
        co_await boost::asio::this_coro::throw_if_cancelled(false);
        co_await link->run();
        self->link_running_ = false;
      }(this, link_),
      boost::asio::bind_cancellation_slot(link_cancel_.slot(), boost::asio::detached));
}

Task<void> AgentCore::stop() {
  if (duties_ != nullptr) co_await duties_->stop(kDutiesDeadline);
  stopping_ = true;
  (void)co_await scrubber_->close(kStopDeadline);
  (void)co_await mender_->close(kStopDeadline);
  (void)co_await verifier_->close(kStopDeadline);
  (void)co_await suspects_.close(kStopDeadline);
  if (link_ != nullptr) link_->stop();
  if (link_running_) link_cancel_.emit(boost::asio::cancellation_type::terminal);
  const auto give_up = std::chrono::steady_clock::now() + kStopDeadline;
  while ((link_running_ || announcing_growth_) && std::chrono::steady_clock::now() < give_up) {
    co_await async::sleep_for(std::chrono::milliseconds(5));
  }
}

void AgentCore::serve_through(PeerService& service) {
  service_ = &service;
  environment_.share = [this](const store::PendingVersion& pending,
                              std::shared_ptr<const swarm::HeldTiles> held,
                              bool for_round) { share(pending, std::move(held), for_round); };
  environment_.unshare = [this](ModelVersion id, Digest root, Digest layout) {
    return unshare(std::move(id), root, layout);
  };
}

void AgentCore::share(const store::PendingVersion& pending,
                      std::shared_ptr<const swarm::HeldTiles> held, bool for_round) {
  growing_[key_of(pending.manifest())] = {};
  served_->add_pending(pending, std::move(held), for_round);
  if (std::exchange(announcing_growth_, true)) return;
  boost::asio::co_spawn(executor_, announce_growth(), boost::asio::detached);
}

// First nobody finds it, then nobody reads it, then the memory is let go of.
Task<void> AgentCore::unshare(ModelVersion id, Digest root, Digest layout) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);  // once begun it is done
  const CopyKey key{id, root, layout};
  growing_.erase(key);
  const auto regions = served_->withdraw_pending(key);
  changed();
  if (service_ != nullptr) co_await service_->end_sessions_of(id, layout);
  for (const auto& region : regions) registry_->remove(region);
}

// While any copy is being filled.
Task<void> AgentCore::announce_growth() {
  while (!growing_.empty() && !stopping_) {
    const TimePoint now = std::chrono::steady_clock::now();
    bool due = false;
    for (auto& [key, policy] : growing_) {
      const Served* served = served_->find(key);
      if (served == nullptr || served->complete()) continue;
      const TileIndex total = served->checkpoint().tiles.tile_count();
      due = policy.due(served->held->count(), total, now) || due;
    }
    if (due) changed();
    co_await async::sleep_for(kGrowthLook);
  }
  announcing_growth_ = false;
}

void AgentCore::changed() {
  if (link_ != nullptr) link_->announce_soon();
}

// A whole copy, because the coordinator wants one here; its grants keep the rate.
Task<Result<void>> AgentCore::fetch(ModelVersion id) {
  PullRequest request;
  request.ref = {id.model, id.version};
  request.make_room = false;  // a copy more in the fleet is not worth one less
  CO_TRY(const auto outcome, co_await pull(std::move(request), {}));
  log::info("replica.ready", "version", id.to_string(), "fetched_bytes",
            outcome.summary.fetched_bytes);
  co_return Result<void>();
}

Task<Result<void>> AgentCore::claim(const Manifest& manifest,
                                    std::optional<std::uint32_t> replicas) {
  if (link_ == nullptr) co_return Result<void>();
  CO_TRY(const auto client, co_await link_->wait_connected(kCoordinatorWait));
  const Checkpoint& checkpoint = *manifest.checkpoint;
  proto::PublishRequest request;
  request.set_node_id(identity_.node_id);
  request.set_incarnation(identity_.incarnation.to_bytes());
  *request.mutable_id() = rpc::to_proto(checkpoint.id);
  *request.mutable_root() = rpc::to_proto(checkpoint.root);
  *request.mutable_tensor_set() = rpc::to_proto(checkpoint.tensors.digest());
  request.set_checkpoint_bytes(checkpoint.tensors.total_bytes());
  if (replicas) request.set_replicas(*replicas);
  CO_TRY(const auto response, co_await rpc::call<proto::COORDINATOR_PUBLISH>(
                                  client, std::move(request), kClaimDeadline));
  (void)response;
  co_return Result<void>();
}

Task<Result<TransferSummary>> AgentCore::publish(PublishRequest request, OnProgress progress) {
  Stage stage = [this, id = request.id, paths = std::move(request.paths)](const auto& on_bytes) {
    return store_->stage(id, paths, on_bytes);
  };
  auto published = publish_staged(std::move(request.id), request.replicas, std::move(stage),
                                  std::move(progress));
  co_return co_await std::move(published);
}

Task<Result<TransferSummary>> AgentCore::publish_filled(ModelVersion id,
                                                        store::FilledSegments filled) {
  // Once only: what it captured is handed on.
  auto shared = std::make_shared<store::FilledSegments>(std::move(filled));
  Stage stage = [this, id, shared](const auto& on_bytes) {
    return store_->stage_segments(id, std::move(*shared), on_bytes);
  };
  auto published = publish_staged(id, std::nullopt, std::move(stage), {});
  co_return co_await std::move(published);
}

Task<Result<TransferSummary>> AgentCore::publish_staged(ModelVersion id,
                                                        std::optional<std::uint32_t> replicas,
                                                        Stage stage, OnProgress progress) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const auto started = std::chrono::steady_clock::now();
  const std::string context = "publish " + id.to_string();
  auto on_bytes = [this, &progress, &id, started](const store::PublishProgress& bytes) {
    Progress update;
    update.phase = "copy";
    update.id = id;
    update.bytes_done = bytes.bytes_done;
    update.bytes_total = bytes.bytes_total;
    const double elapsed = seconds(std::chrono::steady_clock::now() - started);
    update.bytes_per_second = elapsed > 0 ? static_cast<double>(bytes.bytes_done) / elapsed : 0;
    // Called on the copying threads; everything else here lives on the control thread.
    boost::asio::post(executor_, [progress, update] {
      if (progress) progress(update);
    });
  };
  auto refused = [&](Error error) { return fail(std::move(error).with_context(context)); };
  if (auto free = check_not_retiring(id); !free) co_return refused(std::move(free).error());
  auto work = [&] { return stage(on_bytes); };
  auto staged = co_await async::offload(*blocking_pool_, work);
  if (!staged) co_return fail(std::move(staged).error().with_context(context));
  // After the claim it is carried through: the fleet has been told.
  // Nor is it begun while a retire of the same version would take the new copy along.
  Result<void> claimed = fail(ErrorCode::kUnavailable, "cancelled; nothing was published");
  const bool cancelled = co_await async::is_cancelled();
  if (!cancelled) claimed = check_not_retiring(id);
  if (claimed) claimed = co_await claim(store_->staged_manifest(**staged), replicas);
  if (!claimed) {
    co_await async::offload(*blocking_pool_, [&] {
      store_->discard_staged(*staged);
      return true;
    });
    co_return fail(std::move(claimed).error().with_context(context));
  }
  auto stored =
      co_await async::offload(*blocking_pool_, [&] { return store_->commit_staged(*staged); });
  if (!stored) co_return fail(std::move(stored).error().with_context(context));
  if (!serve(*stored)) {
    co_await forget(*stored);
    co_return fail(ErrorCode::kStale, "{} was retired while it was published", id.to_string());
  }
  if (link_ != nullptr) co_await link_->announce_now();

  const Manifest& manifest = (*stored)->manifest;
  TransferSummary summary;
  summary.id = id;
  summary.root = manifest.checkpoint->root;
  summary.layout = manifest.layout.digest();
  summary.path = (*stored)->directory;
  summary.bytes = manifest.layout.payload_bytes();
  summary.tensors = count_tensors(manifest.checkpoint->tensors, manifest.layout);
  summary.elapsed = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - started);
  log::info("publish.ready", "version", id.to_string(), "root", summary.root.hex(), "bytes",
            summary.bytes);
  co_return summary;
}

Task<Result<pull::PullJob::Outcome>> AgentCore::pull(PullRequest request, OnProgress progress,
                                                     pull::PullWatch watch) {
  SharedPulls::Run alone = [this](PullRequest what, OnProgress shown, pull::PullWatch watched) {
    return pull_alone(std::move(what), std::move(shown), std::move(watched));
  };
  co_return co_await pulls_.pull(std::move(request), std::move(progress), std::move(watch),
                                 std::move(alone));
}

Task<Result<pull::PullJob::Outcome>> AgentCore::pull_alone(PullRequest request, OnProgress progress,
                                                           pull::PullWatch watch) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  pull::PullTimes times;
  if (link_ != nullptr && request.from.empty()) {
    // Gives a coordinator that is just being reached a moment; without it the job decides what to
    // do. One budget for both.
    const auto began = std::chrono::steady_clock::now();
    (void)co_await link_->wait_connected(kCoordinatorWait);
    times.resolve -= std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::steady_clock::now() - began);
  }
  if (request.transport == "verbs" && rdma_ == nullptr) {
    co_return fail(ErrorCode::kUnavailable,
                   "--transport verbs: this host has no RDMA device that can be used; `rekindle "
                   "topo` shows why");
  }
  if (request.ref.version) {
    CO_TRY_VOID(check_not_retiring({request.ref.model, *request.ref.version}));
  }
  pull::PullJob job(environment_, std::move(request), std::move(progress), times, std::move(watch));
  auto outcome = co_await job.run();
  if (outcome) {
    if (!serve(outcome->stored)) {
      co_await forget(outcome->stored);
      co_return fail(ErrorCode::kStale, "{} was retired while it was pulled",
                     outcome->stored->manifest.checkpoint->id.to_string());
    }
    if (link_ != nullptr) co_await link_->announce_now();
  }
  co_return outcome;
}

Task<Result<PlanSummary>> AgentCore::plan(PullRequest request) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  if (link_ != nullptr && request.from.empty())
    (void)co_await link_->wait_connected(kCoordinatorWait);
  pull::PullJob job(environment_, std::move(request), {});
  co_return co_await job.plan_only();
}

// A copy that nobody was told of goes with those that are being retired.
Task<void> AgentCore::forget(std::shared_ptr<const store::StoredVersion> stored) {
  auto work = [this, stored] { return store_->retire_copy(*stored); };
  (void)co_await async::offload(*blocking_pool_, work);
}

// A copy that came now would be deleted with the others when the retire ends.
Result<void> AgentCore::check_not_retiring(const ModelVersion& id) const {
  if (!retiring_.contains(id)) return {};
  return fail(
      ErrorCode::kUnavailable,
      "{} is being retired on {}, which waits for its readers: try again when that has ended",
      id.to_string(), identity_.node_id);
}

bool AgentCore::serve(const std::shared_ptr<const store::StoredVersion>& stored) {
  const Manifest& manifest = stored->manifest;
  growing_.erase(key_of(manifest));
  const ModelVersion& id = manifest.checkpoint->id;
  if (room_->leaving(id) || retiring_.contains(id)) return false;
  if (store_->find(id, manifest.layout.digest()) != stored) return false;
  served_->add(stored);
  return true;
}

}  // namespace rekindle::agent
