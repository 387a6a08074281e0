#include <algorithm>
#include <tuple>

#include "recovery/coordinator/core/rounds.h"

// The parties of a round: who meets whom, by which communicator, and what their agents are told.
namespace rekindle::coordinator {

namespace {

constexpr std::size_t kMaxCommunicators = 64;  // remembered

// A UUID names its GPU whoever sees it: agents of one host may share it, and NCCL refuses one that
// is there twice. A double lives in the device process of its node.
std::string device_of(const RoundPlace& place) {
  if (!place.device.starts_with("double:")) return place.device;
  return fmt::format("{} of {}", place.device, place.node_id);
}

std::string why_alone(std::size_t members, std::size_t owners) {
  if (members < 2) return "needs no broadcast: nobody else wants the same";
  return owners == 0 ? "no host of the party has all of it in memory" : "";
}

}  // namespace

void Rounds::form_parties(Round& round, TimePoint now) {
  std::map<Digest, std::vector<std::size_t>> wanted;
  for (std::size_t i = 0; i < round.places.size(); ++i) {
    RoundPlace& place = round.places[i];
    if (place.settled() || place.last->state != RoundMemberState::kJoined) continue;
    if (place.last->device.empty() || place.last->bucket_bytes == 0) {
      place.aside = "it has no buckets on a device";
      continue;
    }
    wanted[place.last->contents].push_back(i);
  }
  for (auto& [contents, same] : wanted) form_party(round, std::move(same), now);
}

void Rounds::form_party(Round& round, std::vector<std::size_t> same, TimePoint now) {
  std::ranges::stable_sort(same, {}, [&](std::size_t i) {
    return std::tie(round.places[i].node_id, round.places[i].device);
  });
  const auto busy = devices_in_parties();
  std::map<std::string, const RoundPlace*> taken;  // by device
  Party party;
  for (const std::size_t i : same) {
    RoundPlace& place = round.places[i];
    const std::string device = device_of(place);
    if (busy.contains(device)) {
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
    if (place.last->owner) party.owners.push_back(rank);
    party.lives.push_back(nodes_.at(place.node_id).device_life);
    party.ranks.push_back(i);
  }
  const std::string alone = why_alone(party.ranks.size(), party.owners.size());
  if (!alone.empty()) {
    for (const std::size_t i : party.ranks) round.places[i].aside = alone;
    return;
  }
  party.number = static_cast<std::uint32_t>(round.parties.size() + 1);
  party.began = party.last_progress = now;
  for (std::size_t rank = 0; rank < party.ranks.size(); ++rank) {
    RoundPlace& place = round.places[party.ranks[rank]];
    place.party = party.number;
    place.party_rank = static_cast<std::uint32_t>(rank);
  }
  name_communicator(round, party);
  party.state = party.reuses ? PartyState::kSpreading : PartyState::kMeeting;
  round.parties.push_back(std::move(party));
}

// A device keeps one communicator: two parties at once could each take it for its own.
std::set<std::string> Rounds::devices_in_parties() const {
  std::set<std::string> devices;
  for (const auto& [number, round] : rounds_) {
    for (const Party& party : round.parties) {
      if (!party.runs()) continue;
      for (const std::size_t i : party.ranks) devices.insert(device_of(round.places[i]));
    }
  }
  return devices;
}

// The devices that meet, of which processes, in which order.
std::vector<std::string> Rounds::signature_of(const Round& round, const Party& party) const {
  std::vector<std::string> signature;
  for (std::size_t rank = 0; rank < party.ranks.size(); ++rank) {
    const RoundPlace& place = round.places[party.ranks[rank]];
    signature.push_back(fmt::format("{} {} {} {}", place.node_id, place.incarnation.hex(),
                                    party.lives[rank], place.device));
  }
  return signature;
}

void Rounds::name_communicator(const Round& round, Party& party) {
  std::vector<std::string> signature = signature_of(round, party);
  for (const auto& [name, met] : communicators_) {
    const auto kept = [&, &kept_name = name](std::size_t i) {
      const auto& names = round.places[i].last->communicators;
      return std::ranges::find(names, kept_name) != names.end();
    };
    if (met != signature || !std::ranges::all_of(party.ranks, kept)) continue;
    party.communicator = name;
    party.reuses = true;
    return;
  }
  party.communicator = fmt::format("{}-{}", epoch_, ++last_communicator_);
  communicators_.emplace_back(party.communicator, std::move(signature));
  if (communicators_.size() > kMaxCommunicators) communicators_.pop_front();
}

void Rounds::take_id(const RoundReport& report, const MeetingId& meeting, TimePoint now) {
  const auto found = rounds_.find(meeting.round);
  if (found == rounds_.end() || found->second.over()) return;
  Round& round = found->second;
  if (meeting.party == 0 || meeting.party > round.parties.size()) return;
  Party& party = round.parties[meeting.party - 1];
  const RoundPlace& first = round.places[party.ranks.front()];
  const bool asked = first.node_id == report.node_id && first.incarnation == report.incarnation;
  if (party.state != PartyState::kMeeting || !asked) return;
  if (meeting.id.empty()) {
    stop(party, fmt::format("{} made no communicator: {}", first.to_string(),
                            meeting.problem.empty() ? "its id is empty" : meeting.problem));
  } else {
    party.id = meeting.id;
    party.state = PartyState::kSpreading;
    party.last_progress = now;
    ++revision_;
  }
  evolve(round, now);
}

void Rounds::stop(Party& party, std::string why) {
  party.state = PartyState::kStopped;
  party.why = std::move(why);
  // Those of its devices that are well have aborted it.
  std::erase_if(communicators_,
                [&](const auto& entry) { return entry.first == party.communicator; });
  ++revision_;
}

void Rounds::judge(Round& round, Party& party, TimePoint now) {
  if (!party.runs()) return;
  bool through = true;
  for (const std::size_t i : party.ranks) {
    const RoundPlace& place = round.places[i];
    if (place.filled) continue;
    if (!place.trouble.empty()) {
      return stop(party, fmt::format("{}: {}", place.to_string(), place.trouble));
    }
    // One that discarded is through when its device is, or when it is not reported any more.
    const bool discarded =
        place.last && place.last->worker_lost && place.last->state == RoundMemberState::kFailed;
    through = through && (place.gone || discarded);
  }
  if (through && party.state == PartyState::kSpreading) {
    party.through = true;
    return;
  }
  if (party.state == PartyState::kMeeting && now - party.began >= timing_.meet) {
    stop(party,
         fmt::format("{} made no communicator in {} ms",
                     round.places[party.ranks.front()].to_string(), milliseconds(timing_.meet)));
  } else if (party.state == PartyState::kSpreading && now - party.last_progress >= timing_.spread) {
    stop(party, fmt::format("no progress in {} ms", milliseconds(timing_.spread)));
  }
}

PartyOrder Rounds::order_for(const Round& round, const Party& party, const std::string& node_id) {
  PartyOrder order;
  order.party = party.number;
  order.state = party.state;
  order.make_id =
      party.state == PartyState::kMeeting && round.places[party.ranks.front()].node_id == node_id;
  order.communicator = party.communicator;
  order.id = party.id;
  order.bucket_bytes = party.bucket_bytes;
  order.ranks = static_cast<std::uint32_t>(party.ranks.size());
  order.owners = party.owners;
  order.why = party.why;
  return order;
}

// Those who wait for a party and will have none.
void Rounds::add_asides(const Round& round, const std::string& node_id, const Node& node,
                        RoundOrder& order) {
  std::map<std::string, PartyOrder> asides;  // by why
  const auto places = places_of(round, node_id);
  for (const RoundMember& member : node.members) {
    if (member.round != round.number || member.state != RoundMemberState::kJoined) continue;
    const auto place = std::ranges::find_if(places, [&](const RoundPlace& candidate) {
      return candidate.last && candidate.last->session == member.session &&
             candidate.incarnation == node.incarnation;
    });
    if (place != places.end() && place->party != 0) continue;
    std::string why = "it has attached after the gathering";
    if (place != places.end()) why = place->aside.empty() ? place->failed : place->aside;
    asides[why].members.push_back({member.session, 0});
  }
  auto number = static_cast<std::uint32_t>(round.parties.size());
  for (auto& [why, aside] : asides) {
    aside.party = ++number;
    aside.state = PartyState::kStopped;
    aside.why = why;
    order.parties.push_back(std::move(aside));
  }
}

std::vector<RoundOrder> Rounds::orders_for(const std::string& node_id) const {
  std::vector<RoundOrder> orders;
  const auto found = nodes_.find(node_id);
  if (found == nodes_.end()) return orders;
  const Node& node = found->second;
  for (const auto& [number, round] : rounds_) {
    if (round.over()) continue;
    const auto places = places_of(round, node_id);
    const auto concerned = [&](const RoundMember& member) { return concerns(round, member); };
    if (places.empty() && std::ranges::none_of(node.members, concerned)) continue;
    RoundOrder order;
    order.round = number;
    order.id = round.id;
    order.group = round.group;
    order.gathering = round.phase == RoundPhase::kGathering;
    std::map<std::uint32_t, PartyOrder> parties;
    for (const RoundPlace& place : places) {
      if (place.party == 0 || place.incarnation != node.incarnation) continue;
      const auto known = parties.find(place.party);
      PartyOrder& party =
          known != parties.end()
              ? known->second
              : (parties[place.party] = order_for(round, round.parties[place.party - 1], node_id));
      party.members.push_back({place.last->session, place.party_rank});
    }
    for (auto& [index, party] : parties) order.parties.push_back(std::move(party));
    if (!order.gathering) add_asides(round, node_id, node, order);
    orders.push_back(std::move(order));
  }
  return orders;
}

}  // namespace rekindle::coordinator
