#include "recovery/coordinator/core/source_selection.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <set>
#include <tuple>
#include <utility>

#include "recovery/coordinator/core/part_holders.h"

namespace rekindle::coordinator {

namespace {

// A subset of the runs is still true, and a frame stays within its cap.
constexpr std::size_t kMaxRunsPerOffer = 65536;
constexpr std::uint64_t kMinRecopyRate = std::uint64_t{1} << 20;
// A holder of one of more parts than this serves no more pullers: each costs it a connection.
constexpr std::size_t kMaxPartsToShareLoad = 32;

// The order in which such nodes are offered, while no better node has the whole version. A puller
// with bad memory may quarantine a node that serves right bytes. Digests catch wrong bytes anyway,
// so one puller's report must not keep other pullers out.
enum class LastResort { kNo, kFlapping, kQuarantined, kDrained };

}  // namespace

struct SourceSelection::Candidate {
  const Member* member = nullptr;
  LastResort last_resort = LastResort::kNo;
  bool has_share = false;
  bool suspect = false;
  // It has all of a layout.
  bool complete = false;
  bool slow = false;
  bool same_host = false;
  std::size_t active = 0;
  // How many more pulls of this puller's party it takes.
  std::size_t left = 0;
  std::uint64_t rotation = 0;
  // It has a part that no candidate before it has, and no usable node has all parts.
  bool needed = false;

  auto rank() const {
    return std::tuple(!has_share, last_resort, suspect, slow, !same_host, active, rotation);
  }
  bool operator<(const Candidate& other) const { return rank() < other.rank(); }
};

struct SourceSelection::Candidates {
  std::vector<Candidate> usable;
  // Without a free share for this pull.
  std::vector<Candidate> busy;
};

// The limit protects hosts that serve. A puller that fills up gives as much as it takes: otherwise
// a growing fleet would share out too little of its joiners' bandwidth, and unevenly.
std::size_t SourceSelection::puller_limit(const Member& source, const ModelVersion& id) const {
  const Limits& limits = fleet_.limits;
  if (!source.holdings.holds_a_complete_layout(id)) {
    return std::max(limits.max_pullers_per_source, limits.max_sources_per_pull);
  }
  const DurableVersion* version = fleet_.catalog.find(id);
  if (version == nullptr || source.holdings.holds_whole(id, version->root) ||
      parts_of(source, id, *version).empty()) {
    // The pulls of a round read a share each, all of them together about one copy.
    return std::max(limits.max_pullers_per_source, rounds_.copies_that_share(id));
  }
  // Each puller reads from the holders of all parts, so it takes a fraction from each.
  return limits.max_pullers_per_source * std::min(version->parts.size(), kMaxPartsToShareLoad);
}

std::size_t SourceSelection::source_limit(const ModelVersion& id) const {
  const Limits& limits = fleet_.limits;
  const DurableVersion* version = fleet_.catalog.find(id);
  const std::size_t parts = version == nullptr ? 0 : version->parts.size();
  if (parts == 0) return limits.max_sources_per_pull;
  return std::max(parts,
                  std::min(parts + limits.max_sources_per_pull, limits.max_sources_with_parts));
}

// Nothing: the node holds none of it, or must not serve it to this puller.
std::optional<SourceSelection::Candidate> SourceSelection::consider(const Pull& pull,
                                                                    const Member& member,
                                                                    TimePoint now) const {
  const NodeInfo& node = member.info;
  if (member.is_dead() || node.incarnation == pull.puller.incarnation) return std::nullopt;
  const bool quarantined = member.standing.quarantined(now);
  // The puller itself has found it bad.
  if (member.standing.struck_by(pull.puller.incarnation, now)) return std::nullopt;
  if (std::ranges::none_of(member.holdings.of(pull.id),
                           [&](const auto& entry) { return entry.second.readable(pull.root); })) {
    return std::nullopt;
  }
  Candidate candidate;
  candidate.member = &member;
  candidate.active = pulls_.pullers_of(node.incarnation);
  candidate.left =
      pulls_.shares_left(node.incarnation, puller_limit(member, pull.id), pull.puller.party);
  candidate.complete = member.holdings.holds_a_complete_layout(pull.id);
  candidate.has_share = pull.has_share_of(node.incarnation);
  candidate.suspect = !member.alive(now);
  candidate.slow = member.standing.health.slow(now, pull.puller.responsible());
  candidate.same_host = !pull.puller.host_id.empty() && node.host_id == pull.puller.host_id;
  if (!candidate.has_share && fleet_.drained(node.node_id)) {
    candidate.last_resort = LastResort::kDrained;
  } else if (quarantined) {
    candidate.last_resort = LastResort::kQuarantined;
  } else if (member.standing.gives_nothing(pull.puller.party, now)) {
    candidate.last_resort = LastResort::kFlapping;
  } else if (!candidate.has_share && member.flapping.left_out(now)) {
    candidate.last_resort = LastResort::kFlapping;
  }
  return candidate;
}

SourceSelection::Candidates SourceSelection::candidates(const Pull& pull, TimePoint now) const {
  // A flapping or quarantined node is better than none. A drained one is read only to copy a
  // version elsewhere.
  LastResort allowed = replicas_.is_task(pull.id, pull.puller.incarnation)
                           ? LastResort::kDrained
                           : LastResort::kQuarantined;
  std::vector<Candidate> found;
  const auto& all = fleet_.members.all();
  const std::uint64_t members = std::max<std::uint64_t>(all.size(), 1);
  std::uint64_t position = 0;
  for (const auto& [node_id, member] : all) {
    if (auto candidate = consider(pull, member, now)) {
      candidate->rotation = (position + members - rotation_ % members) % members;
      if (member.holdings.holds_whole(pull.id, pull.root)) {
        allowed = std::min(allowed, candidate->last_resort);
      }
      found.push_back(*candidate);
    }
    ++position;
  }
  Candidates result;
  for (const Candidate& candidate : found) {
    if (candidate.last_resort > allowed) continue;
    const bool busy = !candidate.has_share && candidate.left == 0;
    (busy ? result.busy : result.usable).push_back(candidate);
  }
  return result;
}

// A pull of a joint publication without a whole copy needs a holder of each part. It gets all of
// them together or none: two pulls that had some of them each would wait for each other. For the
// same reason, a pull that has parts and has lost one gets another holder even if that one is busy.
void SourceSelection::gather_parts(const Pull& pull, Candidates& found) const {
  const DurableVersion* version = fleet_.catalog.find(pull.id);
  if (version == nullptr || version->parts.empty()) return;
  const auto parts_at = [&](const Candidate& candidate) {
    return parts_of(*candidate.member, pull.id, *version);
  };
  std::vector<Candidate>& usable = found.usable;
  if (std::ranges::any_of(usable, [&](const Candidate& candidate) {
        return candidate.member->holdings.holds_whole(pull.id, pull.root);
      })) {
    return;
  }
  std::set<Digest> covered;
  const auto need_new_parts = [&](Candidate& candidate) {
    for (const Digest& part : parts_at(candidate)) {
      if (covered.insert(part).second) candidate.needed = true;
    }
  };
  std::ranges::for_each(usable, need_new_parts);
  std::ranges::sort(found.busy, std::less());
  std::ranges::for_each(found.busy, need_new_parts);
  const bool waits = std::ranges::any_of(found.busy, &Candidate::needed);
  const bool has_parts = std::ranges::any_of(usable, [&](const Candidate& candidate) {
    return candidate.has_share && !parts_at(candidate).empty();
  });
  if (waits && !has_parts) {
    std::erase_if(usable, [&](const Candidate& candidate) { return !parts_at(candidate).empty(); });
  } else if (waits) {
    std::ranges::copy_if(found.busy, std::back_inserter(usable), &Candidate::needed);
  }
  std::ranges::stable_partition(usable, &Candidate::needed);
}

// A pull that reads from no complete source gets one first, even a flapping one: nodes that fill up
// may all lack the same tiles and would wait for each other for ever.
SourceSelection::Candidates SourceSelection::ranked(const Pull& pull, TimePoint now) const {
  Candidates result = candidates(pull, now);
  std::vector<Candidate>& usable = result.usable;
  std::ranges::sort(usable, std::less());
  gather_parts(pull, result);
  if (!usable.empty() && usable.front().needed) return result;
  const auto reads_from = [](const Candidate& candidate) {
    return candidate.has_share && candidate.complete;
  };
  if (std::ranges::any_of(usable, reads_from)) return result;
  const auto best = std::ranges::find_if(usable, &Candidate::complete);
  if (best != usable.end()) std::rotate(usable.begin(), best, best + 1);
  return result;
}

SourceSelection::Offers SourceSelection::offer(Pull& pull, std::size_t max_new, TimePoint now) {
  const Candidates found = ranked(pull, now);
  ++rotation_;
  Offers offers;
  const bool by_parts = !found.usable.empty() && found.usable.front().needed;
  const std::size_t max_sources =
      by_parts ? source_limit(pull.id) : fleet_.limits.max_sources_per_pull;
  // A pull that has parts gets the others even while other pulls wait.
  const auto has_part = [](const Candidate& candidate) {
    return candidate.needed && candidate.has_share;
  };
  const bool gets_parts = max_new > 0 || std::ranges::any_of(found.usable, has_part);
  std::size_t taken = 0;
  for (const Candidate& candidate : found.usable) {
    const Incarnation& source = candidate.member->info.incarnation;
    const bool needed = candidate.needed && gets_parts;
    if (!needed && offers.sources.size() >= max_sources) {
      pulls_.drop_share(pull, source);
      continue;
    }
    if (!needed && !candidate.has_share && taken == max_new) continue;
    if (!needed && !candidate.has_share) ++taken;
    for (const Holding* holding : layouts_to_offer(pull, candidate)) {
      if (!needed && offers.sources.size() >= max_sources) break;
      offers.sources.push_back(make_offer(pull, *candidate.member, *holding, now));
    }
    pulls_.take_share(pull, source);
  }
  offers.all_busy = offers.sources.empty() && (!found.busy.empty() || !found.usable.empty());
  cap_rates(pull, offers.sources);
  return offers;
}

// A whole copy makes the other layouts of its node needless. A node that is needed for its parts is
// read only for them.
std::vector<const Holding*> SourceSelection::layouts_to_offer(const Pull& pull,
                                                              const Candidate& candidate) const {
  const DurableVersion* version = fleet_.catalog.find(pull.id);
  std::vector<const Holding*> layouts;
  for (const auto& [key, holding] : candidate.member->holdings.of(pull.id)) {
    if (!holding.readable(pull.root)) continue;
    if (holding.whole && holding.counts()) return {&holding};
    if (candidate.needed && version != nullptr &&
        !(holding.counts() && std::ranges::binary_search(version->parts, holding.layout))) {
      continue;
    }
    layouts.push_back(&holding);
  }
  return layouts;
}

SourceOffer SourceSelection::make_offer(const Pull& pull, const Member& member,
                                        const Holding& holding, TimePoint now) {
  SourceOffer offer;
  offer.node = member.info;
  offer.layout = holding.layout;
  offer.complete = holding.complete;
  offer.payload_bytes = holding.payload_bytes;
  offer.proves_parts = holding.proves_parts;
  if (!holding.complete) {
    const std::size_t runs = std::min(holding.held.size(), kMaxRunsPerOffer);
    offer.held.assign(holding.held.begin(),
                      holding.held.begin() + static_cast<std::ptrdiff_t>(runs));
  }
  offer.grant.puller = pull.puller.incarnation;
  offer.grant.source = member.info.incarnation;
  offer.grant.root = pull.root;
  offer.grant.expiry_ms = clock_ms(now + fleet_.timing.grant_ttl);
  offer.grant.serial = next_serial_++;
  offer.grant.epoch = fleet_.epoch();
  return offer;
}

// A copy that the coordinator ordered must not disturb the pulls of others.
void SourceSelection::cap_rates(const Pull& pull, std::vector<SourceOffer>& offers) const {
  const std::uint64_t rate = fleet_.limits.recopy_bytes_per_second;
  if (offers.empty() || rate == 0 || !replicas_.is_task(pull.id, pull.puller.incarnation)) return;
  for (SourceOffer& offer : offers) {
    offer.grant.max_bytes_per_second = std::max(rate / offers.size(), kMinRecopyRate);
  }
}

std::size_t SourceSelection::free_shares(const Pull& pull, TimePoint now) const {
  std::size_t free = 0;
  std::optional<std::size_t> scarcest;
  for (const Candidate& candidate : ranked(pull, now).usable) {
    if (candidate.needed) scarcest = std::min(scarcest.value_or(candidate.left), candidate.left);
    free += candidate.left;
  }
  return scarcest.value_or(free);
}

}  // namespace rekindle::coordinator
