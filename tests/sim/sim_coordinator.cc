#include "tests/sim/sim_coordinator.h"

#include <algorithm>

#include "tests/support/numbered_digest.h"

namespace rekindle::sim {

namespace {

constexpr Duration kTick = 100ms;
// A longer gap between two looks at the clock is a pause.
constexpr Duration kMaxStep = 500ms;

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
  awake_ = {};
  last_enter_ = clock();
  core_.emplace(timing_, limits_, disk_, [this] { return world_.id<PullId>(); });
  // It serves once its epoch is durable.
  const CommitNumber begun = core_->start(clock());
  const auto batch = core_->take_batch();
  require(batch && batch->number == begun, "a term begins without its epoch");
  if (world_.chance(error_percent_ + crash_percent_)) {
    write_some_of(batch->change);
    return crash();
  }
  batch->change.apply_to(disk_);
  (void)core_->committed(batch->number, true, clock());
  require(core_->fleet().epoch() > highest_told_, "a term begins in epoch {}, {} was told before",
          core_->fleet().epoch(), highest_told_);
  told_epoch(core_->fleet().epoch());
  world_.in_process(process_, kTick, [this] { tick(); });
}

void SimCoordinator::crash() {
  // The batch on its way to the disk has arrived, or not.
  if (writing_) write_some_of(writing_->change);
  writing_.reset();
  waiters_.clear();
  for (const ModelVersion& id : publishing_) retired_.erase(id);
  publishing_.clear();
  core_.reset();
  world_.kill(process_);
}

void SimCoordinator::write_some_of(const StateChange& change) {
  if (world_.chance(50)) return;
  StateChange some = change;
  // A store may split a batch: other changes come first, then any number of its versions.
  if (world_.chance(25)) {
    some.drained.clear();
    const std::uint64_t count = world_.pick(some.versions.size() + 1);
    while (some.versions.size() > count) some.versions.erase(std::prev(some.versions.end()));
  }
  some.apply_to(disk_);
}

void SimCoordinator::when_ended(CommitNumber commit, std::function<void(const Result<void>&)> run) {
  if (commit == 0) return run({});
  waiters_.push_back({commit, std::move(run)});
  write_next();
}

void SimCoordinator::write_next() {
  if (!core_ || writing_) return;
  writing_ = core_->take_batch();
  if (!writing_) return;
  const bool slow = !world_.calm() && world_.chance(5);
  world_.in_process(process_, slow ? world_.between(100ms, 1500ms) : world_.between(200us, 20ms),
                    [this, batch = *writing_] { written(batch); });
}

void SimCoordinator::written(const CommitBatch& batch) {
  Result<void> outcome;
  if (world_.chance(crash_percent_)) return crash();
  if (world_.chance(error_percent_)) {
    // An error may come after the write.
    write_some_of(batch.change);
    outcome = fail(ErrorCode::kUnavailable, "disk");
  } else {
    batch.change.apply_to(disk_);
  }
  writing_.reset();
  const CommitNumber through = core_->committed(batch.number, outcome.has_value(), enter());
  forget_ended_fetches();
  while (!waiters_.empty() && waiters_.front().commit <= through) {
    const Waiter waiter = std::move(waiters_.front());
    waiters_.pop_front();
    waiter.run(outcome);
  }
  write_next();
}

void SimCoordinator::lose_state() {
  disk_ = {};
  highest_told_ = 0;
  known_ready_.clear();
  state_was_lost_ = true;
}

void SimCoordinator::jump_clock(Duration by) { skew_ += by; }

void SimCoordinator::set_disk_faults(int error_percent, int crash_percent) {
  error_percent_ = error_percent;
  crash_percent_ = crash_percent;
}

void SimCoordinator::tick() {
  core_->tick(enter());
  write_next();
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
  if (answer) ++answers_;
  write_next();
  forget_ended_fetches();
  return answer;
}

// The answer says that these copies count: from now on `latest` may be no older than those of them
// that a publisher has claimed.
void SimCoordinator::note_announced(const std::vector<Holding>& holdings,
                                    const std::vector<AnnounceConflict>& conflicts) {
  for (const Holding& holding : holdings) {
    const bool left_out = std::ranges::any_of(
        conflicts, [&](const AnnounceConflict& conflict) { return conflict.id == holding.id; });
    if (left_out || !holding.whole || !holding.complete || !holding.verified) continue;
    const DurableVersion* version = core_->fleet().catalog.find(holding.id);
    if (version == nullptr || version->announced) continue;
    if (!maybe_retired_.contains(holding.id)) known_ready_.insert(holding.id);
  }
}

void SimCoordinator::heard(const NodeInfo& info, const std::string& connection) {
  Heard& entry = heard_[info.incarnation];
  entry.awake = awake_;
  if (!connection.empty()) entry.connection = connection;
}

// True: the node was silent for that long, and nothing excuses it.
bool SimCoordinator::silent(const NodeInfo& info, Duration at_least) const {
  const auto found = heard_.find(info.incarnation);
  return found == heard_.end() || awake_ - found->second.awake >= at_least;
}

void SimCoordinator::told_epoch(std::uint64_t epoch) {
  require(epoch >= highest_told_, "epoch {} was told after {}", epoch, highest_told_);
  require(disk_.epoch >= epoch, "epoch {} was told before it was durable", epoch);
  highest_told_ = epoch;
}

void SimCoordinator::told_root(const ModelVersion& id, const Digest& root) {
  if (state_was_lost_) return;
  const auto known = roots_.emplace(id, root).first;
  require(known->second == root, "{} has two roots", id.to_string());
}

void SimCoordinator::enroll(const NodeInfo& info, const std::string& domain,
                            std::uint64_t highest_epoch, const std::string& connection,
                            const Reply<Registered>& reply) {
  const TimePoint now = enter();
  const auto holder = core_->fleet().members.all().find(info.node_id);
  std::optional<Incarnation> replaced;
  bool live = false;
  if (holder != core_->fleet().members.all().end() &&
      holder->second.info.incarnation != info.incarnation) {
    replaced = holder->second.info.incarnation;
    live = !silent(holder->second.info, timing_.dead_after) &&
           !heard_.at(*replaced).connection.empty();
  }
  auto registered = core_->enroll(info, domain, highest_epoch, connection, now);
  if (registered.commit != 0) {
    const auto again = [=, this](const Result<void>& ended) {
      if (!ended) return reply(fail(Error(ended.error())));
      enroll(info, domain, highest_epoch, connection, reply);
    };
    return when_ended(registered.commit, again);
  }
  auto& answer = registered.answer;
  if (answer) {
    // Its id went to another process; the history of the earlier one is forgotten.
    if (replaced) quarantined_.erase(*replaced);
    require(!live, "node id {} was taken from its live holder", info.node_id);
    require(answer->epoch >= highest_epoch, "{} saw epoch {} and is taken on in {}", info.node_id,
            highest_epoch, answer->epoch);
    told_epoch(answer->epoch);
    heard(info, connection);
  }
  reply(*leave(std::move(answer)));
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
        const DurableVersion* version = core_->fleet().catalog.find(id);
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

// The task to copy a version does not move to another node while its node makes progress.
void SimCoordinator::check_fetch(const NodeInfo& info, const Heartbeat& heartbeat,
                                 const HeartbeatAnswer& answer) {
  // This very call may have found them dead.
  forget_ended_fetches();
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

// A node that was dead, unfit or done for a moment has lost its task, even if it is back now.
void SimCoordinator::forget_ended_fetches() {
  if (!core_) return;
  const auto& members = core_->fleet().members.all();
  std::erase_if(fetching_, [&](const auto& entry) {
    const auto& [id, fetching] = entry;
    const auto node = members.find(fetching.node_id);
    return node == members.end() || node->second.info.incarnation != fetching.node ||
           node->second.state == NodeState::kDead || node->second.standing.quarantined(clock()) ||
           core_->fleet().drained(fetching.node_id) ||
           node->second.holdings.holds_whole(id, fetching.root);
  });
}

void SimCoordinator::announce(const NodeInfo& info, std::uint64_t epoch,
                              const std::vector<Holding>& holdings,
                              const Reply<std::vector<AnnounceConflict>>& reply) {
  auto announced =
      core_->announce(info.node_id, info.incarnation, epoch, /*full=*/true, holdings, {}, enter());
  heard_by(info, announced.answer);
  if (!announced.answer) {
    reply(*leave(std::move(announced.answer)));
    return;
  }
  const CommitNumber commit = announced.commit;
  std::map<ModelVersion, std::uint64_t> requests;
  for (const Holding& holding : holdings) requests[holding.id] = retire_requests_[holding.id];
  when_ended(commit, [=, this](const Result<void>& ended) {
    const auto conflicts = core_->finish(announced, ended);
    // Versions that somebody asked to retire meanwhile may be retired.
    std::vector<Holding> kept;
    for (const Holding& holding : holdings) {
      if (requests.at(holding.id) == retire_requests_[holding.id]) kept.push_back(holding);
    }
    note_announced(kept, conflicts);
    reply(*leave(Result<std::vector<AnnounceConflict>>(conflicts)));
  });
}

void SimCoordinator::publish(const NodeInfo& info, const ModelVersion& id, const Digest& root,
                             std::uint64_t bytes, std::optional<std::uint32_t> replicas,
                             const Reply<std::uint64_t>& reply) {
  const auto claimed = core_->publish(
      info.node_id, info.incarnation,
      {id, root, test::numbered_digest(test::first_number(root), 2), bytes, replicas}, enter());
  heard_by(info, claimed.answer);
  publishing_.insert(id);
  const std::uint64_t requests = retire_requests_[id];
  when_ended(claimed.commit, [=, this](const Result<void>& ended) {
    publishing_.erase(publishing_.find(id));
    if (!ended || !claimed.answer) {
      // It may have become durable all the same.
      retired_.erase(id);
      reply(ended ? claimed.answer : fail(Error(ended.error())));
      return;
    }
    told_root(id, root);
    require(disk_.versions.at(id).root == root, "{} was told before it was durable",
            id.to_string());
    retired_.erase(id);
    if (retire_requests_[id] == requests) maybe_retired_.erase(id);
    reply(*leave(Result<std::uint64_t>(claimed.answer)));
  });
}

Served<OpenedPull> SimCoordinator::open_pull(const OpenPullRequest& request) {
  auto answer = core_->open_pull(request, enter());
  if (answer) {
    told_root(answer->id, answer->version.root);
    require(!retired_.contains(answer->id) || state_was_lost_, "{} is retired and is pulled",
            answer->id.to_string());
    if (!request.version) check_latest(request.model, answer->id.version);
    check_offers(request.puller, answer->id, answer->version.root, answer->sources, true);
    const bool waits = answer->retry_after > Duration::zero();
    require(!waits || answer->sources.empty(), "an answer with sources says nothing of waiting");
    const auto member = core_->fleet().members.all().find(request.puller.node_id);
    const bool holds = member != core_->fleet().members.all().end() &&
                       member->second.info.incarnation == request.puller.incarnation &&
                       member->second.holdings.holds(answer->id);
    require(waits || !answer->sources.empty() || holds,
            "an answer without sources says when to ask again, but to who has it all");
  }
  return leave(std::move(answer));
}

// Neither a restart nor the silence of holders makes `latest` older.
void SimCoordinator::check_latest(const std::string& model, std::uint64_t version) const {
  for (const ModelVersion& id : known_ready_) {
    require(id.model != model || id.version <= version, "latest of {} went back from {} to {}",
            model, id.version, version);
  }
}

void SimCoordinator::check_offers(const NodeInfo& puller, const ModelVersion& id,
                                  const Digest& root, const std::vector<SourceOffer>& offers,
                                  bool is_new) {
  require(offers.size() <= limits_.max_sources_per_pull, "{} sources", offers.size());
  for (const SourceOffer& offer : offers) {
    const std::string& name = offer.node.node_id;
    const auto member = core_->fleet().members.all().find(name);
    require(member != core_->fleet().members.all().end() &&
                offer.grant.source == member->second.info.incarnation,
            "another life of {} is offered", name);
    const bool vouched = clock() - member->second.last_vouched < timing_.vouched_for + 2 * kTick;
    require(core_->fleet().grace.active(clock()) || vouched ||
                !silent(offer.node, timing_.dead_after + 2 * kTick),
            "{} is dead and is offered", name);
    require(offer.grant.source != puller.incarnation, "{} is its own source", name);
    require(offer.grant.puller == puller.incarnation && offer.grant.root == root,
            "the grant for {} is for something else", name);
    require(serials_.insert(offer.grant.serial).second, "a serial twice");
    const auto struck = quarantined_.find(offer.grant.source);
    if (struck != quarantined_.end() && struck->second.until > clock()) {
      require(!struck->second.struck_by.contains(puller.incarnation),
              "{} is offered to {}, which has found it bad", name, puller.node_id);
      require(struck->second.struck_by.size() < 2 || !has_good_copy(puller, id, root),
              "{} is in quarantine and is offered", name);
    }
    require(
        !is_new || !offer.complete ||
            core_->pulls().table().pullers_of(offer.grant.source) <= limits_.max_pullers_per_source,
        "{} holds all of it and is offered beyond its share", name);
    const bool evacuates = core_->replicas().is_task(id, puller.incarnation);
    require(!is_new || evacuates || state_was_lost_ || !is_drained(name),
            "{} is drained and in a new plan", name);
  }
}

// A node that this puller may always read from has all of it.
bool SimCoordinator::has_good_copy(const NodeInfo& puller, const ModelVersion& id,
                                   const Digest& root) const {
  return std::ranges::any_of(core_->fleet().members.all(), [&](const auto& entry) {
    const Member& member = entry.second;
    return member.state != NodeState::kDead && !member.standing.quarantined(clock()) &&
           member.info.incarnation != puller.incarnation && !core_->fleet().drained(entry.first) &&
           member.holdings.holds_whole(id, root);
  });
}

Served<PullProgressAnswer> SimCoordinator::pull_progress(const PullProgress& progress) {
  const auto known = core_->pulls().table().all().find(progress.pull_id);
  const Pull before = known == core_->pulls().table().all().end() ? Pull() : known->second;
  auto answer = core_->pull_progress(progress, enter());
  if (answer) {
    note_strikes(progress, before);
    const DurableVersion* version = core_->fleet().catalog.find(progress.id);
    require(version != nullptr, "{} is pulled and is not in the table", progress.id.to_string());
    check_offers(progress.puller, progress.id, version->root, answer->sources, false);
  }
  return leave(std::move(answer));
}

void SimCoordinator::note_strikes(const PullProgress& progress, const Pull& before) {
  if (!before.opened_here) return;
  for (const SourceReport& report : progress.sources) {
    if (!before.granted.contains(report.incarnation)) continue;
    const bool repeated = std::ranges::any_of(before.reports.all(), [&](const SourceReport& old) {
      return old.incarnation == report.incarnation && old.quarantine;
    });
    const auto member = core_->fleet().members.all().find(report.node_id);
    if (!report.quarantine || repeated || member == core_->fleet().members.all().end() ||
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
  require(!core_->pulls().table().all().contains(id), "a closed pull keeps its shares");
  return leave(Result<bool>(true));
}

void SimCoordinator::retire(const ModelVersion& id, const Reply<std::uint32_t>& reply) {
  const auto retired = core_->retire(id, enter());
  ++retire_requests_[id];
  maybe_retired_.insert(id);
  known_ready_.erase(id);
  when_ended(retired.commit, [=, this](const Result<void>& ended) {
    if (!ended) return reply(fail(Error(ended.error())));
    // A later claim may be durable, too.
    if (retired.answer && !publishing_.contains(id)) retired_.insert(id);
    reply(*leave(Result<std::uint32_t>(retired.answer)));
  });
}

void SimCoordinator::drain(const std::string& node_id, bool drained, const Reply<Draining>& reply) {
  const auto answer = core_->drain(node_id, drained, enter());
  // Until the answer, and after a failure of the disk, both are possible.
  unsure_.insert(node_id);
  const std::uint64_t number = ++drain_requests_[node_id];
  when_ended(answer.commit, [=, this](const Result<void>& ended) {
    if (!ended) return reply(fail(Error(ended.error())));
    if (answer.answer) {
      if (drained) drained_.insert(node_id);
      if (!drained) drained_.erase(node_id);
      if (drain_requests_[node_id] == number) unsure_.erase(node_id);
    }
    reply(*leave(Result<Draining>(answer.answer)));
  });
}

Served<InstanceAnswer> SimCoordinator::report_rank(const RankReport& report) {
  auto answer = core_->report_rank(report, enter());
  // kStale may mean the generation or the node. A node that is refused for its rank was heard.
  const auto member = core_->fleet().members.all().find(report.node_id);
  if (member != core_->fleet().members.all().end() && !member->second.connection.empty() &&
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
  for (const auto& [id, pull] : core_->pulls().table().all()) {
    for (const Incarnation& source : pull.sources) ++shares[source];
  }
  for (const auto& [source, count] : shares) {
    require(count <= std::max(limits_.max_pullers_per_source, limits_.max_sources_per_pull),
            "{} pullers on one source", count);
  }
  for (const auto& [node_id, member] : core_->fleet().members.all()) {
    const std::size_t counted = core_->pulls().table().pullers_of(member.info.incarnation);
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
