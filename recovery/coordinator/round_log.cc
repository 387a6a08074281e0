#include "recovery/coordinator/round_log.h"

#include <algorithm>

#include "src/base/log.h"

namespace rekindle::coordinator {

namespace {

bool by_broadcast(const RoundPlace& place) {
  return place.ready() && place.last && place.last->payload_bytes > 0 &&
         place.last->spread_bytes >= place.last->payload_bytes;
}

}  // namespace

void RoundLog::look(const Rounds& rounds) {
  for (const auto& [number, round] : rounds.all()) {
    const auto [entry, fresh] = said_.try_emplace(number);
    if (fresh) {
      log::info("round.begun", "round", number, "version", round.id().to_string(), "group",
                round.group().empty() ? "*" : round.group(), "members", round.places().size());
    }
    look(round, entry->second);
  }
  std::erase_if(said_, [&](const auto& entry) { return rounds.find(entry.first) == nullptr; });
}

void RoundLog::look(const Round& round, Said& said) {
  for (; said.parties < round.parties().size(); ++said.parties) {
    const Party& party = round.parties()[said.parties];
    const RoundPlace& first = round.places()[party.ranks.front()];
    log::info("round.party", "round", round.number(), "party", party.number, "members",
              party.ranks.size(), "owners", party.owners.size(), "bytes",
              first.last ? first.last->payload_bytes : 0, "bucket", party.bucket_bytes,
              "communicator", party.communicator, "reused", party.reuses);
  }
  for (const Party& party : round.parties()) {
    if (party.state != PartyState::kStopped || !said.stopped.insert(party.number).second) continue;
    log::warn("round.stopped", "round", round.number(), "party", party.number, "why", party.why);
  }
  if (!round.over() || said.over) return;
  said.over = true;
  Duration elapsed{};
  for (const auto& [phase, duration] : round.took()) elapsed += duration;
  log::info("round.over", "round", round.number(), "version", round.id().to_string(), "ready",
            std::ranges::count_if(round.places(), &RoundPlace::ready), "members",
            round.places().size(), "by_broadcast",
            std::ranges::count_if(round.places(), by_broadcast), "ms", milliseconds(elapsed));
}

}  // namespace rekindle::coordinator
