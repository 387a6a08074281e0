#include "tests/sim/faulty_core.h"

#include <algorithm>
#include <utility>

namespace rekindle::sim {

using namespace rekindle::coordinator;

namespace {
bool seeded(SeededBug bug) { return seeded_bug == bug; }
}  // namespace

std::optional<CommitBatch> FaultyCore::take_batch() {
  auto batch = Core::take_batch();
  if (!batch || !seeded(SeededBug::kTombstoneForgotten)) return batch;
  for (auto& [id, version] : batch->change.versions) {
    if (version && version->retiring) version.reset();
  }
  return batch;
}

Durably<Registered> FaultyCore::enroll(const NodeInfo& info, const std::string& failure_domain,
                                       std::uint64_t highest_epoch, const std::string& connection,
                                       TimePoint now) {
  if (seeded(SeededBug::kEpochNotRaised)) highest_epoch = 0;
  const auto holder = fleet().members.all().find(info.node_id);
  if (seeded(SeededBug::kIdTaken) && holder != fleet().members.all().end()) {
    const Member member = holder->second;
    disconnected(info.node_id, member.info.incarnation, member.connection, now);
  }
  return Core::enroll(info, failure_domain, highest_epoch, connection, now);
}

Result<HeartbeatAnswer> FaultyCore::heartbeat(const std::string& node_id,
                                              const Incarnation& incarnation, Heartbeat heartbeat,
                                              TimePoint now) {
  if (seeded(SeededBug::kEpochNotRaised)) heartbeat.epoch = 0;
  auto answer = Core::heartbeat(node_id, incarnation, heartbeat, now);
  if (!answer) return answer;
  if (drained_in_secret_.contains(node_id)) answer->drained = true;
  if (seeded(SeededBug::kRetiredUnderReaders)) {
    std::ranges::move(std::exchange(answer->retiring, {}), std::back_inserter(answer->retire));
  }
  if (seeded(SeededBug::kTwoRecopies) && !answer->drained && answer->fetch.empty()) {
    for (const auto& [id, task] : replicas().tasks()) {
      const Member& member = fleet().members.all().at(node_id);
      if (member.holdings.holds_whole(id, task.root)) continue;
      answer->fetch.push_back({task.id, task.root, 0});
      break;
    }
  }
  return answer;
}

Announced FaultyCore::announce(const std::string& node_id, const Incarnation& incarnation,
                               std::uint64_t epoch, bool full, std::vector<Holding> add,
                               const std::vector<HoldingKey>& remove, TimePoint now) {
  if (seeded(SeededBug::kEpochNotRaised)) epoch = 0;
  if (!add.empty()) announced_[incarnation] = add.back();
  return Core::announce(node_id, incarnation, epoch, full, std::move(add), remove, now);
}

Result<OpenedPull> FaultyCore::open_pull(OpenPullRequest request, TimePoint now) {
  if (seeded(SeededBug::kLatestGoesBack) && !request.version) {
    for (const ModelVersion& id : fleet().catalog.live()) {
      if (id.model == request.model && readiness().is_covered(id)) request.version = id.version;
    }
  }
  auto opened = Core::open_pull(request, now);
  if (!opened || opened->sources.empty() || !seeded(SeededBug::kDeadOffered)) return opened;
  for (const auto& [node_id, member] : fleet().members.all()) {
    const auto held = announced_.find(member.info.incarnation);
    if (!member.is_dead() || held == announced_.end() || held->second.id != opened->id) continue;
    SourceOffer& offer = opened->sources.back();
    offer.node = member.info;
    offer.grant.source = member.info.incarnation;
  }
  return opened;
}

Result<void> FaultyCore::close_pull(const PullId& pull_id, const Incarnation& puller,
                                    TimePoint now) {
  if (seeded(SeededBug::kShareLeakedAtClose)) return {};
  return Core::close_pull(pull_id, puller, now);
}

Durably<Draining> FaultyCore::drain(const std::string& node_id, bool drained, TimePoint now) {
  if (!seeded(SeededBug::kDrainedOffered)) return Core::drain(node_id, drained, now);
  if (drained) {
    drained_in_secret_.insert(node_id);
  } else {
    drained_in_secret_.erase(node_id);
  }
  return {Draining()};
}

Result<InstanceAnswer> FaultyCore::report_rank(const RankReport& report, TimePoint now) {
  auto answer = Core::report_rank(report, now);
  if (!answer) return answer;
  if (seeded(SeededBug::kCommitWithoutAll) && answer->state == InstanceState::kLoading &&
      answer->loaded + 1 == answer->world) {
    answer->state = InstanceState::kCommitted;
  }
  if (seeded(SeededBug::kResolvedTwice) && !report.has && !report.version) {
    if (auto newest = latest(report.model, now)) answer->id = *std::move(newest);
  }
  return answer;
}

}  // namespace rekindle::sim
