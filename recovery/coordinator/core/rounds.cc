#include "recovery/coordinator/core/rounds.h"

#include <algorithm>

namespace rekindle::coordinator {

namespace {

constexpr std::chrono::milliseconds kLook{50};
constexpr std::size_t kMaxRounds = 64;       // that are over and remembered
constexpr std::size_t kMaxRunning = 64;      // at a time
constexpr unsigned kRoundsPerTermBits = 20;  // bits
constexpr std::uint64_t kEpochMask = (std::uint64_t{1} << 40) - 1;

bool overlap(const std::string& a, const std::string& b) {
  return a == b || a.empty() || b.empty();
}

}  // namespace

std::string_view to_string(RoundPhase phase) {
  switch (phase) {
    case RoundPhase::kGathering:
      return "gathering";
    case RoundPhase::kMeeting:
      return "meeting";
    case RoundPhase::kSpreading:
      return "spreading";
    case RoundPhase::kLoading:
      return "loading";
    case RoundPhase::kOver:
      return "over";
  }
  return "unknown";
}

Result<RoundId> Rounds::begin(const ModelVersion& id, const Digest& root, const std::string& group,
                              std::optional<Duration> gather, std::uint64_t epoch, TimePoint now) {
  std::size_t running = 0;
  for (const auto& [number, other] : rounds_) {
    if (other.over()) continue;
    ++running;
    if (other.id.model != id.model || !overlap(other.group, group)) continue;
    return fail(ErrorCode::kUnavailable,
                "update {}: round {} brings {} to the same workers ({}); try again when it is over",
                id.to_string(), number, other.id.to_string(), to_string(other.phase));
  }
  if (running >= kMaxRunning) {
    return fail(ErrorCode::kUnavailable, "update {}: {} rounds run already; try again later",
                id.to_string(), running);
  }
  Round round;
  round.id = id;
  round.root = root;
  round.group = group;
  round.gather = gather.value_or(timing_.gather);
  round.began = round.phase_began = now;
  expect_members(round);
  if (round.places.empty()) {
    return fail(ErrorCode::kNotFound, "update {}: no worker of {} is attached with {}",
                id.to_string(), id.model, group.empty() ? "a group" : "group " + group);
  }
  epoch_ = epoch;
  last_round_ = std::max(last_round_, (epoch & kEpochMask) << kRoundsPerTermBits) + 1;
  round.number = last_round_;
  Round& begun = rounds_.emplace(round.number, std::move(round)).first->second;
  ++revision_;
  for (const auto& [node_id, node] : nodes_) follow(begun, node_id, node, now);
  evolve(begun, now);
  return begun.number;
}

// Each rank that is attached with the model and a group of the round.
void Rounds::expect_members(Round& round) const {
  for (const auto& [node_id, node] : nodes_) {
    for (const RoundMember& member : node.members) {
      if (!concerns(round, member) || member.worker_lost) continue;
      const auto known = places_of(round, node_id);
      if (std::ranges::any_of(known, [&](const RoundPlace& place) {
            return place.instance == member.instance && place.rank == member.rank;
          })) {
        continue;
      }
      RoundPlace place;
      place.node_id = node_id;
      place.incarnation = node.incarnation;
      place.instance = member.instance;
      place.rank = member.rank;
      place.group = member.group;
      place.device = member.device;
      round.places.push_back(std::move(place));
    }
  }
}

Result<void> Rounds::report(const RoundReport& report, TimePoint now) {
  const auto found = nodes_.find(report.node_id);
  if (found != nodes_.end() && found->second.incarnation == report.incarnation &&
      report.sequence < found->second.sequence) {
    return fail(ErrorCode::kStale, "node '{}' reports its workers of {}, and has of {} before",
                report.node_id, report.sequence, found->second.sequence);
  }
  if (found != nodes_.end() && found->second.incarnation != report.incarnation) {
    lose(report.node_id, "its agent has started anew", now);
  }
  if (report.members.empty() && !nodes_.contains(report.node_id)) return {};
  Node& node = nodes_[report.node_id];
  node.incarnation = report.incarnation;
  node.sequence = report.sequence;
  node.device_life = report.device_life;
  node.members = report.members;
  node.last_heard = now + report.wait;
  for (auto& [number, round] : rounds_) {
    if (round.over()) continue;
    if (follow(round, report.node_id, node, now)) evolve(round, now);
  }
  for (const MeetingId& meeting : report.ids) take_id(report, meeting, now);
  return {};
}

void Rounds::advance(const Membership& members, TimePoint now) {
  if (now < next_look_) return;
  next_look_ = now + kLook;
  std::vector<std::pair<std::string, std::string>> lost;
  for (const auto& [node_id, node] : nodes_) {
    const auto member = members.all().find(node_id);
    const bool known = member != members.all().end();
    if (known && member->second.info.incarnation != node.incarnation) {
      lost.emplace_back(node_id, "its agent has started anew");
    } else if (!known || member->second.state == NodeState::kDead) {
      lost.emplace_back(node_id, "the node died");
    } else if (now - node.last_heard >= timing_.report_silence) {
      lost.emplace_back(node_id, "its agent says nothing of it");
    }
  }
  for (const auto& [node_id, why] : lost) lose(node_id, why, now);
  for (auto& [number, round] : rounds_) {
    if (!round.over()) evolve(round, now);
  }
  forget(now);
}

void Rounds::shift(Duration by) {
  next_look_ += by;
  for (auto& [node_id, node] : nodes_) node.last_heard += by;
  for (auto& [number, round] : rounds_) {
    round.began += by;
    round.phase_began += by;
    for (Party& party : round.parties) {
      party.began += by;
      party.last_progress += by;
    }
  }
}

const Round* Rounds::find(RoundId round) const {
  const auto found = rounds_.find(round);
  return found == rounds_.end() ? nullptr : &found->second;
}

// From phase to phase, as far as what is known allows.
void Rounds::evolve(Round& round, TimePoint now) {
  if (round.phase == RoundPhase::kGathering) {
    const bool all = std::ranges::all_of(
        round.places, [](const RoundPlace& place) { return place.arrived || place.settled(); });
    if (!all && now - round.began < round.gather) return;
    end_gathering(round, now);
  }
  RoundPhase phase = RoundPhase::kLoading;
  for (Party& party : round.parties) {
    judge(round, party, now);
    if (!party.runs()) continue;
    phase = std::min(
        phase, party.state == PartyState::kMeeting ? RoundPhase::kMeeting : RoundPhase::kSpreading);
  }
  if (phase > round.phase) enter(round, phase, now);
  if (phase != RoundPhase::kLoading) return;
  if (now - round.phase_began >= timing_.load) {
    for (RoundPlace& place : round.places) {
      if (place.settled()) continue;
      place.failed = fmt::format("has not become ready in {} ms", milliseconds(timing_.load));
    }
  }
  give_up_mates(round);
  if (std::ranges::all_of(round.places, &RoundPlace::settled)) {
    enter(round, RoundPhase::kOver, now);
  }
}

// An instance whose rank is lost becomes ready when that comes back, which this round does not wait
// for.
void Rounds::give_up_mates(Round& round) {
  std::map<std::string_view, const RoundPlace*> lost;  // by instance
  for (const RoundPlace& place : round.places) {
    if (!place.failed.empty() && !place.nameless()) lost.emplace(place.instance, &place);
  }
  for (RoundPlace& place : round.places) {
    const auto mate = lost.find(place.instance);
    if (place.settled() || mate == lost.end()) continue;
    place.failed = fmt::format("its instance is not ready: {}: {}", mate->second->to_string(),
                               mate->second->failed);
  }
}

void Rounds::enter(Round& round, RoundPhase phase, TimePoint now) {
  round.took[round.phase] = now - round.phase_began;
  round.phase = phase;
  round.phase_began = now;
  ++revision_;
}

void Rounds::end_gathering(Round& round, TimePoint now) {
  for (RoundPlace& place : round.places) {
    if (place.settled()) continue;
    if (!place.arrived) {
      place.left_out = true;
      place.failed = fmt::format("has not attached to {} in {} ms", round.id.to_string(),
                                 milliseconds(round.gather));
    } else if (place.last->state == RoundMemberState::kFailed || place.last->worker_lost) {
      place.failed = place.last->why.empty() ? "its worker has gone" : place.last->why;
    } else if (place.last->state == RoundMemberState::kJoined && place.last->root != round.root) {
      place.failed = fmt::format("has {} with root {}, the round brings root {}",
                                 round.id.to_string(), place.last->root.hex(), round.root.hex());
      place.aside = place.failed;
    }
  }
  form_parties(round, now);
  const bool meets = std::ranges::any_of(
      round.parties, [](const Party& party) { return party.state == PartyState::kMeeting; });
  const RoundPhase next = meets                   ? RoundPhase::kMeeting
                          : round.parties.empty() ? RoundPhase::kLoading
                                                  : RoundPhase::kSpreading;
  enter(round, next, now);
}

void Rounds::forget(TimePoint now) {
  std::erase_if(rounds_, [&](const auto& entry) {
    return entry.second.over() && now - entry.second.phase_began >= timing_.remember;
  });
  auto over = static_cast<std::size_t>(
      std::ranges::count_if(rounds_, [](const auto& entry) { return entry.second.over(); }));
  for (auto it = rounds_.begin(); it != rounds_.end() && over > kMaxRounds;) {
    if (!it->second.over()) {
      ++it;
      continue;
    }
    it = rounds_.erase(it);
    --over;
  }
}

}  // namespace rekindle::coordinator
