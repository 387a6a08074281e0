#include "recovery/coordinator/core/round_place.h"

#include <algorithm>
#include <utility>

namespace rekindle::coordinator {

namespace {

bool has_version(const RoundMember& member, const ModelVersion& id) {
  return member.id == id &&
         (member.state == RoundMemberState::kServing || member.state == RoundMemberState::kReady);
}

std::string or_else(const std::string& why, const char* otherwise) {
  return why.empty() ? otherwise : why;
}

constexpr std::size_t kMaxCommunicatorsKept = 64;

}  // namespace

RoundPlace::RoundPlace(const std::string& its_node, const Incarnation& its_incarnation,
                       const RoundMember& member)
    : node_id(its_node),
      incarnation(its_incarnation),
      instance(member.instance),
      rank(member.rank),
      group(member.group),
      device(member.device) {}

std::string RoundPlace::to_string() const {
  if (nameless()) return fmt::format("the worker {} on {}", instance, node_id);
  return fmt::format("rank {} of {} on {}", rank, instance, node_id);
}

std::string_view RoundPlace::state_name() const {
  switch (state) {
    case PlaceState::kLeftOut:
      return "left out";
    case PlaceState::kFailed:
      return "failed";
    case PlaceState::kReady:
      return "ready";
    case PlaceState::kExpected:
    case PlaceState::kArrived:
      break;
  }
  if (!last) return "expected";
  switch (last->state) {
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

void RoundPlace::fail_with(std::string reason) {
  if (settled()) return;
  state = PlaceState::kFailed;
  why = std::move(reason);
}

bool RoundPlace::gather(const RoundMember* member, const std::string& life,
                        const ModelVersion& id) {
  last = member == nullptr ? std::nullopt : std::optional(*member);
  if (member != nullptr) {
    device = member->device;
    device_life = life;
  }
  if (state == PlaceState::kFailed) return false;
  const PlaceState now = member == nullptr          ? PlaceState::kExpected
                         : has_version(*member, id) ? PlaceState::kReady
                                                    : PlaceState::kArrived;
  return std::exchange(state, now) != now;
}

void RoundPlace::end_gathering(const ModelVersion& id, const Digest& root, Duration gathered) {
  if (state == PlaceState::kExpected) {
    state = PlaceState::kLeftOut;
    why = fmt::format("has not attached to {} in {} ms", id.to_string(), milliseconds(gathered));
  }
  if (settled()) return;
  if (last->state == RoundMemberState::kFailed || last->worker_lost) {
    fail_with(or_else(last->why, "its worker has gone"));
  } else if (last->state == RoundMemberState::kJoined && last->root != root) {
    fail_with(fmt::format("has {} with root {}, the round brings root {}", id.to_string(),
                          last->root.hex(), root.hex()));
    aside = why;
  }
}

bool RoundPlace::watch(const RoundMember* member, RoundId round) {
  if (!last || state == PlaceState::kLeftOut || gone) return false;
  if (member == nullptr || !is(*member) || member->id != last->id) {
    gone = true;
    fail_with(or_else(last->why, "its session has ended"));
    return true;
  }
  const bool changed = member->state != last->state || member->worker_lost != last->worker_lost;
  last = *member;
  if (last->state == RoundMemberState::kSpreading) {
    transfer = std::max(transfer, Transfer::kSpreading);
  } else if (last->state == RoundMemberState::kFilled || last->state == RoundMemberState::kReady) {
    transfer = Transfer::kFilled;
  }
  if (last->state == RoundMemberState::kFailed) {
    fail_with(or_else(last->why, "has failed"));
  } else if (last->worker_lost) {
    fail_with(or_else(last->why, "its worker has gone"));
  } else if (last->round != round) {
    fail_with("its agent has left the round");
  } else if (last->state == RoundMemberState::kReady && !settled()) {
    state = PlaceState::kReady;
  }
  return changed;
}

void RoundPlace::watch_device(RoundId round, bool same_device_process) {
  if (filled() || !trouble.empty()) return;
  const bool discards = last->worker_lost && transfer == Transfer::kSpreading;
  const bool failed = last->state == RoundMemberState::kFailed;
  if (!same_device_process) {
    trouble = "its device process has ended";
  } else if (last->state == RoundMemberState::kAlone || (failed && !discards)) {
    trouble = or_else(last->why, "it goes on alone");
  } else if (last->round != round && !discards) {
    trouble = "its agent has left the round";
  } else if (last->worker_lost && !discards) {
    trouble = or_else(last->why, "its worker has gone");
  } else if (gone && !discards) {
    trouble = "its session has ended";
  }
}

void RoundPlace::lose(const std::string& reason) {
  gone = true;
  fail_with(reason);
  if (!filled() && trouble.empty()) trouble = reason;
}

std::string device_of(const RoundPlace& place) {
  if (!place.device.starts_with("double:")) return place.device;
  return fmt::format("{} of {}", place.device, place.node_id);
}

std::pair<std::string, bool> Communicators::name_for(const std::vector<const RoundPlace*>& places,
                                                     std::uint64_t epoch) {
  std::vector<std::string> devices;
  for (const RoundPlace* place : places) {
    devices.push_back(fmt::format("{} {} {} {}", place->node_id, place->incarnation.hex(),
                                  place->device_life, place->device));
  }
  for (const auto& [name, met] : known_) {
    const auto keeps = [&kept = name](const RoundPlace* place) {
      return std::ranges::find(place->last->communicators, kept) !=
             place->last->communicators.end();
    };
    if (met == devices && std::ranges::all_of(places, keeps)) return {name, true};
  }
  std::string name = fmt::format("{}-{}", epoch, ++last_number_);
  known_.emplace_back(name, std::move(devices));
  if (known_.size() > kMaxCommunicatorsKept) known_.pop_front();
  return {std::move(name), false};
}

void Communicators::forget(const std::string& name) {
  std::erase_if(known_, [&](const auto& entry) { return entry.first == name; });
}

void Party::stop(std::string reason) {
  state = PartyState::kStopped;
  why = std::move(reason);
}

void Party::begin_spreading(const std::string& communicator_id, TimePoint now) {
  id = communicator_id;
  state = PartyState::kSpreading;
  last_progress = now;
}

void Party::judge(const std::vector<RoundPlace>& places, Duration meet, Duration spread,
                  TimePoint now) {
  if (!runs()) return;
  bool all_through = true;
  for (const std::size_t index : ranks) {
    const RoundPlace& place = places[index];
    if (place.filled()) continue;
    if (!place.trouble.empty()) {
      return stop(fmt::format("{}: {}", place.to_string(), place.trouble));
    }
    // A device that discards has finished when its report says so, or when its session is gone.
    const bool discarded =
        place.last && place.last->worker_lost && place.last->state == RoundMemberState::kFailed;
    all_through = all_through && (place.gone || discarded);
  }
  if (all_through && state == PartyState::kSpreading) {
    through = true;
  } else if (state == PartyState::kMeeting && now - began >= meet) {
    stop(fmt::format("{} made no communicator in {} ms", places[ranks.front()].to_string(),
                     milliseconds(meet)));
  } else if (state == PartyState::kSpreading && now - last_progress >= spread) {
    stop(fmt::format("no progress in {} ms", milliseconds(spread)));
  }
}

PartyOrder Party::order_for(const std::vector<RoundPlace>& places,
                            const std::string& node_id) const {
  PartyOrder order;
  order.party = number;
  order.state = state;
  order.make_id = state == PartyState::kMeeting && places[ranks.front()].node_id == node_id;
  order.communicator = communicator;
  order.id = id;
  order.bucket_bytes = bucket_bytes;
  order.ranks = static_cast<std::uint32_t>(ranks.size());
  order.owners = owners;
  order.owners_fetch = owners_fetch;
  order.why = why;
  return order;
}

}  // namespace rekindle::coordinator
