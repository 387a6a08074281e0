#include "recovery/coordinator/core/replicas.h"

#include <algorithm>
#include <tuple>

#include "recovery/coordinator/core/seeded_bugs.h"

namespace rekindle::coordinator {

namespace {

constexpr Duration kLookEvery = std::chrono::milliseconds(100);
constexpr std::size_t kVersionsPerLook = 32;
constexpr Duration kMaxPreparation = std::chrono::minutes(10);

}  // namespace

bool holds_whole(const Member& member, const ModelVersion& id, const Digest& root) {
  for (auto it = member.holdings.lower_bound({id, {}});
       it != member.holdings.end() && it->first.id == id; ++it) {
    if (it->second.whole && it->second.counts() && it->second.root == root) return true;
  }
  return false;
}

std::uint32_t Replicas::wanted(const DurableVersion& version) const {
  return version.retiring ? 0 : version.replicas.value_or(limits_.replicas);
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

void Replicas::progressed(const ModelVersion& id, const Incarnation& puller,
                          std::uint64_t bytes_done, TimePoint now) {
  const auto found = tasks_.find(id);
  if (found == tasks_.end() || found->second.incarnation != puller) return;
  // Asking without getting on is no progress.
  if (bytes_done > found->second.bytes_done) found->second.last_progress = now;
  found->second.bytes_done = std::max(found->second.bytes_done, bytes_done);
}

void Replicas::begun(const ModelVersion& id, const Incarnation& puller, TimePoint now) {
  const auto found = tasks_.find(id);
  if (found == tasks_.end() || found->second.incarnation != puller) return;
  Recopy& task = found->second;
  if (task.bytes_done == 0 && now - task.assigned < kMaxPreparation) task.last_progress = now;
}

void Replicas::failed(const ModelVersion& id, const Incarnation& puller, TimePoint now) {
  const auto found = tasks_.find(id);
  if (found == tasks_.end() || found->second.incarnation != puller) return;
  avoid_until_[{id, found->second.node_id}] = now + timing_.recopy_avoid;
  tasks_.erase(found);
}

void Replicas::shift(Duration by) {
  for (auto& [id, task] : tasks_) task.last_progress += by;
  for (auto& [id, shortage] : shortages_) shortage.since += by;
}

void Replicas::advance(const Catalog& catalog, Membership& members, const LoadOf& load,
                       TimePoint now) {
  if (now < next_look_) return;
  next_look_ = now + kLookEvery;
  std::erase_if(avoid_until_, [&](const auto& entry) { return entry.second <= now; });
  const auto& versions = catalog.live();  // nothing is to be done for tombstones
  const auto gone = [&](const auto& entry) { return !versions.contains(entry.first); };
  std::erase_if(tasks_, gone);
  std::erase_if(shortages_, gone);
  auto it = versions.upper_bound(cursor_);
  for (std::size_t i = 0; i < std::min(kVersionsPerLook, versions.size()); ++i) {
    if (it == versions.end()) it = versions.begin();
    cursor_ = *it;
    look_at(*it, *catalog.find(*it), catalog, members, load, now);
    ++it;
  }
}

bool Replicas::keep_task(const Recopy& task, const Catalog& catalog, Membership& members,
                         TimePoint now) {
  const Member* member = members.find(task.node_id, task.incarnation);
  const bool lost = member == nullptr || member->state == NodeState::kDead;
  const bool unfit = !lost && (catalog.drained(task.node_id) || member->quarantined_until > now);
  const bool stalled = now - task.last_progress >= timing_.recopy_stalled;
  if (!lost && !unfit && !stalled) return true;
  avoid_until_[{task.id, task.node_id}] = now + timing_.recopy_avoid;
  return false;
}

Replicas::Copies Replicas::count(const ModelVersion& id, const DurableVersion& version,
                                 const Catalog& catalog, const Membership& members,
                                 TimePoint now) const {
  Copies copies;
  for (const auto& [node_id, member] : members.all()) {
    if (member.state == NodeState::kDead || member.quarantined_until > now) continue;
    if (!holds_whole(member, id, version.root)) continue;
    copies.readable = true;
    if (!catalog.drained(node_id)) copies.domains.insert(member.domain());
  }
  return copies;
}

bool Replicas::can_take(const Member& member, const ModelVersion& id, const DurableVersion& version,
                        const Copies& copies, const Catalog& catalog, TimePoint now) const {
  return member.alive(now) && member.quarantined_until <= now &&
         member.flapping.left_out_until <= now && !catalog.drained(member.info.node_id) &&
         member.store_free_bytes >= version.checkpoint_bytes &&
         !copies.domains.contains(member.domain()) && !holds_whole(member, id, version.root) &&
         !avoid_until_.contains({id, member.info.node_id}) &&
         (task_of(member.info.incarnation) == nullptr || seeded(SeededBug::kTwoRecopies));
}

// The least loaded, then the one with the fewest copies, then the one with the most room.
const Member* Replicas::choose(const ModelVersion& id, const DurableVersion& version,
                               const Copies& copies, const Catalog& catalog,
                               const Membership& members, const LoadOf& load, TimePoint now) const {
  const Member* best = nullptr;
  std::tuple<std::size_t, std::size_t, std::uint64_t> best_score;
  for (const auto& [node_id, member] : members.all()) {
    if (!can_take(member, id, version, copies, catalog, now)) continue;
    const std::tuple score(load(member.info.incarnation), member.holdings.size(),
                           UINT64_MAX - member.store_free_bytes);
    if (best != nullptr && score >= best_score) continue;
    best = &member;
    best_score = score;
  }
  return best;
}

void Replicas::look_at(const ModelVersion& id, const DurableVersion& version,
                       const Catalog& catalog, Membership& members, const LoadOf& load,
                       TimePoint now) {
  const std::uint32_t target = wanted(version);
  const Copies copies = target == 0 ? Copies{} : count(id, version, catalog, members, now);
  if (copies.domains.size() >= target) {
    tasks_.erase(id);
    shortages_.erase(id);
    return;
  }
  if (const auto task = tasks_.find(id); task != tasks_.end()) {
    const Member* member = members.find(task->second.node_id, task->second.incarnation);
    const bool has_landed = member != nullptr && holds_whole(*member, id, version.root);
    if (!has_landed && keep_task(task->second, catalog, members, now) &&
        !seeded(SeededBug::kTwoRecopies)) {
      return;
    }
    tasks_.erase(task);
  }
  Shortage& shortage = shortages_.try_emplace(id, Shortage{now, ""}).first->second;
  shortage.why.clear();
  if (!copies.readable) {
    shortage.why = "nobody alive has a whole copy to read from";
    return;
  }
  if (now - shortage.since < timing_.recopy_after) return;
  const Member* node = choose(id, version, copies, catalog, members, load, now);
  if (node == nullptr) {
    shortage.why = "no node with room for it in another failure domain";
    return;
  }
  tasks_[id] = {id, version.root, node->info.node_id, node->info.incarnation, now, now, 0};
  ++assigned_count_;
}

}  // namespace rekindle::coordinator
