#include "recovery/coordinator/core/rounds.h"

#include <algorithm>
#include <utility>

namespace rekindle::coordinator {

namespace {

constexpr Duration kRoundsLookEvery = std::chrono::milliseconds(50);
// Rounds that are over and remembered.
constexpr std::size_t kMaxRoundsKept = 64;
constexpr std::size_t kMaxRoundsRunning = 64;
constexpr unsigned kRoundBitsOfATerm = 20;
constexpr std::uint64_t kEpochMask = (std::uint64_t{1} << 40) - 1;

bool overlap(const std::string& a, const std::string& b) {
  return a == b || a.empty() || b.empty();
}

}  // namespace

Result<RoundId> Rounds::begin(const ModelVersion& id, const Digest& root, const std::string& group,
                              const Gathering& gathering, std::uint64_t epoch, TimePoint now) {
  std::size_t running = 0;
  for (const auto& [number, other] : rounds_) {
    if (other.over()) continue;
    ++running;
    if (other.id().model != id.model || !overlap(other.group(), group)) continue;
    return fail(ErrorCode::kUnavailable,
                "update {}: round {} brings {} to the same workers ({}); try again when it is over",
                id.to_string(), number, other.id().to_string(), to_string(other.phase()));
  }
  if (running >= kMaxRoundsRunning) {
    return fail(ErrorCode::kUnavailable, "update {}: {} rounds run already; try again later",
                id.to_string(), running);
  }
  const RoundId number = std::max(last_round_, (epoch & kEpochMask) << kRoundBitsOfATerm) + 1;
  Round round({number, id, root, group, gathering.longest.value_or(timing_.gather),
               gathering.members, epoch},
              now);
  for (const auto& [node_id, node] : nodes_) round.expect(node_id, node);
  if (round.places().empty() && gathering.members == 0) {
    return fail(no_member(id, group));
  }
  last_round_ = number;
  Round& begun = rounds_.emplace(number, std::move(round)).first->second;
  ++revision_;
  for (const auto& [node_id, node] : nodes_) begun.follow(node_id, node, now);
  move_on(begun, now);
  return number;
}

Result<void> Rounds::report(const RoundReport& report, TimePoint now) {
  const auto found = nodes_.find(report.node_id);
  if (found != nodes_.end() && found->second.incarnation == report.incarnation &&
      report.sequence < found->second.sequence) {
    return fail(ErrorCode::kStale,
                "node '{}' sends report {} on its workers after its report {}: ignored",
                report.node_id, report.sequence, found->second.sequence);
  }
  if (found != nodes_.end() && found->second.incarnation != report.incarnation) {
    lose(report.node_id, "its agent has started anew", now);
  }
  if (report.members.empty() && !nodes_.contains(report.node_id)) return {};
  const RoundNode& node = nodes_[report.node_id] = {
      report.incarnation, report.sequence, report.device_life, report.members, now + report.wait};
  take(report.described);
  for (auto& [number, round] : rounds_) {
    if (round.over()) {
      if (round.take_phases(report.node_id, node)) ++revision_;
    } else if (round.follow(report.node_id, node, now)) {
      move_on(round, now);
    }
  }
  for (const MeetingId& meeting : report.ids) {
    const auto round = rounds_.find(meeting.round);
    if (round != rounds_.end() && round->second.take_id(report, meeting, now)) {
      move_on(round->second, now);
    }
  }
  return {};
}

void Rounds::take(const std::vector<DescribedContents>& described) {
  const auto is_wanted = [this](const Digest& contents) {
    return std::ranges::any_of(nodes_, [&](const auto& node) {
      return std::ranges::find(node.second.members, contents, &RoundMember::contents) !=
             node.second.members.end();
    });
  };
  for (const auto& [contents, pieces] : described) {
    if (!pieces_.knows(contents)) pieces_.add(contents, pieces, is_wanted);
  }
}

void Rounds::advance(const Membership& members, TimePoint now) {
  if (now < next_look_) return;
  next_look_ = now + kRoundsLookEvery;
  std::vector<std::pair<std::string, std::string>> lost;
  for (const auto& [node_id, node] : nodes_) {
    const auto member = members.all().find(node_id);
    const bool known = member != members.all().end();
    if (known && member->second.info.incarnation != node.incarnation) {
      lost.emplace_back(node_id, "its agent has started anew");
    } else if (!known || member->second.is_dead()) {
      lost.emplace_back(node_id, "the node died");
    } else if (now - node.last_heard >= timing_.report_silence) {
      lost.emplace_back(node_id, "its agent says nothing of it");
    }
  }
  for (const auto& [node_id, why] : lost) lose(node_id, why, now);
  for (auto& [number, round] : rounds_) {
    if (!round.over()) move_on(round, now);
  }
  forget(now);
}

void Rounds::shift(Duration by) {
  next_look_ += by;
  for (auto& [node_id, node] : nodes_) node.last_heard += by;
  for (auto& [number, round] : rounds_) round.shift(by);
}

const Round* Rounds::find(RoundId round) const {
  const auto found = rounds_.find(round);
  return found == rounds_.end() ? nullptr : &found->second;
}

void Rounds::lose(const std::string& node_id, const std::string& why, TimePoint now) {
  const auto found = nodes_.find(node_id);
  if (found == nodes_.end()) return;
  const Incarnation incarnation = found->second.incarnation;
  nodes_.erase(found);
  for (auto& [number, round] : rounds_) {
    if (!round.over() && round.lose(node_id, incarnation, why)) move_on(round, now);
  }
}

void Rounds::move_on(Round& round, TimePoint now) {
  if (round.phase() == RoundPhase::kGathering) {
    if (!round.gathering_is_over(now)) return;
    std::set<std::string> busy;
    for (const auto& [number, other] : rounds_) other.add_busy_devices(busy);
    round.end_gathering(std::move(busy), pieces_, communicators_, now);
  }
  round.move_on(timing_, communicators_, now);
  revision_ += round.take_changes();
}

Error no_member(const ModelVersion& id, const std::string& group) {
  return {ErrorCode::kNotFound,
          fmt::format("update {}: no worker of {} is attached with {}", id.to_string(), id.model,
                      group.empty() ? "a group" : "group " + group)};
}

std::vector<UpdateMember> Rounds::members_of(const std::string& model,
                                             const std::string& group) const {
  std::vector<UpdateMember> members;
  for (const auto& [node_id, node] : nodes_) {
    for (const RoundMember& member : node.members) {
      const bool in_group = !member.group.empty() && (group.empty() || member.group == group);
      if (member.id.model != model || !in_group || member.worker_lost) continue;
      members.push_back({node_id, &member});
    }
  }
  return members;
}

std::vector<RoundOrder> Rounds::orders_for(const std::string& node_id) const {
  std::vector<RoundOrder> orders;
  const auto found = nodes_.find(node_id);
  if (found == nodes_.end()) return orders;
  for (const auto& [number, round] : rounds_) {
    RoundOrder order;
    if (round.order_for(node_id, found->second, order)) orders.push_back(std::move(order));
  }
  return orders;
}

std::size_t Rounds::copies_that_share(const ModelVersion& id) const {
  std::size_t most = 0;
  for (const auto& [number, round] : rounds_) {
    if (round.id() == id) most = std::max(most, round.copies_that_share());
  }
  return most;
}

std::vector<Digest> Rounds::undescribed_of(const std::string& node_id) const {
  std::set<Digest> contents;
  const auto node = nodes_.find(node_id);
  if (node == nodes_.end()) return {};
  for (const RoundMember& member : node->second.members) {
    if (member.contents.is_nil() || pieces_.knows(member.contents)) continue;
    contents.insert(member.contents);
  }
  return {contents.begin(), contents.end()};
}

void Rounds::forget(TimePoint now) {
  std::erase_if(rounds_, [&](const auto& entry) {
    return entry.second.over() && now - entry.second.phase_began() >= timing_.remember;
  });
  auto over = static_cast<std::size_t>(
      std::ranges::count_if(rounds_, [](const auto& entry) { return entry.second.over(); }));
  for (auto it = rounds_.begin(); it != rounds_.end() && over > kMaxRoundsKept;) {
    if (!it->second.over()) {
      ++it;
      continue;
    }
    it = rounds_.erase(it);
    --over;
  }
}

}  // namespace rekindle::coordinator
