#include "recovery/coordinator/core/joint_rosters.h"

#include <algorithm>
#include <utility>

namespace rekindle::coordinator {

namespace {

constexpr std::uint32_t kMaxJointWorld = 65'536;
constexpr std::size_t kMaxJointVersions = 1024;
constexpr std::size_t kMaxMissingNamed = 16;
constexpr Duration kJointSilence = std::chrono::seconds(15);
constexpr Duration kJointLookEvery = std::chrono::milliseconds(50);
// The low half of a number counts the rosters of one term, the high half is the epoch.
constexpr unsigned kNumberBitsOfATerm = 32;

}  // namespace

Result<void> JointRosters::check(const JointReport& report,
                                 const std::vector<std::uint32_t>& ranks) {
  const std::string what = report.id.to_string();
  if (report.world == 0 || report.world > kMaxJointWorld) {
    return fail(ErrorCode::kInvalid,
                "joint publication of {}: node '{}' reports a world of {} ranks; 1 to {} are "
                "allowed",
                what, report.node_id, report.world, kMaxJointWorld);
  }
  if (ranks.empty()) {
    return fail(ErrorCode::kInvalid, "joint publication of {}: node '{}' reports no rank", what,
                report.node_id);
  }
  if (ranks.back() >= report.world) {
    return fail(ErrorCode::kInvalid,
                "joint publication of {}: node '{}' reports rank {} of a world of {}; ranks count "
                "from 0",
                what, report.node_id, ranks.back(), report.world);
  }
  if (const auto twice = std::ranges::adjacent_find(ranks); twice != ranks.end()) {
    return fail(ErrorCode::kInvalid, "joint publication of {}: node '{}' reports rank {} twice",
                what, report.node_id, *twice);
  }
  return {};
}

Result<void> JointRosters::check_others(const Gathering& gathering, const JointReport& report,
                                        const std::vector<std::uint32_t>& ranks) {
  const auto other = std::ranges::find_if(
      gathering.reports, [&](const auto& entry) { return entry.first != report.node_id; });
  if (other == gathering.reports.end()) return {};
  if (gathering.world != report.world) {
    return fail(ErrorCode::kDenied,
                "joint publication of {}: rank {} on node '{}' says the world has {} ranks, rank "
                "{} on node '{}' says {}; start all with the same world",
                report.id.to_string(), ranks.front(), report.node_id, report.world,
                other->second.ranks.front(), other->first, gathering.world);
  }
  for (const std::uint32_t rank : ranks) {
    if (!gathering.declared[rank]) continue;
    for (const auto& [node_id, theirs] : gathering.reports) {
      if (node_id == report.node_id || !std::ranges::binary_search(theirs.ranks, rank)) continue;
      return fail(ErrorCode::kDenied,
                  "joint publication of {}: rank {} on node '{}' has declared on node '{}' "
                  "already; each rank has one place",
                  report.id.to_string(), rank, report.node_id, node_id);
    }
  }
  return {};
}

void JointRosters::mark(Gathering& gathering, const std::vector<std::uint32_t>& ranks,
                        bool declared) {
  for (const std::uint32_t rank : ranks) gathering.declared[rank] = declared;
  const auto count = static_cast<std::uint32_t>(ranks.size());
  if (declared) {
    gathering.declared_count += count;
  } else {
    gathering.declared_count -= count;
  }
}

void JointRosters::lose(Gathering& gathering, const std::string& node_id) {
  const auto found = gathering.reports.find(node_id);
  if (found == gathering.reports.end()) return;
  ++revision_;
  if (std::exchange(gathering.number, 0) != 0) {
    for (const auto& [ignored, report] : gathering.reports) mark(gathering, report.ranks, false);
    gathering.reports.clear();
    return;
  }
  mark(gathering, found->second.ranks, false);
  gathering.reports.erase(found);
}

void JointRosters::lose_dead(Gathering& gathering, const Membership& members) {
  std::vector<std::string> dead;
  for (const auto& [node_id, report] : gathering.reports) {
    const Member* member = members.find(node_id, report.node.incarnation);
    if (member == nullptr || member->is_dead()) dead.push_back(node_id);
  }
  for (const std::string& node_id : dead) lose(gathering, node_id);
}

Result<void> JointRosters::report(const JointReport& report, const NodeInfo& node,
                                  const Membership& members, std::uint64_t epoch, TimePoint now) {
  const auto found = gatherings_.find(report.id);
  if (found != gatherings_.end()) lose_dead(found->second, members);
  if (report.leave) {
    if (stands(report)) lose(found->second, report.node_id);
    return {};
  }
  std::vector<std::uint32_t> ranks = report.ranks;
  std::ranges::sort(ranks);
  TRY_VOID(check(report, ranks));
  if (found != gatherings_.end()) TRY_VOID(check_others(found->second, report, ranks));
  if (found == gatherings_.end() && gatherings_.size() >= kMaxJointVersions) {
    return fail(ErrorCode::kExhausted,
                "joint publication of {}: node '{}' reports ranks, but the coordinator has its {} "
                "joint publications already; retry later",
                report.id.to_string(), report.node_id, kMaxJointVersions);
  }
  Gathering& gathering = gatherings_[report.id];
  gathering.last_heard = now;
  const auto earlier = gathering.reports.find(report.node_id);
  if (earlier != gathering.reports.end()) {
    if (earlier->second.ranks == ranks && gathering.world == report.world &&
        earlier->second.attempt == report.attempt) {
      earlier->second.node = node;
      earlier->second.last_heard = now;
      return {};
    }
    lose(gathering, report.node_id);
  }
  if (gathering.reports.empty()) {
    gathering.world = report.world;
    gathering.declared.assign(report.world, false);
  }
  mark(gathering, ranks, true);
  gathering.reports[report.node_id] = {node, std::move(ranks), now, report.attempt};
  if (gathering.declared_count == gathering.world) {
    last_number_ = std::max(last_number_, epoch << kNumberBitsOfATerm) + 1;
    gathering.number = last_number_;
    ++revision_;
  }
  return {};
}

void JointRosters::advance(const Membership& members, TimePoint now) {
  if (now < next_look_) return;
  next_look_ = now + kJointLookEvery;
  for (auto it = gatherings_.begin(); it != gatherings_.end();) {
    Gathering& gathering = it->second;
    lose_dead(gathering, members);
    // A complete roster stays as long as one of its nodes repeats its report. An incomplete one
    // counts only nodes that repeat theirs.
    std::vector<std::string> silent;
    for (const auto& [node_id, report] : gathering.reports) {
      const TimePoint last = gathering.number == 0 ? report.last_heard : gathering.last_heard;
      if (now - last >= kJointSilence) silent.push_back(node_id);
    }
    for (const std::string& node_id : silent) lose(gathering, node_id);
    it = gathering.reports.empty() ? gatherings_.erase(it) : std::next(it);
  }
}

void JointRosters::lose_if(
    const std::function<bool(const NodeInfo& node, const ModelVersion& id)>& gone) {
  for (auto& [id, gathering] : gatherings_) {
    std::vector<std::string> lost;
    for (const auto& [node_id, report] : gathering.reports) {
      if (gone(report.node, id)) lost.push_back(node_id);
    }
    for (const std::string& node_id : lost) lose(gathering, node_id);
  }
}

void JointRosters::shift(Duration by) {
  next_look_ += by;
  for (auto& [id, gathering] : gatherings_) {
    gathering.last_heard += by;
    for (auto& [node_id, report] : gathering.reports) report.last_heard += by;
  }
}

bool JointRosters::stands(const JointReport& report) const {
  const auto found = gatherings_.find(report.id);
  if (found == gatherings_.end()) return false;
  const auto theirs = found->second.reports.find(report.node_id);
  return theirs != found->second.reports.end() &&
         theirs->second.node.incarnation == report.incarnation &&
         theirs->second.attempt == report.attempt;
}

bool JointRosters::is_complete(const ModelVersion& id) const {
  const auto found = gatherings_.find(id);
  return found != gatherings_.end() && found->second.number != 0;
}

JointRoster JointRosters::roster_of(const ModelVersion& id) const {
  JointRoster roster;
  const auto found = gatherings_.find(id);
  if (found == gatherings_.end() || found->second.reports.empty()) return roster;
  const Gathering& gathering = found->second;
  roster.missing_total = gathering.world - gathering.declared_count;
  const std::size_t named = std::min<std::size_t>(roster.missing_total, kMaxMissingNamed);
  for (std::uint32_t rank = 0; roster.missing.size() < named; ++rank) {
    if (!gathering.declared[rank]) roster.missing.push_back(rank);
  }
  if (gathering.number == 0) return roster;
  roster.number = gathering.number;
  for (const auto& [node_id, report] : gathering.reports) {
    roster.hosts.push_back({report.node, report.ranks});
  }
  std::ranges::sort(roster.hosts, {}, [](const auto& host) { return host.ranks.front(); });
  return roster;
}

}  // namespace rekindle::coordinator
