#include "tests/sim/sim_agent.h"

#include <algorithm>
#include <utility>

#include "tests/sim/sim_pull.h"

namespace rekindle::sim {

namespace {

constexpr Duration kConnectDeadline = 2s;
constexpr Duration kHeartbeat = 250ms;
constexpr Duration kTtl = 2s;
constexpr Duration kCallDeadline = 3s;
constexpr Duration kReportEvery = 500ms;
// A puller is taken for dead after this long.
constexpr Duration kSessionSilence = 15s;
constexpr Duration kReattachAfter = 400ms;

}  // namespace

SimAgent::SimAgent(World& world, SimCoordinator& coordinator, Peers& peers, std::string name,
                   std::string domain, std::uint64_t capacity)
    : world_(world),
      coordinator_(coordinator),
      peers_(peers),
      name_(std::move(name)),
      domain_(std::move(domain)),
      capacity_(capacity),
      process_(world.add_process()) {}

SimAgent::~SimAgent() = default;

void SimAgent::start() {
  world_.start(process_);
  info_.node_id = name_;
  info_.incarnation = world_.id<Incarnation>();
  info_.control_endpoint = fmt::format("10.0.0.{}:7400", process_);
  info_.host_id = fmt::format("host-{}", process_);
  registered_ = false;
  announce_due_ = false;
  failures_ = 0;
  coordinator_ms_ = 0;
  draining_.clear();
  failed_fetches_.clear();
  sessions_.clear();
  pull_.reset();
  worker_.reset();
  connect();
  expire_sessions();
}

void SimAgent::crash() {
  pull_.reset();
  // The kernel closes its connections.
  world_.send(process_, coordinator_.process(), [this, info = info_, connection = connection_] {
    coordinator_.disconnected(info, connection);
  });
  world_.kill(process_);
}

void SimAgent::lose_power() {
  pull_.reset();
  world_.kill(process_);
  store_.clear();
  // The epoch is kept in the store.
  epoch_ = 0;
}

void SimAgent::connect() {
  registered_ = false;
  connection_ = fmt::format("{}/{}", process_, ++link_);
  link_sequence_ = 0;
  world_.call_later<Registered>(
      process_, coordinator_.process(), kConnectDeadline,
      [this, info = info_, epoch = epoch_,
       connection = connection_](const Reply<Registered>& reply) {
        coordinator_.enroll(info, domain_, epoch, connection, reply);
      },
      [this, link = link_](Result<Registered> answer) {
        if (link != link_) return;
        if (!answer || answer->epoch < epoch_) return lost();
        epoch_ = answer->epoch;
        registered_ = true;
        failures_ = 0;
        announce_due_ = true;
        go_on(link);
      });
}

void SimAgent::lost() {
  registered_ = false;
  world_.send(process_, coordinator_.process(), [this, info = info_, connection = connection_] {
    coordinator_.disconnected(info, connection);
  });
  const Duration backoff = std::min<Duration>(100ms * (1 << std::min(failures_++, 5)), 2s);
  world_.in_process(process_, world_.between(backoff / 2, backoff), [this, link = link_] {
    if (link == link_) connect();
  });
}

template <typename T>
void SimAgent::link_call(Duration deadline, std::function<Served<T>()> serve,
                         std::function<void(Result<T>)> done) {
  world_.call<T>(
      process_, coordinator_.process(), deadline,
      [this, serve = std::move(serve), connection = connection_,
       sequence = ++link_sequence_]() -> Served<T> {
        return coordinator_.in_order(connection, sequence) ? serve() : std::nullopt;
      },
      [this, link = link_, done = std::move(done)](Result<T> answer) {
        if (link == link_) done(std::move(answer));
      });
}

void SimAgent::go_on(std::uint64_t link) {
  if (link != link_) return;
  if (announce_due_) return announce();
  beat();
}

void SimAgent::announce() {
  announce_due_ = false;
  // Copies whose claim could not be made durable are announced again.
  world_.call_later<std::vector<AnnounceConflict>>(
      process_, coordinator_.process(), 5s,
      [this, info = info_, epoch = epoch_, held = holdings(), connection = connection_,
       sequence = ++link_sequence_](const Reply<std::vector<AnnounceConflict>>& reply) {
        if (!coordinator_.in_order(connection, sequence)) return;
        coordinator_.announce(info, epoch, held, reply);
      },
      [this, link = link_](Result<std::vector<AnnounceConflict>> answer) {
        if (link != link_) return;
        if (!answer) return lost();
        for (const AnnounceConflict& conflict : *answer) {
          announce_due_ = announce_due_ || conflict.again;
        }
        beat();
      });
}

void SimAgent::beat() {
  Heartbeat heartbeat;
  heartbeat.epoch = epoch_;
  heartbeat.store_free_bytes = free_bytes();
  for (const ModelVersion& id : draining_) {
    heartbeat.readers[id] = static_cast<std::uint32_t>(readers_of(id));
  }
  heartbeat.failed_fetches = failed_fetches_;
  link_call<HeartbeatAnswer>(
      kTtl, [this, info = info_, heartbeat] { return coordinator_.heartbeat(info, heartbeat); },
      [this, said = failed_fetches_.size()](Result<HeartbeatAnswer> answer) {
        if (!answer || answer->epoch < epoch_) return lost();
        failed_fetches_.erase(failed_fetches_.begin(),
                              failed_fetches_.begin() + static_cast<std::ptrdiff_t>(said));
        take(*answer);
        world_.in_process(process_, kHeartbeat, [this, link = link_] { go_on(link); });
      });
}

void SimAgent::take(const HeartbeatAnswer& answer) {
  require(answer.epoch >= epoch_, "{} takes a word of epoch {} after {}", name_, answer.epoch,
          epoch_);
  coordinator_ms_ = answer.coordinator_time_ms;
  coordinator_heard_ = world_.now();
  draining_.clear();
  draining_.insert(answer.retiring.begin(), answer.retiring.end());
  draining_.insert(answer.retire.begin(), answer.retire.end());
  for (const ModelVersion& id : answer.retire) let_go(id);
  for (const auto& task : answer.fetch) fetch(task);
}

void SimAgent::let_go(const ModelVersion& id) {
  const auto found = store_.find(id);
  if (found == store_.end() || (pull_ != nullptr && pull_->id() == id)) return;
  require(readers_of(id) == 0, "{} lets go of {} under {} readers", name_, id.to_string(),
          readers_of(id));
  store_.erase(found);
  announce_due_ = true;
}

std::uint64_t SimAgent::readers_of(const ModelVersion& id) const {
  const bool mapped = worker_ && !worker_->failed && worker_->loaded && worker_->id == id;
  return static_cast<std::uint64_t>(std::ranges::count_if(
             sessions_, [&](const auto& entry) { return entry.second.id == id; })) +
         (mapped ? 1 : 0);
}

std::vector<Holding> SimAgent::holdings() const {
  std::vector<Holding> result;
  for (const auto& [id, copy] : store_) {
    Holding holding;
    holding.id = id;
    holding.root = copy.root;
    holding.tensor_set = test::numbered_digest(test::first_number(copy.root), 2);
    holding.layout = {1, 3};
    holding.payload_bytes = holding.checkpoint_bytes = kVersionBytes;
    holding.complete = holding.verified = copy.committed;
    holding.whole = true;
    if (!copy.committed) {
      for (std::uint32_t i = 0; i < kTiles; ++i) {
        if (copy.verified[i]) holding.held.emplace_back(i, i + 1);
      }
      if (holding.held.empty()) continue;
    }
    result.push_back(std::move(holding));
  }
  return result;
}

std::uint64_t SimAgent::free_bytes() const {
  const std::uint64_t used = store_.size() * kVersionBytes;
  return used >= capacity_ ? 0 : capacity_ - used;
}

Result<std::uint64_t> SimAgent::open_session(const GrantTerms& grant, const ModelVersion& id) {
  if (grant.source != info_.incarnation) return fail(ErrorCode::kStale, "another life");
  const auto heard_for =
      static_cast<std::uint64_t>(milliseconds(world_.now() - coordinator_heard_));
  if (coordinator_ms_ != 0 && grant.expiry_ms < coordinator_ms_ + heard_for) {
    return fail(ErrorCode::kDenied, "the grant has expired");
  }
  const auto found = store_.find(id);
  if (found == store_.end() || found->second.root != grant.root) {
    return fail(ErrorCode::kStale, "{} is not held here", id.to_string());
  }
  if (draining_.contains(id)) return fail(ErrorCode::kStale, "it is being let go");
  sessions_[next_session_] = {grant.puller, id, world_.now()};
  return next_session_++;
}

Result<std::uint64_t> SimAgent::read(std::uint64_t session, std::size_t tile) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return fail(ErrorCode::kStale, "no such session");
  found->second.last_read = world_.now();
  const auto copy = store_.find(found->second.id);
  require(copy != store_.end(), "{}: memory of {} is gone under its reader", name_,
          found->second.id.to_string());
  if (!copy->second.verified[tile]) return fail(ErrorCode::kStale, "not here yet");
  return copy->second.tiles[tile] + (world_.chance(corrupts_percent_) ? 1 : 0);
}

void SimAgent::expire_sessions() {
  std::erase_if(sessions_, [&](const auto& entry) {
    return world_.now() - entry.second.last_read > kSessionSilence;
  });
  world_.in_process(process_, 1s, [this] { expire_sessions(); });
}

void SimAgent::publish(const ModelVersion& id, std::optional<std::uint32_t> replicas) {
  if (!registered_ || store_.contains(id) || free_bytes() < kVersionBytes) return;
  const Digest root = test::numbered_digest(1 + world_.pick(1000000), 1);
  world_.call_later<std::uint64_t>(
      process_, coordinator_.process(), kCallDeadline,
      [this, info = info_, id, root, replicas](const Reply<std::uint64_t>& reply) {
        coordinator_.publish(info, id, root, kVersionBytes, replicas, reply);
      },
      [this, id, root](Result<std::uint64_t> claimed) {
        if (!claimed || store_.contains(id)) return;
        Copy& copy = store_[id];
        copy.root = root;
        copy.committed = true;
        for (std::size_t i = 0; i < kTiles; ++i) {
          copy.tiles[i] = tile_of(root, i);
          copy.verified[i] = true;
        }
        announce_due_ = true;
      });
}

void SimAgent::retire(const ModelVersion& id) {
  world_.call_later<std::uint32_t>(
      process_, coordinator_.process(), kCallDeadline,
      [this, id](const Reply<std::uint32_t>& reply) { coordinator_.retire(id, reply); },
      [](const Result<std::uint32_t>&) {});
}

void SimAgent::drain(const std::string& node_id, bool drained) {
  world_.call_later<Draining>(
      process_, coordinator_.process(), kCallDeadline,
      [this, node_id, drained](const Reply<Draining>& reply) {
        coordinator_.drain(node_id, drained, reply);
      },
      [](const Result<Draining>&) {});
}

void SimAgent::pull(const std::string& model, std::optional<std::uint64_t> version) {
  begin_pull(model, version, /*is_task=*/false);
}

void SimAgent::begin_pull(const std::string& model, std::optional<std::uint64_t> version,
                          bool is_task) {
  if (pull_ != nullptr) return;
  pull_ = std::make_unique<SimPull>(*this, model, version, is_task);
  pull_->open();
}

void SimAgent::fetch(const HeartbeatAnswer::Fetch& task) {
  const auto found = store_.find(task.id);
  if (found != store_.end() && found->second.committed) {
    // The copy is here: announce it again.
    announce_due_ = true;
    return;
  }
  begin_pull(task.id.model, task.id.version, /*is_task=*/true);
}

void SimAgent::pull_ended(const ModelVersion& id, bool ok, bool is_task) {
  pull_.reset();
  announce_due_ = true;
  if (!ok && is_task) failed_fetches_.push_back(id);
}

void SimAgent::attach(std::uint32_t rank, std::uint32_t world, std::uint64_t generation) {
  if (worker_ && worker_->generation >= generation) return;
  const bool reports = worker_.has_value();
  const std::uint64_t sequence = reports ? worker_->sequence : 0;
  worker_ = Worker{rank, world, generation, {}, false, false, sequence, InstanceState::kLoading};
  if (!reports) report_worker();
}

void SimAgent::kill_worker() {
  if (!worker_ || worker_->failed) return;
  worker_->failed = true;
  worker_->loaded = false;
  world_.in_process(process_, kReattachAfter, [this, generation = worker_->generation] {
    if (worker_ && worker_->generation == generation) worker_->failed = false;
  });
}

RankReport SimAgent::worker_report() const {
  RankReport report;
  report.node_id = name_;
  report.incarnation = info_.incarnation;
  report.instance = "chat";
  report.generation = worker_->generation;
  report.rank = worker_->rank;
  report.world = worker_->world;
  report.model = "m";
  report.has = worker_->id;
  report.state = worker_->failed   ? RankState::kFailed
                 : worker_->loaded ? RankState::kLoaded
                                   : RankState::kAttached;
  report.sequence = worker_->sequence;
  report.why = "the worker was killed";
  return report;
}

// The worker takes its weights from the store. A version that is not there is pulled.
void SimAgent::report_worker() {
  if (worker_->id && !worker_->loaded && !worker_->failed) {
    const auto found = store_.find(*worker_->id);
    const bool here = found != store_.end() && found->second.committed;
    worker_->loaded = here && !draining_.contains(*worker_->id);
    if (worker_->loaded) coordinator_.note_loaded(worker_report());
    if (!here) begin_pull(worker_->id->model, worker_->id->version, /*is_task=*/false);
  }
  ++worker_->sequence;
  world_.call<InstanceAnswer>(
      process_, coordinator_.process(), kCallDeadline,
      [this, report = worker_report()] { return coordinator_.report_rank(report); },
      [this, generation = worker_->generation](Result<InstanceAnswer> answer) {
        if (worker_ && worker_->generation == generation) take_rank(answer);
      });
  world_.in_process(process_, kReportEvery, [this] { report_worker(); });
}

void SimAgent::take_rank(const Result<InstanceAnswer>& answer) {
  if (!answer) return;
  if (worker_->id && *worker_->id != answer->id) worker_->loaded = false;  // attach it again
  worker_->id = answer->id;
  worker_->state = answer->state;
}

}  // namespace rekindle::sim
