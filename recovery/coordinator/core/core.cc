#include "recovery/coordinator/core/core.h"

#include <algorithm>
#include <set>
#include <utility>

namespace rekindle::coordinator {

namespace {

constexpr std::size_t kMaxNodeIdBytes = 255;
constexpr std::size_t kMaxFailureDomainBytes = 255;
constexpr std::uint64_t kMaxEpoch = std::uint64_t{1} << 62;
// One agent's report raises the epoch by less than this, so that a lying agent cannot use the
// epochs up. No agent hears of a higher epoch than this above the one in which it registered.
constexpr std::uint64_t kMaxEpochStep = std::uint64_t{1} << 32;

}  // namespace

Core::Core(const Timing& timing, const Limits& limits, DurableState durable,
           std::function<PullId()> new_pull_id)
    : fleet_(timing, limits, std::move(durable)),
      pulls_(fleet_, resolver_, replicas_, rounds_, std::move(new_pull_id)),
      instances_(timing, limits) {}

CommitNumber Core::start(TimePoint now) {
  fleet_.grace.start(now);
  retirement_.start(now);
  return fleet_.table.set_epoch(fleet_.epoch() + 1);
}

CommitNumber Core::committed(CommitNumber number, bool durable, TimePoint now) {
  tick(now);
  const DurableTable::Ended ended = fleet_.table.committed(number, durable);
  fleet_.catalog.changed(ended.changed);
  announcements_.batch_ended(durable);
  for (const ModelVersion& id : ended.changed) {
    readiness_.mark(id);
    if (fleet_.catalog.is_retired(id)) fleet_.signers.forget(id);
  }
  return ended.through;
}

void Core::tick(TimePoint now) {
  const Duration slept = fleet_.grace.advance(now);
  if (slept < Duration::zero()) return;
  if (slept > Duration::zero()) {
    fleet_.members.shift(slept);
    replicas_.shift(slept);
    instances_.shift(slept);
    rounds_.shift(slept);
    joint_rosters_.shift(slept);
    pulls_.shift(slept);
    retirement_.shift(slept);
    permits_.shift(slept);
  }
  fleet_.members.advance(now, fleet_.grace.until());
  pulls_.expire(now);
  instances_.advance(fleet_.members, now);
  rounds_.advance(fleet_.members, now);
  joint_rosters_.advance(fleet_.members, now);
  // In the grace nothing counts as lost: a node that has yet to report may hold it.
  if (fleet_.grace.active(now)) return;
  readiness_.mark_all(now);
  open_claims_.collect(now);
  const auto load = [this](const Incarnation& node) { return pulls_.table().pullers_of(node); };
  replicas_.advance(load, now);
}

Durably<Registered> Core::enroll(const NodeInfo& info, const std::string& failure_domain,
                                 std::uint64_t highest_epoch, const std::string& connection,
                                 TimePoint now) {
  tick(now);
  if (info.node_id.empty() || info.node_id.size() > kMaxNodeIdBytes) {
    return {fail(ErrorCode::kInvalid, "a node id has 1 to {} bytes, this one {}", kMaxNodeIdBytes,
                 info.node_id.size())};
  }
  if (info.incarnation.is_nil() || info.control_endpoint.empty()) {
    return {fail(ErrorCode::kInvalid, "node '{}' registers without incarnation or address",
                 info.node_id)};
  }
  if (failure_domain.size() > kMaxFailureDomainBytes) {
    return {fail(ErrorCode::kInvalid, "node '{}': its failure domain has {} bytes, at most {}",
                 info.node_id, failure_domain.size(), kMaxFailureDomainBytes)};
  }
  const std::uint64_t epoch = fleet_.epoch();
  const bool too_far = highest_epoch > epoch && highest_epoch - epoch >= kMaxEpochStep;
  if (too_far || highest_epoch >= kMaxEpoch - 1) {
    return {fail(ErrorCode::kInvalid,
                 "node '{}' reports the absurd epoch {} (this coordinator leads in epoch {}): stop "
                 "its agent, delete the file agent/epoch in its --store directory and start it "
                 "again",
                 info.node_id, highest_epoch, epoch)};
  }
  // An earlier or other coordinator got further than our state knows: this term must be above it.
  if (highest_epoch > epoch) {
    const std::uint64_t wanted = std::max(highest_epoch + 1, fleet_.table.next_epoch());
    return {fail(ErrorCode::kUnavailable,
                 "node '{}' has seen epoch {}, this coordinator is raising its own; register again",
                 info.node_id, highest_epoch),
            fleet_.table.set_epoch(wanted)};
  }
  auto is_new = fleet_.members.enroll(info, failure_domain, connection, now);
  if (!is_new) return {fail(std::move(is_new).error())};
  permits_.registered(info.incarnation);
  return {Registered{epoch, *is_new}};
}

void Core::disconnected(const std::string& node_id, const Incarnation& incarnation,
                        const std::string& connection, TimePoint now) {
  tick(now);
  fleet_.members.disconnect(node_id, incarnation, connection);
}

Result<Member*> Core::hear(const std::string& node_id, const Incarnation& incarnation,
                           std::uint64_t epoch_seen, TimePoint now) {
  tick(now);
  if (epoch_seen > fleet_.epoch()) {
    return fail(ErrorCode::kStale,
                "node '{}' has seen epoch {}, this coordinator leads in epoch {}; register again",
                node_id, epoch_seen, fleet_.epoch());
  }
  return fleet_.members.hear(node_id, incarnation, now);
}

Result<HeartbeatAnswer> Core::heartbeat(const std::string& node_id, const Incarnation& incarnation,
                                        const Heartbeat& heartbeat, TimePoint now) {
  TRY(Member * member, hear(node_id, incarnation, heartbeat.epoch, now));
  member->progress = heartbeat.progress;
  member->store_free_bytes = heartbeat.store_free_bytes;
  member->readers = heartbeat.readers;
  for (const ModelVersion& id : heartbeat.failed_fetches) replicas_.failed(id, incarnation, now);
  for (const ModelVersion& id : heartbeat.fetching) replicas_.begun(id, incarnation, now);
  HeartbeatAnswer answer;
  answer.epoch = fleet_.epoch();
  answer.coordinator_time_ms = clock_ms(now);
  answer.drained = fleet_.drained(node_id);
  Retirement::Orders orders = retirement_.orders_for(*member, now);
  answer.retiring = std::move(orders.retiring);
  answer.retire = std::move(orders.retire);
  const Recopy* task = replicas_.task_of(incarnation);
  if (task != nullptr && !answer.drained) {
    answer.fetch.push_back({task->id, task->root, fleet_.limits.recopy_bytes_per_second});
  }
  return answer;
}

Announced Core::announce(const std::string& node_id, const Incarnation& incarnation,
                         std::uint64_t epoch_seen, bool full, std::vector<Holding> add,
                         const std::vector<HoldingKey>& remove, TimePoint now) {
  auto heard = hear(node_id, incarnation, epoch_seen, now);
  if (!heard) return {.answer = fail(std::move(heard).error())};
  Announced announced = announcements_.take(**heard, full, std::move(add), remove);
  permits_.announced(**heard, now);
  return announced;
}

Durably<std::uint64_t> Core::publish(const std::string& node_id, const Incarnation& incarnation,
                                     const Publication& publication, TimePoint now) {
  if (!node_id.empty()) {
    if (auto heard = hear(node_id, incarnation, 0, now); !heard) {
      return {fail(std::move(heard).error())};
    }
  }
  if (publication.root.is_nil()) {
    return {fail(ErrorCode::kInvalid, "publish {}: no root", publication.id.to_string())};
  }
  if (auto within = open_claims_.check(publication.claimant, publication.id); !within) {
    return {fail(std::move(within).error())};
  }
  auto signatures = fleet_.signers.admit(publication.id, publication.root, publication.signatures);
  if (auto trusted = fleet_.signers.check(publication.id, publication.root, signatures); !trusted) {
    return {fail(std::move(trusted).error())};
  }
  // Agents whose ranks have the same boxes have the same layout.
  std::set<Digest> parts(publication.parts.begin(), publication.parts.end());
  Durably<void> claimed = fleet_.catalog.claim({publication.id,
                                                publication.root,
                                                publication.tensor_set,
                                                publication.checkpoint_bytes,
                                                /*published=*/true,
                                                /*vouched=*/false,
                                                /*ready=*/false,
                                                publication.replicas,
                                                {parts.begin(), parts.end()}});
  if (!claimed.answer) return {fail(std::move(claimed.answer).error()), claimed.commit};
  open_claims_.add(publication.claimant, publication.id);
  fleet_.signers.keep(publication.id, publication.root, std::move(signatures));
  return {fleet_.epoch(), claimed.commit};
}

Result<ModelVersion> Core::latest(const std::string& model, TimePoint now) {
  tick(now);
  return resolver_.resolve({{}, model, std::nullopt, ""}, now);
}

Result<OpenedPull> Core::open_pull(const OpenPullRequest& request, TimePoint now) {
  tick(now);
  return pulls_.open(request, now);
}

Result<PullProgressAnswer> Core::pull_progress(const PullProgress& progress, TimePoint now) {
  tick(now);
  return pulls_.progress(progress, now);
}

Result<void> Core::close_pull(const PullId& pull_id, const Incarnation& puller, TimePoint now) {
  tick(now);
  return pulls_.close(pull_id, puller, now);
}

Durably<std::uint32_t> Core::retire(const ModelVersion& id, TimePoint now,
                                    std::optional<Duration> deadline) {
  tick(now);
  return retirement_.retire(id, now, deadline);
}

Result<void> Core::let_go(const std::string& node_id, const Incarnation& incarnation,
                          const ModelVersion& id, TimePoint now) {
  TRY(const Member* member, hear(node_id, incarnation, 0, now));
  return permits_.grant(*member, id, now);
}

Durably<Draining> Core::drain(const std::string& node_id, bool drained, TimePoint now) {
  tick(now);
  if (!fleet_.members.all().contains(node_id) && !fleet_.drained(node_id)) {
    return {fail(ErrorCode::kNotFound,
                 "no node '{}' is or was here lately; `rekindle status` names them", node_id)};
  }
  const CommitNumber commit = fleet_.table.next_drained(node_id) == drained
                                  ? fleet_.table.keep_drained(node_id)
                                  : fleet_.table.set_drained(node_id, drained);
  Draining left;
  const auto member = fleet_.members.all().find(node_id);
  if (member != fleet_.members.all().end()) {
    left.readers = pulls_.table().pullers_of(member->second.info.incarnation);
    if (drained) left.sole_copies = replicas_.sole_copies(member->second);
  }
  return {std::move(left), commit};
}

Result<InstanceAnswer> Core::report_rank(const RankReport& report, TimePoint now) {
  // kStale would end the rank. Its agent will register again and repeat the report.
  if (auto heard = hear(report.node_id, report.incarnation, 0, now); !heard) {
    return fail(ErrorCode::kUnavailable, "{}", heard.error().message());
  }
  const auto resolve = [&]() -> Result<ModelVersion> {
    return resolver_.resolve({{}, report.model, report.version, ""}, now);
  };
  return instances_.report(report, resolve, fleet_.members, fleet_.grace.active(now), now);
}

Result<RoundId> Core::begin_update(const ModelVersion& id, const std::string& group,
                                   const Gathering& gathering, TimePoint now) {
  tick(now);
  TRY(const DurableVersion version, resolver_.resolve_update(id, now));
  return rounds_.begin(id, version.root, group, gathering, fleet_.epoch(), now);
}

Result<UpdatePlan> Core::plan_update(const ModelVersion& id, const std::string& group,
                                     TimePoint now) {
  tick(now);
  TRY(const DurableVersion version, resolver_.resolve_update(id, now));
  auto members = rounds_.members_of(id.model, group);
  std::erase_if(members, [&](const UpdateMember& each) {
    const auto node = fleet_.members.all().find(each.node_id);
    return node == fleet_.members.all().end() || node->second.is_dead();
  });
  if (members.empty()) {
    return fail(no_member(id, group));
  }
  return coordinator::plan_update(id, version, members, rounds_.pieces(), fleet_.members);
}

Result<void> Core::report_round(const RoundReport& report, TimePoint now) {
  // As with ranks, the agent will register again and repeat the report.
  if (auto heard = hear(report.node_id, report.incarnation, 0, now); !heard) {
    return fail(ErrorCode::kUnavailable, "{}", heard.error().message());
  }
  return rounds_.report(report, now);
}

void Core::rights_changed() {
  announcements_.check_holders();
  joint_rosters_.lose_if([&](const NodeInfo& node, const ModelVersion& id) {
    const Member* member = fleet_.members.find(node.node_id, node.incarnation);
    return member == nullptr || !announcements_.may_claim(*member, id);
  });
}

Result<void> Core::report_joint(const JointReport& report, TimePoint now) {
  const auto heard = hear(report.node_id, report.incarnation, 0, now);
  if (!heard) return fail(ErrorCode::kUnavailable, "{}", heard.error().message());
  return joint_rosters_.report(report, (*heard)->info, fleet_.members, fleet_.epoch(), now);
}

}  // namespace rekindle::coordinator
