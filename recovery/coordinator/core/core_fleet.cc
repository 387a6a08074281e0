#include <algorithm>
#include <utility>

#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/core/seeded_bugs.h"

// What nodes are told with their heartbeats: let go, fetch, drain; ranks of instances.
namespace rekindle::coordinator {

namespace {
constexpr std::size_t kMaxRetireDeadlines = 4096;
}

std::size_t Core::pullers_of(const Incarnation& source) const {
  const auto share = shares_.find(source);
  return share == shares_.end() ? 0 : share->second;
}

std::size_t Core::readers_of(const Incarnation& source, const ModelVersion& id) const {
  if (pullers_of(source) == 0) return 0;
  std::size_t readers = 0;
  for (const auto& [pull_id, pull] : pulls_) {
    if (pull.id != id) continue;
    if (std::binary_search(pull.sources.begin(), pull.sources.end(), source)) ++readers;
  }
  return readers;
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
  answer.epoch = epoch();
  answer.coordinator_time_ms = clock_ms(now);
  answer.drained = catalog_.drained(node_id);
  const ModelVersion* last = nullptr;
  for (const auto& [key, holding] : member->holdings) {
    if ((last != nullptr && *last == key.id) || !catalog_.is_retired(key.id)) continue;
    last = &key.id;
    // "Nobody reads" counts from one that lets nobody new in; who was sent there may yet come.
    const auto readers = member->readers.find(key.id);
    const bool free = readers != member->readers.end() && readers->second == 0 &&
                      readers_of(incarnation, key.id) == 0;
    const bool let_go = free || is_overdue(key.id, now) || seeded(SeededBug::kRetiredUnderReaders);
    (let_go ? answer.retire : answer.retiring).push_back(key.id);
  }
  const Recopy* task = replicas_.task_of(incarnation);
  if (task != nullptr && !answer.drained) {
    answer.fetch.push_back({task->id, task->root, limits_.recopy_bytes_per_second});
  }
  return answer;
}

bool Core::is_overdue(const ModelVersion& id, TimePoint now) const {
  const auto found = retire_deadlines_.find(id);
  return now >= (found == retire_deadlines_.end() ? retired_before_ : found->second);
}

Durably<std::uint32_t> Core::retire(const ModelVersion& id, TimePoint now,
                                    std::optional<Duration> deadline) {
  tick(now);
  Durably<void> retired = catalog_.retire(id);
  if (!retired.answer) return {fail(std::move(retired.answer).error()), retired.commit};
  std::uint32_t nodes = 0;
  for (const auto& [node_id, member] : members_.all()) {
    if (member.holds_any(id)) ++nodes;
  }
  if (retire_deadlines_.size() >= kMaxRetireDeadlines) {
    std::erase_if(retire_deadlines_, [&](const auto& entry) { return entry.second <= now; });
  }
  const bool anew = !catalog_.is_retired(id);
  if (deadline || anew) {
    retire_deadlines_[id] = now + deadline.value_or(timing_.retire_deadline);
  }
  return {nodes, retired.commit};
}

// Why this holder of a whole copy is not one that another node may rely on; "" when it is.
std::string Core::why_not_kept_by(const Member& holder, const ModelVersion& id,
                                  TimePoint now) const {
  if (catalog_.drained(holder.info.node_id)) return "drained";
  if (holder.quarantined_until > now) return "quarantined";
  if (holder.leaves(id, now)) return "letting go of it, too";
  return holder.alive(now) ? "" : "not heard of";
}

Result<void> Core::let_go(const std::string& node_id, const Incarnation& incarnation,
                          const ModelVersion& id, TimePoint now) {
  TRY(Member * member, hear(node_id, incarnation, 0, now));
  const DurableVersion* version = catalog_.find(id);
  if (catalog_.is_retired(id)) return {};
  if (version == nullptr || !member->holds_any(id)) {
    return fail(ErrorCode::kDenied,
                "{} must stay on {}: it is not announced to the coordinator; try again later",
                id.to_string(), node_id);
  }
  std::string others;
  for (const auto& [other_id, other] : members_.all()) {
    if (other_id == node_id || !holds_whole(other, id, version->root)) continue;
    const std::string why = why_not_kept_by(other, id, now);
    if (why.empty()) {
      member->leaving[id] = now + timing_.let_go_lasts;
      return {};
    }
    others += fmt::format("{}{} ({})", others.empty() ? "" : ", ", other_id, why);
  }
  if (others.empty()) others = "none";
  return fail(ErrorCode::kDenied,
              "{} must stay on {}: it is the last copy to rely on; other holders: {}",
              id.to_string(), node_id, others);
}

Draining Core::draining(const std::string& node_id) const {
  Draining result;
  const auto found = members_.all().find(node_id);
  if (found == members_.all().end()) return result;
  result.readers = pullers_of(found->second.info.incarnation);
  for (const ModelVersion& id : catalog_.live()) {
    const DurableVersion& version = *catalog_.find(id);
    if (!holds_whole(found->second, id, version.root)) continue;
    bool elsewhere = false;
    for (const auto& [other_id, other] : members_.all()) {
      elsewhere =
          elsewhere || (other_id != node_id && other.state != NodeState::kDead &&
                        !catalog_.drained(other_id) && holds_whole(other, id, version.root));
    }
    if (!elsewhere) result.sole_copies.push_back(id);
  }
  return result;
}

Durably<Draining> Core::drain(const std::string& node_id, bool drained, TimePoint now) {
  tick(now);
  const bool known = members_.all().contains(node_id) || catalog_.drained(node_id);
  if (!known) {
    return {fail(ErrorCode::kNotFound,
                 "no node '{}' is or was here lately; `rekindle status` names them", node_id)};
  }
  const CommitNumber commit = catalog_.set_drained(node_id, drained);
  Draining left = draining(node_id);
  if (!drained) left.sole_copies.clear();
  return {std::move(left), commit};
}

Result<InstanceAnswer> Core::report_rank(const RankReport& report, TimePoint now) {
  // Not kStale: that would be the rank's end, and its agent will register again and repeat this.
  if (auto heard = hear(report.node_id, report.incarnation, 0, now); !heard) {
    return fail(ErrorCode::kUnavailable, "{}", heard.error().message());
  }
  const auto resolve_version = [&]() -> Result<ModelVersion> {
    return resolve({{}, report.model, report.version, ""}, now);
  };
  return instances_.report(report, resolve_version, members_, in_grace(now), now);
}

}  // namespace rekindle::coordinator
