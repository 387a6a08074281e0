#include "recovery/coordinator/core/round.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace rekindle::coordinator {

namespace {

constexpr std::size_t kMaxPlaces = 65536;

// Without owners: those that have all of it are in another party, or on a device that is.
std::string why_alone(std::size_t members, std::size_t owners) {
  if (members < 2) return "needs no broadcast: nobody else wants the same";
  return owners == 0 ? "no host of the party has all of it in memory" : "";
}

bool takes_part(const RoundMember& member, RoundId round) {
  return member.round == round && member.state >= RoundMemberState::kJoined;
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

Round::Round(Begin begin, TimePoint now) : begin_(std::move(begin)), phase_began_(now) {}

bool Round::concerns(const RoundMember& member) const {
  return member.id.model == begin_.id.model && !member.group.empty() &&
         (begin_.group.empty() || begin_.group == member.group);
}

std::span<RoundPlace> Round::places_of(const std::string& node_id) {
  const auto range = std::ranges::equal_range(places_, node_id, {}, &RoundPlace::node_id);
  return {range.begin(), range.end()};
}

std::span<const RoundPlace> Round::places_of(const std::string& node_id) const {
  const auto range = std::ranges::equal_range(places_, node_id, {}, &RoundPlace::node_id);
  return {range.begin(), range.end()};
}

void Round::expect(const std::string& node_id, const RoundNode& node) {
  for (const RoundMember& member : node.members) {
    if (!concerns(member) || member.worker_lost) continue;
    const auto is_it = [&](const RoundPlace& place) { return place.is(member); };
    const auto known = places_of(node_id);
    if (std::ranges::any_of(known, is_it)) continue;
    places_.insert(std::ranges::upper_bound(places_, node_id, {}, &RoundPlace::node_id),
                   RoundPlace(node_id, node.incarnation, member));
  }
}

// The session of a rank that counts: the newest that takes part, else one that serves the version.
const RoundMember* Round::find_member(const RoundPlace& place, const RoundNode& node) const {
  const RoundMember* best = nullptr;
  bool best_takes_part = false;
  for (const RoundMember& member : node.members) {
    if (!place.is(member) || member.id != begin_.id) continue;
    const bool part = takes_part(member, begin_.number);
    const bool has_it =
        member.state == RoundMemberState::kServing || member.state == RoundMemberState::kReady;
    if (!part && (best_takes_part || !has_it)) continue;
    if (best != nullptr && part == best_takes_part && member.session < best->session) continue;
    best = &member;
    best_takes_part = part;
  }
  return best;
}

// Admits members that take part and were not expected: a worker that came during the gathering, or
// one without an instance, which takes the place of such a one. Returns whether there was any.
bool Round::admit(const std::string& node_id, const RoundNode& node) {
  bool changed = false;
  for (const RoundMember& member : node.members) {
    if (member.id != begin_.id || !concerns(member) || !takes_part(member, begin_.number)) continue;
    const auto places = places_of(node_id);
    const auto is_it = [&](const RoundPlace& place) { return place.is(member); };
    if (std::ranges::any_of(places, is_it)) continue;
    const auto free = std::ranges::find_if(places, [&](const RoundPlace& place) {
      return place.nameless() && place.state == PlaceState::kExpected &&
             place.group == member.group && place.device == member.device;
    });
    changed = true;
    if (is_nameless(member.instance) && free != places.end()) {
      free->instance = member.instance;
      free->rank = member.rank;
    } else if (places_.size() < kMaxPlaces) {
      places_.insert(std::ranges::upper_bound(places_, node_id, {}, &RoundPlace::node_id),
                     RoundPlace(node_id, node.incarnation, member));
    }
  }
  return changed;
}

bool Round::watch(RoundPlace& place, const RoundNode& node, TimePoint now) {
  const std::uint64_t before = place.last ? place.last->spread_bytes : 0;
  const bool was_filled = place.filled();
  const RoundMember* reported = nullptr;
  if (place.last) {
    const auto found = std::ranges::find(node.members, place.last->session, &RoundMember::session);
    if (found != node.members.end()) reported = &*found;
  }
  bool changed = place.watch(reported, begin_.number);
  if (place.party == 0) return changed;
  Party& party = parties_[place.party - 1];
  if (party.runs()) {
    place.watch_device(begin_.number, node.device_life == party.lives[place.party_rank]);
  }
  changed = changed || !place.trouble.empty();
  const bool spreads = place.last->spread_bytes > before || place.filled() != was_filled;
  if (spreads) party.last_progress = now;
  return changed;
}

bool Round::follow(const std::string& node_id, const RoundNode& node, TimePoint now) {
  const bool gathering = phase_ == RoundPhase::kGathering;
  bool changed = gathering && admit(node_id, node);
  for (RoundPlace& place : places_of(node_id)) {
    if (place.incarnation != node.incarnation) continue;
    const bool news = gathering
                          ? place.gather(find_member(place, node), node.device_life, begin_.id)
                          : watch(place, node, now);
    changed = news || changed;
  }
  return changed;
}

bool Round::take_phases(const std::string& node_id, const RoundNode& node) {
  bool changed = false;
  for (RoundPlace& place : places_of(node_id)) {
    if (!place.last || place.incarnation != node.incarnation) continue;
    const auto found = std::ranges::find(node.members, place.last->session, &RoundMember::session);
    if (found == node.members.end() || found->phases.size() <= place.last->phases.size()) continue;
    place.last->phases = found->phases;
    changed = true;
  }
  return changed;
}

bool Round::lose(const std::string& node_id, const Incarnation& incarnation,
                 const std::string& why) {
  bool changed = false;
  for (RoundPlace& place : places_of(node_id)) {
    if (place.incarnation != incarnation) continue;
    place.lose(why);
    changed = true;
  }
  return changed;
}

bool Round::take_id(const RoundReport& report, const MeetingId& meeting, TimePoint now) {
  if (over() || meeting.party == 0 || meeting.party > parties_.size()) return false;
  Party& party = parties_[meeting.party - 1];
  const RoundPlace& first = places_[party.ranks.front()];
  const bool asked = first.node_id == report.node_id && first.incarnation == report.incarnation;
  if (party.state != PartyState::kMeeting || !asked) return false;
  if (meeting.id.empty()) {
    party.stop(fmt::format("{} made no communicator: {}", first.to_string(),
                           meeting.problem.empty() ? "its id is empty" : meeting.problem));
  } else {
    party.begin_spreading(meeting.id, now);
  }
  ++changes_;
  return true;
}

bool Round::gathering_is_over(TimePoint now) const {
  const bool all = std::ranges::all_of(
      places_, [](const RoundPlace& place) { return place.state != PlaceState::kExpected; });
  return (all && places_.size() >= begin_.members) || now - phase_began_ >= begin_.gather;
}

void Round::end_gathering(std::set<std::string> busy, const KnownPieces& known,
                          Communicators& communicators, TimePoint now) {
  std::map<Digest, std::vector<std::size_t>> wanted;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    RoundPlace& place = places_[i];
    place.end_gathering(begin_.id, begin_.root, begin_.gather);
    if (place.settled() || place.last->state != RoundMemberState::kJoined) continue;
    if (place.last->device.empty() || place.last->bucket_bytes == 0) {
      place.aside = "it has no buckets on a device";
      continue;
    }
    wanted[place.last->contents].push_back(i);
  }
  Forming forming{std::move(busy), communicators, now};
  std::vector<std::size_t> lonely;
  for (const auto& [contents, same] : wanted) {
    if (same.size() == 1) {
      lonely.push_back(same.front());
      continue;
    }
    std::vector<Seat> seats;
    for (const std::size_t i : same) seats.push_back({i});
    form_party(std::move(seats), places_[same.front()].last->payload_bytes, forming);
  }
  form_common_parties(std::move(lonely), known, forming);
  const bool meets = std::ranges::any_of(
      parties_, [](const Party& party) { return party.state == PartyState::kMeeting; });
  enter(meets              ? RoundPhase::kMeeting
        : parties_.empty() ? RoundPhase::kLoading
                           : RoundPhase::kSpreading,
        now);
}

// Of places that want different contents.
void Round::form_common_parties(std::vector<std::size_t> lonely, const KnownPieces& known,
                                Forming& forming) {
  std::vector<std::size_t> described;
  std::vector<const Pieces*> wanted;
  for (const std::size_t i : lonely) {
    places_[i].aside = why_alone(1, 0);
    const Pieces* const pieces = pieces_to_share(*places_[i].last, known);
    if (pieces == nullptr) continue;
    described.push_back(i);
    wanted.push_back(pieces);
  }
  for (CommonPieces& common : find_common_pieces(wanted)) {
    std::vector<Seat> seats;
    for (std::size_t i = 0; i < common.members.size(); ++i) {
      const std::size_t place = described[common.members[i]];
      places_[place].aside.clear();
      seats.push_back({place, std::move(common.runs[i])});
    }
    form_party(std::move(seats), common.bytes, forming);
  }
}

// A device keeps one communicator: two parties at once could each take it for their own.
void Round::form_party(std::vector<Seat> seats, std::uint64_t bytes, Forming& forming) {
  std::ranges::stable_sort(seats, {}, [&](const Seat& seat) {
    return std::tie(places_[seat.place].node_id, places_[seat.place].device);
  });
  std::map<std::string, const RoundPlace*> taken;  // by device
  Party party;
  party.bytes = bytes;
  // If nobody has all of it, agents that do not fetch stay out. Those of an older build would give
  // a bucket less time than a fetch may take.
  party.owners_fetch = std::ranges::none_of(
      seats, [&](const Seat& seat) { return places_[seat.place].last->owner; });
  std::vector<const RoundPlace*> members;
  for (Seat& seat : seats) {
    RoundPlace& place = places_[seat.place];
    if (party.owners_fetch && !place.last->fetches) {
      place.aside = "no host has all of it in memory, and its own fetches no share";
      continue;
    }
    const std::string device = device_of(place);
    if (forming.busy.contains(device)) {
      place.aside = "its device is in another party";
      continue;
    }
    if (const auto [other, is_free] = taken.try_emplace(device, &place); !is_free) {
      place.aside = fmt::format("{} wants the same on the same device", other->second->to_string());
      continue;
    }
    const auto rank = static_cast<std::uint32_t>(party.ranks.size());
    const std::uint64_t bucket_bytes = place.last->bucket_bytes;
    party.bucket_bytes = rank == 0 ? bucket_bytes : std::min(party.bucket_bytes, bucket_bytes);
    if (place.last->owner || party.owners_fetch) party.owners.push_back(rank);
    party.lives.push_back(place.device_life);
    party.ranks.push_back(seat.place);
    place.pieces = std::move(seat.pieces);
    members.push_back(&place);
  }
  const std::string alone = why_alone(party.ranks.size(), party.owners.size());
  if (!alone.empty()) {
    for (const std::size_t i : party.ranks) places_[i].aside = alone;
    return;
  }
  party.number = static_cast<std::uint32_t>(parties_.size() + 1);
  party.began = party.last_progress = forming.now;
  for (std::size_t rank = 0; rank < party.ranks.size(); ++rank) {
    RoundPlace& place = places_[party.ranks[rank]];
    place.party = party.number;
    place.party_rank = static_cast<std::uint32_t>(rank);
    forming.busy.insert(device_of(place));
  }
  std::tie(party.communicator, party.reuses) =
      forming.communicators.name_for(members, begin_.epoch);
  party.state = party.reuses ? PartyState::kSpreading : PartyState::kMeeting;
  parties_.push_back(std::move(party));
}

void Round::move_on(const RoundTiming& timing, Communicators& communicators, TimePoint now) {
  RoundPhase phase = RoundPhase::kLoading;
  for (Party& party : parties_) {
    const bool ran = party.runs();
    party.judge(places_, timing.meet, timing.spread, now);
    if (party.state == PartyState::kStopped) {
      communicators.forget(party.communicator);
      if (ran) ++changes_;
    }
    if (!party.runs()) continue;
    phase = std::min(
        phase, party.state == PartyState::kMeeting ? RoundPhase::kMeeting : RoundPhase::kSpreading);
  }
  if (phase > phase_) enter(phase, now);
  if (phase != RoundPhase::kLoading) return;
  if (now - phase_began_ >= timing.load) {
    for (RoundPlace& place : places_) {
      place.fail_with(fmt::format("has not become ready in {} ms", milliseconds(timing.load)));
    }
  }
  give_up_mates();
  if (std::ranges::all_of(places_, &RoundPlace::settled)) enter(RoundPhase::kOver, now);
}

// An instance with a lost rank becomes ready when that rank comes back. The round does not wait for
// it.
void Round::give_up_mates() {
  std::map<std::string_view, const RoundPlace*> lost;  // by instance
  for (const RoundPlace& place : places_) {
    if (!place.why.empty() && !place.nameless()) lost.emplace(place.instance, &place);
  }
  for (RoundPlace& place : places_) {
    const auto mate = lost.find(place.instance);
    if (place.settled() || mate == lost.end()) continue;
    place.fail_with(fmt::format("its instance is not ready: {}: {}", mate->second->to_string(),
                                mate->second->why));
  }
}

void Round::enter(RoundPhase phase, TimePoint now) {
  took_[phase_] = now - phase_began_;
  phase_ = phase;
  phase_began_ = now;
  ++changes_;
}

void Round::shift(Duration by) {
  phase_began_ += by;
  for (Party& party : parties_) {
    party.began += by;
    party.last_progress += by;
  }
}

void Round::add_busy_devices(std::set<std::string>& busy) const {
  for (const Party& party : parties_) {
    if (!party.runs()) continue;
    for (const std::size_t i : party.ranks) busy.insert(device_of(places_[i]));
  }
}

// Tells the members that wait for a party why they will have none.
void Round::add_asides(const std::string& node_id, const RoundNode& node, RoundOrder& order) const {
  std::map<std::string, PartyOrder> asides;  // by reason
  const auto places = places_of(node_id);
  for (const RoundMember& member : node.members) {
    if (member.round != begin_.number || member.state != RoundMemberState::kJoined) continue;
    const auto place = std::ranges::find_if(places, [&](const RoundPlace& candidate) {
      return candidate.last && candidate.last->session == member.session &&
             candidate.incarnation == node.incarnation;
    });
    if (place != places.end() && place->party != 0) continue;
    std::string why = "it has attached after the gathering";
    if (place != places.end()) why = place->aside.empty() ? place->why : place->aside;
    asides[why].members.push_back({member.session, 0});
  }
  auto number = static_cast<std::uint32_t>(parties_.size());
  for (auto& [why, aside] : asides) {
    aside.party = ++number;
    aside.state = PartyState::kStopped;
    aside.why = why;
    order.parties.push_back(std::move(aside));
  }
}

std::size_t Round::copies_that_share() const {
  // Members of a host that want the same share a copy.
  std::set<std::pair<std::string, Digest>> copies;
  for (const RoundPlace& place : places_) {
    const bool may_fetch = phase_ == RoundPhase::kGathering
                               ? !place.last || !place.last->owner
                               : place.party != 0 && parties_[place.party - 1].owners_fetch;
    if (!may_fetch || phase_ > RoundPhase::kSpreading) continue;
    copies.emplace(place.node_id, place.last ? place.last->contents : Digest());
  }
  return copies.size();
}

// Its device still spreads in a party that has stopped. Its node was away when the round ended.
bool Round::is_left_behind(const RoundPlace& place, const RoundNode& node) const {
  if (place.party == 0 || place.incarnation != node.incarnation) return false;
  if (parties_[place.party - 1].state != PartyState::kStopped) return false;
  const auto found = std::ranges::find(node.members, place.last->session, &RoundMember::session);
  return found != node.members.end() && found->round == begin_.number &&
         found->state == RoundMemberState::kSpreading;
}

bool Round::order_for(const std::string& node_id, const RoundNode& node, RoundOrder& order) const {
  const auto places = places_of(node_id);
  const auto is_concerned = [this](const RoundMember& member) { return concerns(member); };
  const auto is_behind = [&](const RoundPlace& place) { return is_left_behind(place, node); };
  const bool has_part = over() ? std::ranges::any_of(places, is_behind)
                               : !places.empty() || std::ranges::any_of(node.members, is_concerned);
  if (!has_part) return false;
  order.round = begin_.number;
  order.id = begin_.id;
  order.group = begin_.group;
  order.gathering = phase_ == RoundPhase::kGathering;
  std::map<std::uint32_t, PartyOrder> parties;
  for (const RoundPlace& place : places) {
    if (place.party == 0 || place.incarnation != node.incarnation) continue;
    const auto [party, is_new] = parties.try_emplace(place.party);
    if (is_new) party->second = parties_[place.party - 1].order_for(places_, node_id);
    party->second.members.push_back({place.last->session, place.party_rank, place.pieces});
  }
  for (auto& [number, party] : parties) order.parties.push_back(std::move(party));
  if (!order.gathering) add_asides(node_id, node, order);
  return true;
}

}  // namespace rekindle::coordinator
