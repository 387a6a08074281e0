#include "recovery/coordinator/core/round_party.h"

#include <algorithm>

namespace rekindle::coordinator {

namespace {
constexpr std::size_t kMaxCommunicatorsKept = 64;
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
    // A device that discards is through when it says so, or when its session is gone.
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
  order.why = why;
  return order;
}

}  // namespace rekindle::coordinator
