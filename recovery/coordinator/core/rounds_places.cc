#include <algorithm>

#include "recovery/coordinator/core/rounds.h"

// The places of a round: what its members' agents say of them, and what that means.
namespace rekindle::coordinator {

namespace {

constexpr std::size_t kMaxPlaces = 65536;

bool has_it(const RoundMember& member, const ModelVersion& id) {
  return member.id == id &&
         (member.state == RoundMemberState::kServing || member.state == RoundMemberState::kReady);
}

bool same_rank(const RoundPlace& place, const RoundMember& member) {
  return place.instance == member.instance && place.rank == member.rank;
}

}  // namespace

std::string RoundPlace::to_string() const {
  if (nameless()) return fmt::format("the worker {} on {}", instance, node_id);
  return fmt::format("rank {} of {} on {}", rank, instance, node_id);
}

std::string_view state_name(const RoundPlace& place) {
  if (place.left_out) return "left out";
  if (!place.failed.empty()) return "failed";
  if (place.ready) return "ready";
  if (!place.last) return "expected";
  switch (place.last->state) {
    case RoundMemberState::kServing:
    case RoundMemberState::kReady:
      return "ready";
    case RoundMemberState::kJoined:
      return "joined";
    case RoundMemberState::kSpreading:
      return "spreading";
    case RoundMemberState::kAlone:
      return "alone";
    case RoundMemberState::kFilled:
      return "filled";
    case RoundMemberState::kFailed:
      return "failed";
  }
  return "unknown";
}

bool Rounds::concerns(const Round& round, const RoundMember& member) {
  return member.id.model == round.id.model && !member.group.empty() &&
         (round.group.empty() || round.group == member.group);
}

std::span<RoundPlace> Rounds::places_of(Round& round, const std::string& node_id) {
  const auto range = std::ranges::equal_range(round.places, node_id, {}, &RoundPlace::node_id);
  return {range.begin(), range.end()};
}

std::span<const RoundPlace> Rounds::places_of(const Round& round, const std::string& node_id) {
  const auto range = std::ranges::equal_range(round.places, node_id, {}, &RoundPlace::node_id);
  return {range.begin(), range.end()};
}

// The session of a rank that counts: the newest that takes part, else one that serves the version.
const RoundMember* Rounds::find_member(const Round& round, const RoundPlace& place,
                                       const Node& node) {
  const RoundMember* best = nullptr;
  bool best_takes_part = false;
  for (const RoundMember& member : node.members) {
    if (!same_rank(place, member) || member.id != round.id) continue;
    const bool takes_part =
        member.round == round.number && member.state >= RoundMemberState::kJoined;
    const bool had_it = has_it(member, round.id);
    if (!takes_part && (best_takes_part || !had_it)) continue;
    if (best != nullptr && takes_part == best_takes_part && member.session < best->session) {
      continue;
    }
    best = &member;
    best_takes_part = takes_part;
  }
  return best;
}

// While it gathers a rank may come, go and come again. Whether it came or went.
bool Rounds::gather_place(const Round& round, RoundPlace& place, const Node& node) {
  const RoundMember* member = find_member(round, place, node);
  const bool arrived = member != nullptr;
  const bool ready = arrived && has_it(*member, round.id);
  const bool changed = arrived != place.arrived || ready != place.ready;
  place.arrived = arrived;
  place.ready = ready;
  place.last = arrived ? std::optional(*member) : std::nullopt;
  if (arrived) place.device = member->device;
  return changed;
}

// Afterwards its session is the one that takes part. Whether there is anything but progress.
bool Rounds::watch_place(const Round& round, RoundPlace& place, const Node& node) {
  if (!place.last || place.left_out || place.gone) return false;
  const auto said = std::ranges::find(node.members, place.last->session, &RoundMember::session);
  if (said == node.members.end() || !same_rank(place, *said) || said->id != place.last->id) {
    place.gone = true;
    if (!place.settled()) {
      place.failed = place.last->why.empty() ? "its session has ended" : place.last->why;
    }
    return true;
  }
  const bool changed =
      said->state != place.last->state || said->worker_lost != place.last->worker_lost;
  place.last = *said;
  const RoundMemberState state = said->state;
  place.spreading = place.spreading || state == RoundMemberState::kSpreading;
  place.filled =
      place.filled || state == RoundMemberState::kFilled || state == RoundMemberState::kReady;
  if (place.settled()) return changed;
  if (state == RoundMemberState::kFailed) {
    place.failed = said->why.empty() ? "has failed" : said->why;
  } else if (said->worker_lost) {
    place.failed = said->why.empty() ? "its worker has gone" : said->why;
  } else if (said->round != round.number) {
    place.failed = "its agent has left the round";
  } else if (state == RoundMemberState::kReady) {
    place.ready = true;
  }
  return changed;
}

// What its party must know of it. A worker that has gone is no trouble for a device that spreads:
// that goes on and discards.
void Rounds::watch_party_of(Round& round, RoundPlace& place, const Node& node) {
  const Party& party = round.parties[place.party - 1];
  if (place.filled || !place.trouble.empty() || !party.runs()) return;
  const RoundMember& last = *place.last;
  const bool discards = last.worker_lost && place.spreading;
  const bool failed = last.state == RoundMemberState::kFailed;
  if (node.device_life != party.lives[place.party_rank]) {
    place.trouble = "its device process has ended";
  } else if (last.state == RoundMemberState::kAlone || (failed && !discards)) {
    place.trouble = last.why.empty() ? "it goes on alone" : last.why;
  } else if (last.round != round.number && !discards) {
    place.trouble = "its agent has left the round";
  } else if (last.worker_lost && !discards) {
    place.trouble = last.why.empty() ? "its worker has gone" : last.why;
  } else if (place.gone && !discards) {
    place.trouble = "its session has ended";
  }
}

// Who takes part and was not expected: a worker that came while it gathered, or one without an
// instance, which takes the place of such a one.
bool Rounds::admit(Round& round, const std::string& node_id, const Node& node) {
  bool changed = false;
  for (const RoundMember& member : node.members) {
    if (member.round != round.number || member.id != round.id || !concerns(round, member) ||
        member.state < RoundMemberState::kJoined) {
      continue;
    }
    const auto places = places_of(round, node_id);
    const auto is_it = [&](const RoundPlace& place) { return same_rank(place, member); };
    if (std::ranges::any_of(places, is_it)) continue;
    const auto free = std::ranges::find_if(places, [&](const RoundPlace& place) {
      return place.nameless() && !place.arrived && !place.settled() &&
             place.group == member.group && place.device == member.device;
    });
    changed = true;
    if (is_nameless(member.instance) && free != places.end()) {
      free->instance = member.instance;
      free->rank = member.rank;
      continue;
    }
    if (round.places.size() >= kMaxPlaces) continue;
    RoundPlace place;
    place.node_id = node_id;
    place.incarnation = node.incarnation;
    place.instance = member.instance;
    place.rank = member.rank;
    place.group = member.group;
    place.device = member.device;
    round.places.insert(std::ranges::upper_bound(round.places, node_id, {}, &RoundPlace::node_id),
                        std::move(place));
  }
  return changed;
}

// Whether the round may have to go on because of it.
bool Rounds::follow(Round& round, const std::string& node_id, const Node& node, TimePoint now) {
  const bool gathering = round.phase == RoundPhase::kGathering;
  bool changed = gathering && admit(round, node_id, node);
  for (RoundPlace& place : places_of(round, node_id)) {
    if (place.incarnation != node.incarnation) continue;
    if (gathering) {
      changed = gather_place(round, place, node) || changed;
      continue;
    }
    const std::uint64_t before = place.last ? place.last->spread_bytes : 0;
    const bool was_filled = place.filled;
    changed = watch_place(round, place, node) || changed;
    if (place.party == 0) continue;
    watch_party_of(round, place, node);
    changed = changed || !place.trouble.empty();
    const bool spreads = place.last->spread_bytes > before || place.filled != was_filled;
    if (spreads) round.parties[place.party - 1].last_progress = now;
  }
  return changed;
}

// A node is lost to all rounds.
void Rounds::lose(const std::string& node_id, const std::string& why, TimePoint now) {
  const auto found = nodes_.find(node_id);
  if (found == nodes_.end()) return;
  const Incarnation incarnation = found->second.incarnation;
  nodes_.erase(found);
  for (auto& [number, round] : rounds_) {
    if (round.over()) continue;
    bool changed = false;
    for (RoundPlace& place : places_of(round, node_id)) {
      if (place.incarnation != incarnation) continue;
      changed = true;
      place.gone = true;
      if (!place.settled()) place.failed = why;
      if (!place.filled && place.trouble.empty()) place.trouble = why;
    }
    if (changed) evolve(round, now);
  }
}

}  // namespace rekindle::coordinator
