#include "recovery/coordinator/core/replicas.h"

#include <algorithm>
#include <tuple>

#include "recovery/coordinator/core/part_holders.h"

namespace rekindle::coordinator {

namespace {
constexpr Duration kReplicasLookEvery = std::chrono::milliseconds(100);
constexpr std::size_t kVersionsPerLook = 32;
constexpr Duration kMaxPreparation = std::chrono::minutes(10);
}  // namespace

std::uint32_t Replicas::wanted(const DurableVersion& version) const {
  return version.retiring ? 0 : version.replicas.value_or(fleet_.limits.replicas);
}

const Recopy* Replicas::task_of(const Incarnation& node) const {
  for (const auto& [id, task] : tasks_) {
    if (task.incarnation == node) return &task;
  }
  return nullptr;
}

bool Replicas::is_task(const ModelVersion& id, const Incarnation& node) const {
  const auto found = tasks_.find(id);
  return found != tasks_.end() && found->second.incarnation == node;
}

Recopy* Replicas::find_task(const ModelVersion& id, const Incarnation& puller) {
  return is_task(id, puller) ? &tasks_.at(id) : nullptr;
}

std::vector<ModelVersion> Replicas::sole_copies(const Member& member) const {
  std::vector<ModelVersion> sole;
  for (const ModelVersion& id : fleet_.catalog.live()) {
    const DurableVersion& version = *fleet_.catalog.find(id);
    const bool whole = member.holdings.holds_whole(id, version.root);
    const std::set<Digest> parts = parts_of(member, id, version);
    if (!whole && parts.empty()) continue;
    const auto other = [&](const Member& candidate) {
      return candidate.info.node_id != member.info.node_id && !candidate.is_dead() &&
             !fleet_.drained(candidate.info.node_id);
    };
    const bool whole_elsewhere = std::ranges::any_of(fleet_.members.all(), [&](const auto& entry) {
      return other(entry.second) && entry.second.holdings.holds_whole(id, version.root);
    });
    if (whole_elsewhere) continue;
    const std::set<Digest> parts_elsewhere = parts_held(fleet_.members, id, version, other);
    const bool parts_suffice = whole ? parts_elsewhere.size() == version.parts.size()
                                     : std::ranges::includes(parts_elsewhere, parts);
    if (version.parts.empty() || !parts_suffice) sole.push_back(id);
  }
  return sole;
}

void Replicas::progressed(const ModelVersion& id, const Incarnation& puller,
                          std::uint64_t bytes_done, TimePoint now) {
  Recopy* const task = find_task(id, puller);
  if (task == nullptr) return;
  // A report without new bytes is no progress.
  if (bytes_done > task->bytes_done) task->last_progress = now;
  task->bytes_done = std::max(task->bytes_done, bytes_done);
}

void Replicas::begun(const ModelVersion& id, const Incarnation& puller, TimePoint now) {
  Recopy* const task = find_task(id, puller);
  if (task == nullptr) return;
  if (task->bytes_done == 0 && now - task->assigned < kMaxPreparation) task->last_progress = now;
}

void Replicas::failed(const ModelVersion& id, const Incarnation& puller, TimePoint now) {
  const Recopy* const task = find_task(id, puller);
  if (task == nullptr) return;
  avoid_until_[{id, task->node_id}] = now + fleet_.timing.recopy_avoid;
  tasks_.erase(id);
}

void Replicas::shift(Duration by) {
  for (auto& [id, task] : tasks_) task.last_progress += by;
  for (auto& [id, shortage] : shortages_) shortage.since += by;
}

void Replicas::advance(const LoadOf& load, TimePoint now) {
  if (now < next_look_) return;
  next_look_ = now + kReplicasLookEvery;
  std::erase_if(avoid_until_, [&](const auto& entry) { return entry.second <= now; });
  const auto& versions = fleet_.catalog.live();
  const auto gone = [&](const auto& entry) { return !versions.contains(entry.first); };
  std::erase_if(tasks_, gone);
  std::erase_if(shortages_, gone);
  auto it = versions.upper_bound(cursor_);
  for (std::size_t i = 0; i < std::min(kVersionsPerLook, versions.size()); ++i) {
    if (it == versions.end()) it = versions.begin();
    cursor_ = *it;
    look_at(*it, load, now);
    ++it;
  }
}

bool Replicas::keep_task(const Recopy& task, TimePoint now) {
  const Member* member = fleet_.members.find(task.node_id, task.incarnation);
  const bool lost = member == nullptr || member->is_dead();
  const bool unfit = !lost && (fleet_.drained(task.node_id) || member->standing.quarantined(now));
  const bool stalled = now - task.last_progress >= fleet_.timing.recopy_stalled;
  if (!lost && !unfit && !stalled) return true;
  avoid_until_[{task.id, task.node_id}] = now + fleet_.timing.recopy_avoid;
  return false;
}

Replicas::Copies Replicas::count(const ModelVersion& id, const DurableVersion& version,
                                 TimePoint now) const {
  const auto readable = [&](const Member& member) {
    return !member.is_dead() && !member.standing.quarantined(now);
  };
  Copies copies;
  copies.readable = all_parts_held(fleet_.members, id, version, readable);
  for (const auto& [node_id, member] : fleet_.members.all()) {
    if (!readable(member)) continue;
    if (!member.holdings.holds_whole(id, version.root)) continue;
    copies.readable = true;
    if (!fleet_.drained(node_id)) copies.domains.insert(member.domain());
  }
  return copies;
}

bool Replicas::can_take(const Member& member, const Need& need, TimePoint now) const {
  return member.alive(now) && !member.standing.quarantined(now) && !member.flapping.left_out(now) &&
         !fleet_.drained(member.info.node_id) &&
         member.store_free_bytes >= need.version.checkpoint_bytes &&
         !need.copies.domains.contains(member.domain()) &&
         !member.holdings.holds_whole(need.id, need.version.root) &&
         !avoid_until_.contains({need.id, member.info.node_id}) &&
         task_of(member.info.incarnation) == nullptr;
}

// The least loaded node, then the one with the fewest copies, then the one with the most room.
const Member* Replicas::choose(const Need& need, const LoadOf& load, TimePoint now) const {
  const Member* best = nullptr;
  std::tuple<std::size_t, std::size_t, std::uint64_t> best_score;
  for (const auto& [node_id, member] : fleet_.members.all()) {
    if (!can_take(member, need, now)) continue;
    const std::tuple score(load(member.info.incarnation), member.holdings.all().size(),
                           UINT64_MAX - member.store_free_bytes);
    if (best != nullptr && score >= best_score) continue;
    best = &member;
    best_score = score;
  }
  return best;
}

void Replicas::look_at(const ModelVersion& id, const LoadOf& load, TimePoint now) {
  const DurableVersion& version = *fleet_.catalog.find(id);
  const std::uint32_t target = wanted(version);
  const Need need{id, version, target == 0 ? Copies{} : count(id, version, now)};
  if (need.copies.domains.size() >= target) {
    tasks_.erase(id);
    shortages_.erase(id);
    return;
  }
  if (const auto task = tasks_.find(id); task != tasks_.end()) {
    const Member* member = fleet_.members.find(task->second.node_id, task->second.incarnation);
    const bool has_landed = member != nullptr && member->holdings.holds_whole(id, version.root);
    if (!has_landed && keep_task(task->second, now)) return;
    tasks_.erase(task);
  }
  Shortage& shortage = shortages_.try_emplace(id, Shortage{now, ""}).first->second;
  shortage.why.clear();
  if (!need.copies.readable) {
    shortage.why = "nobody alive has a whole copy to read from";
    return;
  }
  if (now - shortage.since < fleet_.timing.recopy_after) return;
  const Member* node = choose(need, load, now);
  if (node == nullptr) {
    shortage.why = "no node with room for it in another failure domain";
    return;
  }
  tasks_[id] = {id, version.root, node->info.node_id, node->info.incarnation, now, now, 0};
  ++assigned_count_;
}

}  // namespace rekindle::coordinator
