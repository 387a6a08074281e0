#include "tests/sim/coordinator.h"

#include <algorithm>

namespace rekindle::sim {

namespace {

constexpr Duration kTick = 100ms;
constexpr Duration kMaxStep = 500ms;  // a longer gap between two looks at the clock is a pause

}  // namespace

SimCoordinator::SimCoordinator(World& world, const Limits& limits)
    : world_(world), limits_(limits), process_(world.add_process()) {}

void SimCoordinator::start() {
  world_.start(process_);
  heard_.clear();
  serials_.clear();
  quarantined_.clear();
  fetching_.clear();
  resolved_.clear();
  ready_before_start_ = ready_;
  awake_ = {};
  last_enter_ = clock();
  crash_now_ = false;
  core_.emplace(
      timing_, limits_, disk_,
      [this](const DurableState& state) -> Result<void> {
        if (world_.chance(crash_percent_)) {
          crash_now_ = true;
          if (world_.chance(50)) disk_ = state;
          return fail(ErrorCode::kUnavailable, "power loss");
        }
        if (world_.chance(error_percent_)) {
          if (world_.chance(50)) disk_ = state;  // an error may come after the rename
          return fail(ErrorCode::kUnavailable, "disk");
        }
        disk_ = state;
        return {};
      },
      [this] { return world_.id<PullId>(); });
  if (!core_->start(clock()) || crash_now_) {
    crash();
    return;
  }
  require(core_->epoch() > highest_told_, "a reign begins in epoch {}, {} was told before",
          core_->epoch(), highest_told_);
  told_epoch(core_->epoch());
  world_.in_process(process_, kTick, [this] { tick(); });
}

void SimCoordinator::crash() {
  note_ready();
  core_.reset();
  world_.kill(process_);
}

void SimCoordinator::lose_state() {
  disk_ = {};
  highest_told_ = 0;
  state_was_lost_ = true;
}

void SimCoordinator::jump_clock(Duration by) { skew_ += by; }

void SimCoordinator::set_disk_faults(int error_percent, int crash_percent) {
  error_percent_ = error_percent;
  crash_percent_ = crash_percent;
}

void SimCoordinator::tick() {
  core_->tick(enter());
  if (crash_now_) return crash();
  note_ready();
  forget_ended_fetches();
  world_.in_process(process_, kTick, [this] { tick(); });
}

TimePoint SimCoordinator::enter() {
  const TimePoint now = clock();
  awake_ += std::min<Duration>(now - last_enter_, kMaxStep);
  last_enter_ = now;
  return now;
}

template <typename T>
Served<T> SimCoordinator::leave(Result<T> answer) {
  if (crash_now_) {
    crash();
    return std::nullopt;
  }
  if (answer) ++answers_;
  note_ready();
  forget_ended_fetches();
  return answer;
}

void SimCoordinator::note_ready() {
  if (!core_) return;
  for (const auto& [id, version] : core_->catalog().state().versions) {
    if (core_->catalog().state_of(id, core_->members()) == VersionState::kReady) {
      ready_[id.model] = id.version;
    }
  }
}

void SimCoordinator::heard(const NodeInfo& info, const std::string& connection) {
  Heard& entry = heard_[info.incarnation];
  entry.awake = awake_;
  if (!connection.empty()) entry.connection = connection;
}

// True: for so long that nothing excuses it.
bool SimCoordinator::silent(const NodeInfo& info, Duration at_least) const {
  const auto found = heard_.find(info.incarnation);
  return found == heard_.end() || awake_ - found->second.awake >= at_least;
}

void SimCoordinator::told_epoch(std::uint64_t epoch) {
  require(epoch >= highest_told_, "epoch {} was told after {}", epoch, highest_told_);
  require(disk_.epoch >= epoch, "epoch {} was told before it was durable", epoch);
  highest_told_ = epoch;
}

void SimCoordinator::told_root(const ModelVersion& id, const Digest128& root) {
  if (state_was_lost_) return;
  const auto known = roots_.emplace(id, root).first;
  require(known->second == root, "{} has two roots", id.to_string());
}

Served<Registered> SimCoordinator::enroll(const NodeInfo& info, const std::string& domain,
                                          std::uint64_t highest_epoch,
                                          const std::string& connection) {
  const TimePoint now = enter();
  const auto holder = core_->members().all().find(info.node_id);
  std::optional<Incarnation> replaced;
  bool live = false;
  if (holder != core_->members().all().end() &&
      holder->second.info.incarnation != info.incarnation) {
    replaced = holder->second.info.incarnation;
    live = !silent(holder->second.info, timing_.dead_after) &&
           !heard_.at(*replaced).connection.empty();
  }
  auto answer = core_->enroll(info, domain, highest_epoch, connection, now);
  if (answer && !crash_now_) {
    // Its id went to another process: nothing is known of the one before.
    if (replaced) quarantined_.erase(*replaced);
    require(!live, "node id {} was taken from its live holder", info.node_id);
    require(answer->epoch >= highest_epoch, "{} saw epoch {} and is taken on in {}", info.node_id,
            highest_epoch, answer->epoch);
    told_epoch(answer->epoch);
    heard(info, connection);
  }
  return leave(std::move(answer));
}

void SimCoordinator::disconnected(const NodeInfo& info, const std::string& connection) {
  const auto found = heard_.find(info.incarnation);
  if (found != heard_.end() && found->second.connection == connection) {
    found->second.connection.clear();
  }
  core_->disconnected(info.node_id, info.incarnation, connection, enter());
}

Served<HeartbeatAnswer> SimCoordinator::heartbeat(const NodeInfo& info,
                                                  const Heartbeat& heartbeat) {
  auto answer = core_->heartbeat(info.node_id, info.incarnation, heartbeat, enter());
  if (answer) {
    told_epoch(answer->epoch);
    require(answer->epoch >= heartbeat.epoch, "{} saw epoch {} and is answered in {}", info.node_id,
            heartbeat.epoch, answer->epoch);
    heard(info);
    for (const auto* list : {&answer->retiring, &answer->retire}) {
      for (const ModelVersion& id : *list) {
        const DurableVersion* version = core_->catalog().find(id);
        require(version != nullptr && version->retiring, "{} is not to be let go", id.to_string());
      }
    }
    require(answer->drained == drained_.contains(info.node_id) || state_was_lost_ ||
                unsure_.contains(info.node_id),
            "{} is told the wrong thing about draining", info.node_id);
    check_fetch(info, heartbeat, *answer);
  }
  return leave(std::move(answer));
}

// A version's copy is not moved to another node while the one that has it gets on.
void SimCoordinator::check_fetch(const NodeInfo& info, const Heartbeat& heartbeat,
                                 const HeartbeatAnswer& answer) {
  forget_ended_fetches();  // this very call may have found them dead
  for (const ModelVersion& id : heartbeat.failed_fetches) fetching_.erase(id);
  require(answer.fetch.size() <= 1, "{} copies {} at a time", info.node_id, answer.fetch.size());
  for (const auto& fetch : answer.fetch) {
    require(!answer.drained, "{} is drained and told to fetch", info.node_id);
    const auto before = fetching_.find(fetch.id);
    require(before == fetching_.end() || before->second.node == info.incarnation ||
                clock() - before->second.since > 5s,
            "{} is copied by {} and by {}", fetch.id.to_string(),
            before == fetching_.end() ? "" : before->second.node_id, info.node_id);
    if (before == fetching_.end() || before->second.node != info.incarnation) {
      fetching_[fetch.id] = {info.incarnation, info.node_id, fetch.root, clock()};
    }
  }
}

// Who was dead, unfit or done for a moment has lost its task, also when it is back now.
void SimCoordinator::forget_ended_fetches() {
  if (!core_) return;
  const auto& members = core_->members().all();
  std::erase_if(fetching_, [&](const auto& entry) {
    const auto& [id, fetching] = entry;
    const auto node = members.find(fetching.node_id);
    return node == members.end() || node->second.info.incarnation != fetching.node ||
           node->second.state == NodeState::kDead || node->second.quarantined_until > clock() ||
           core_->catalog().drained(fetching.node_id) ||
           holds_whole(node->second, id, fetching.root);
  });
}

Served<std::vector<AnnounceConflict>> SimCoordinator::announce(const NodeInfo& info,
                                                               std::uint64_t epoch,
                                                               std::vector<Holding> holdings) {
  auto answer = core_->announce(info.node_id, info.incarnation, epoch, /*full=*/true,
                                std::move(holdings), {}, enter());
  heard_by(info, answer);
  return leave(std::move(answer));
}

Served<std::uint64_t> SimCoordinator::publish(const NodeInfo& info, const ModelVersion& id,
                                              const Digest128& root, std::uint64_t bytes,
                                              std::optional<std::uint32_t> replicas) {
  auto answer = core_->publish(info.node_id, info.incarnation, id, root, {root.low, 2}, bytes,
                               enter(), replicas);
  heard_by(info, answer);
  if (!answer) retired_.erase(id);  // it may have become durable all the same
  if (answer && !crash_now_) {
    told_root(id, root);
    require(disk_.versions.at(id).root == root, "{} was told before it was durable",
            id.to_string());
    retired_.erase(id);
  }
  return leave(std::move(answer));
}

Served<OpenedPull> SimCoordinator::open_pull(const OpenPullRequest& request) {
  auto answer = core_->open_pull(request, enter());
  if (answer) {
    told_root(answer->id, answer->version.root);
    require(!retired_.contains(answer->id) || state_was_lost_, "{} is retired and is pulled",
            answer->id.to_string());
    if (!request.version) check_latest(request.model, answer->id.version);
    check_offers(request.puller, answer->id, answer->version.root, answer->sources, true);
    require(answer->sources.empty() == (answer->retry_after > Duration::zero()),
            "an answer without sources says when to ask again");
  }
  return leave(std::move(answer));
}

// A restart does not turn `latest` back: in the grace the holders may have to report yet.
void SimCoordinator::check_latest(const std::string& model, std::uint64_t version) const {
  if (state_was_lost_ || !core_->in_grace(clock())) return;
  const auto before = ready_before_start_.find(model);
  if (before == ready_before_start_.end() || before->second <= version) return;
  const DurableVersion* newer = core_->catalog().find({model, before->second});
  require(newer == nullptr || newer->retiring, "latest of {} went back from {} to {} by a restart",
          model, before->second, version);
}

void SimCoordinator::check_offers(const NodeInfo& puller, const ModelVersion& id,
                                  const Digest128& root, const std::vector<SourceOffer>& offers,
                                  bool is_new) {
  require(offers.size() <= limits_.max_sources_per_pull, "{} sources", offers.size());
  for (const SourceOffer& offer : offers) {
    const std::string& name = offer.node.node_id;
    const auto member = core_->members().all().find(name);
    require(member != core_->members().all().end() &&
                offer.grant.source == member->second.info.incarnation,
            "another life of {} is offered", name);
    const bool vouched = clock() - member->second.last_vouched < timing_.vouched_for + 2 * kTick;
    require(
        core_->in_grace(clock()) || vouched || !silent(offer.node, timing_.dead_after + 2 * kTick),
        "{} is dead and is offered", name);
    require(offer.grant.source != puller.incarnation, "{} is its own source", name);
    require(offer.grant.puller == puller.incarnation && offer.grant.root == root,
            "the grant for {} is for something else", name);
    require(serials_.insert(offer.grant.serial).second, "a serial twice");
    const auto struck = quarantined_.find(offer.grant.source);
    if (struck != quarantined_.end() && struck->second.until > clock()) {
      require(!struck->second.struck_by.contains(puller.incarnation),
              "{} is offered to {}, which has found it bad", name, puller.node_id);
      require(!has_good_copy(puller, id, root), "{} is in quarantine and is offered", name);
    }
    require(!is_new || !offer.complete ||
                core_->pullers_of(offer.grant.source) <= limits_.max_pullers_per_source,
            "{} holds all of it and is offered beyond its share", name);
    const bool evacuates = core_->replicas().is_task(id, puller.incarnation);
    require(!is_new || evacuates || state_was_lost_ || !is_drained(name),
            "{} is drained and in a new plan", name);
  }
}

// Somebody whom it may read from at any time has all of it.
bool SimCoordinator::has_good_copy(const NodeInfo& puller, const ModelVersion& id,
                                   const Digest128& root) const {
  return std::ranges::any_of(core_->members().all(), [&](const auto& entry) {
    const Member& member = entry.second;
    return member.state != NodeState::kDead && member.quarantined_until <= clock() &&
           member.info.incarnation != puller.incarnation &&
           !core_->catalog().drained(entry.first) && holds_whole(member, id, root);
  });
}

Served<PullProgressAnswer> SimCoordinator::pull_progress(const PullProgress& progress) {
  const auto known = core_->pulls().find(progress.pull_id);
  const auto before =
      known == core_->pulls().end() ? std::vector<SourceReport>() : known->second.reports;
  auto answer = core_->pull_progress(progress, enter());
  if (answer) {
    note_strikes(progress, before);
    const DurableVersion* version = core_->catalog().find(progress.id);
    require(version != nullptr, "{} is pulled and is not in the table", progress.id.to_string());
    check_offers(progress.puller, progress.id, version->root, answer->sources, false);
  }
  return leave(std::move(answer));
}

void SimCoordinator::note_strikes(const PullProgress& progress,
                                  const std::vector<SourceReport>& before) {
  for (const SourceReport& report : progress.sources) {
    const bool repeated = std::ranges::any_of(before, [&](const SourceReport& old) {
      return old.incarnation == report.incarnation && old.quarantine;
    });
    const auto member = core_->members().all().find(report.node_id);
    if (!report.quarantine || repeated || member == core_->members().all().end() ||
        member->second.info.incarnation != report.incarnation) {
      continue;
    }
    Quarantine& quarantine = quarantined_[report.incarnation];
    if (quarantine.until <= clock()) quarantine.struck_by.clear();
    quarantine.struck_by.insert(progress.puller.incarnation);
    quarantine.until = std::max(quarantine.until, clock() + timing_.quarantine_first);
  }
}

Served<bool> SimCoordinator::close_pull(const PullId& id, const Incarnation& puller) {
  const auto closed = core_->close_pull(id, puller, enter());
  require(closed.has_value(), "who opened a pull may not close it");
  return leave(Result<bool>(true));
}

Served<std::uint32_t> SimCoordinator::retire(const ModelVersion& id) {
  auto answer = core_->retire(id, enter());
  if (answer && !crash_now_) retired_.insert(id);
  return leave(std::move(answer));
}

Served<Draining> SimCoordinator::drain(const std::string& node_id, bool drained) {
  auto answer = core_->drain(node_id, drained, enter());
  // Where the disk failed nobody knows which it is before the next start.
  if (answer) {
    if (drained) drained_.insert(node_id);
    if (!drained) drained_.erase(node_id);
    unsure_.erase(node_id);
  } else {
    unsure_.insert(node_id);
  }
  return leave(std::move(answer));
}

Served<InstanceAnswer> SimCoordinator::report_rank(const RankReport& report) {
  auto answer = core_->report_rank(report, enter());
  // "Stale" may be the generation or the node; a node that is refused for its rank was heard.
  const auto member = core_->members().all().find(report.node_id);
  if (member != core_->members().all().end() && !member->second.connection.empty() &&
      member->second.info.incarnation == report.incarnation &&
      member->second.state != NodeState::kDead) {
    heard(member->second.info);
  }
  if (answer) {
    const std::pair key(report.instance, report.generation);
    const auto known = resolved_.emplace(key, answer->id).first;
    require(known->second == answer->id, "instance {} generation {} is {} and {}", report.instance,
            report.generation, known->second.to_string(), answer->id.to_string());
    if (answer->state == InstanceState::kCommitted) {
      for (std::uint32_t rank = 0; rank < answer->world; ++rank) {
        require(loaded_.contains({report.instance, report.generation, rank, answer->id.version}),
                "instance {} is committed, rank {} never loaded {}", report.instance, rank,
                answer->id.to_string());
      }
    }
  }
  return leave(std::move(answer));
}

void SimCoordinator::check() const {
  if (!core_) return;
  std::map<Incarnation, std::size_t> shares;
  for (const auto& [id, pull] : core_->pulls()) {
    for (const Incarnation& source : pull.sources) ++shares[source];
  }
  for (const auto& [source, count] : shares) {
    require(count <= std::max(limits_.max_pullers_per_source, limits_.max_sources_per_pull),
            "{} pullers on one source", count);
  }
  for (const auto& [node_id, member] : core_->members().all()) {
    const std::size_t counted = core_->pullers_of(member.info.incarnation);
    const auto found = shares.find(member.info.incarnation);
    const std::size_t taken = found == shares.end() ? 0 : found->second;
    require(counted == taken, "{} has {} pullers, {} are counted", node_id, taken, counted);
    require(member.state != NodeState::kDead || silent(member.info, timing_.dead_after),
            "{} was heard of and is taken for dead", node_id);
  }
  std::set<Incarnation> copying;
  for (const auto& [id, task] : core_->replicas().tasks()) {
    require(copying.insert(task.incarnation).second, "{} copies two versions", task.node_id);
  }
}

}  // namespace rekindle::sim
