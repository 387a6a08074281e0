#include <algorithm>
#include <functional>
#include <tuple>
#include <utility>

#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/core/seeded_bugs.h"

// Who reads from whom: the order of sources, their shares, who waits.
namespace rekindle::coordinator {

namespace {

constexpr Duration kMinQueueHint = std::chrono::milliseconds(200);
constexpr Duration kFirstPieces = std::chrono::seconds(2);  // after which a puller serves
constexpr Duration kMaxQueueHint = std::chrono::seconds(10);
constexpr Duration kDefaultQueueHint = std::chrono::seconds(1);
constexpr Duration kWaitSlack = std::chrono::seconds(2);  // to ask again in
constexpr std::size_t kMaxRunsPerOffer = 65536;  // a subset is still true, a frame stays in its cap
constexpr std::uint64_t kMinRecopyRate = std::uint64_t{1} << 20;

// What a source is taken for only when there is nobody better. One quarantined by a puller whose
// own memory is bad serves right bytes: digests tell, and nobody may be locked out by another's
// word.
enum class LastResort { kNo, kFlapping, kQuarantined, kDrained };

bool holds_all_of_a_layout(const Member& member, const ModelVersion& id) {
  for (auto it = member.holdings.lower_bound({id, {}});
       it != member.holdings.end() && it->first.id == id; ++it) {
    if (it->second.counts()) return true;
  }
  return false;
}

// Of this root, and read by nobody before it is verified: what is being filled is verified tile by
// tile.
bool is_readable(const Holding& holding, const Digest& root) {
  return holding.root == root && (!holding.complete || holding.verified);
}

}  // namespace

struct Core::Candidate {
  const Member* member = nullptr;
  LastResort last_resort = LastResort::kNo;
  bool has_share = false;
  bool suspect = false;
  bool complete = false;  // it has all of a layout
  bool slow = false;
  bool same_host = false;
  std::size_t active = 0;
  std::size_t limit = 0;  // of `active`, for new ones
  std::uint64_t rotation = 0;
  bool full() const { return active >= limit; }
  bool operator<(const Candidate& other) const {
    return std::tuple(!has_share, last_resort, suspect, slow, !same_host, active, rotation) <
           std::tuple(!other.has_share, other.last_resort, other.suspect, other.slow,
                      !other.same_host, other.active, other.rotation);
  }
};

// The limit protects hosts that serve. Who fills up itself gives as much as it takes: a fleet that
// grows would otherwise share out too little of what its joiners can send, and unevenly.
std::size_t Core::puller_limit(const Member& source, const ModelVersion& id) const {
  if (holds_all_of_a_layout(source, id)) return limits_.max_pullers_per_source;
  return std::max(limits_.max_pullers_per_source, limits_.max_sources_per_pull);
}

// Nothing: it holds none of it, or must not serve it.
std::optional<Core::Candidate> Core::consider(const Pull& pull, const Member& member,
                                              TimePoint now) const {
  const bool dead = member.state == NodeState::kDead && !seeded(SeededBug::kDeadOffered);
  if (dead || member.info.incarnation == pull.puller.incarnation) return std::nullopt;
  const bool quarantined = member.quarantined_until > now;
  // Who has found it bad itself does not get it again so soon.
  if (quarantined && member.struck_by.contains(pull.puller.incarnation)) return std::nullopt;
  auto it = member.holdings.lower_bound({pull.id, {}});
  while (it != member.holdings.end() && it->first.id == pull.id &&
         !is_readable(it->second, pull.root)) {
    ++it;
  }
  if (it == member.holdings.end() || it->first.id != pull.id) return std::nullopt;
  Candidate candidate;
  candidate.member = &member;
  candidate.active = pullers_of(member.info.incarnation);
  candidate.limit = puller_limit(member, pull.id);
  candidate.complete = holds_all_of_a_layout(member, pull.id);
  candidate.has_share =
      std::binary_search(pull.sources.begin(), pull.sources.end(), member.info.incarnation);
  candidate.suspect =
      !(member.state == NodeState::kAlive && !member.connection.empty()) || member.lost_until > now;
  candidate.slow = member.health.slow(now);
  candidate.same_host = !pull.puller.host_id.empty() && member.info.host_id == pull.puller.host_id;
  if (!candidate.has_share && catalog_.drained(member.info.node_id) &&
      !seeded(SeededBug::kDrainedOffered)) {
    candidate.last_resort = LastResort::kDrained;
  } else if (quarantined) {
    candidate.last_resort = LastResort::kQuarantined;
  } else if (!candidate.has_share && member.flapping.left_out_until > now) {
    candidate.last_resort = LastResort::kFlapping;
  }
  return candidate;
}

std::vector<Core::Candidate> Core::candidates(const Pull& pull, TimePoint now,
                                              bool& all_busy) const {
  std::vector<Candidate> usable;
  bool any_busy = false;
  // Who flaps or is quarantined is better than nobody; who is drained is read only to copy what is
  // nowhere else.
  LastResort allowed = replicas_.is_task(pull.id, pull.puller.incarnation)
                           ? LastResort::kDrained
                           : LastResort::kQuarantined;
  std::vector<Candidate> found;
  const std::uint64_t members = std::max<std::uint64_t>(members_.all().size(), 1);
  std::uint64_t position = 0;
  for (const auto& [node_id, member] : members_.all()) {
    auto candidate = consider(pull, member, now);
    if (candidate) {
      candidate->rotation = (position + members - rotation_ % members) % members;
      const bool suffices = holds_whole(member, pull.id, pull.root);
      if (suffices) allowed = std::min(allowed, candidate->last_resort);
      found.push_back(*candidate);
    }
    ++position;
  }
  for (const Candidate& candidate : found) {
    if (candidate.last_resort > allowed) continue;
    if (!candidate.has_share && candidate.full()) {
      any_busy = true;
    } else {
      usable.push_back(candidate);
    }
  }
  all_busy = usable.empty() && any_busy;
  return usable;
}

SourceOffer Core::make_offer(const Pull& pull, const Member& member, const Holding& holding,
                             TimePoint now) {
  SourceOffer offer;
  offer.node = member.info;
  offer.layout = holding.layout;
  offer.complete = holding.complete;
  offer.payload_bytes = holding.payload_bytes;
  if (!holding.complete) {
    const std::size_t runs = std::min(holding.held.size(), kMaxRunsPerOffer);
    offer.held.assign(holding.held.begin(),
                      holding.held.begin() + static_cast<std::ptrdiff_t>(runs));
  }
  offer.grant = {pull.puller.incarnation,
                 member.info.incarnation,
                 pull.root,
                 clock_ms(now + timing_.grant_ttl),
                 next_serial_++,
                 epoch(),
                 0};
  return offer;
}

// Best first. A pull that reads from nobody who is complete gets one such, be it one that flaps:
// those that fill up may all lack the same tiles, and would wait for each other for ever.
std::vector<Core::Candidate> Core::ranked(const Pull& pull, TimePoint now, bool& all_busy) const {
  std::vector<Candidate> usable = candidates(pull, now, all_busy);
  std::ranges::sort(usable, std::less());
  const auto reads_from = [](const Candidate& candidate) {
    return candidate.has_share && candidate.complete;
  };
  if (std::ranges::any_of(usable, reads_from)) return usable;
  const auto best = std::ranges::find_if(usable, &Candidate::complete);
  if (best != usable.end()) std::rotate(usable.begin(), best, best + 1);
  return usable;
}

std::vector<SourceOffer> Core::offer_sources(Pull& pull, TimePoint now, std::size_t max_new,
                                             bool& all_busy) {
  const std::vector<Candidate> usable = ranked(pull, now, all_busy);
  ++rotation_;
  std::vector<SourceOffer> offers;
  std::size_t taken = 0;
  for (const Candidate& candidate : usable) {
    if (offers.size() >= limits_.max_sources_per_pull) {
      drop_share(pull, candidate.member->info.incarnation);
      continue;
    }
    if (!candidate.has_share && taken == max_new) continue;
    if (!candidate.has_share) ++taken;
    const auto& holdings = candidate.member->holdings;
    const auto begin = holdings.lower_bound({pull.id, {}});
    const Holding* whole = nullptr;
    for (auto it = begin; it != holdings.end() && it->first.id == pull.id; ++it) {
      const Holding& holding = it->second;
      if (holding.root == pull.root && holding.whole && holding.counts()) whole = &holding;
    }
    for (auto it = begin; it != holdings.end() && it->first.id == pull.id; ++it) {
      if (!is_readable(it->second, pull.root)) continue;
      if (whole != nullptr && whole != &it->second) continue;
      if (offers.size() >= limits_.max_sources_per_pull) break;
      offers.push_back(make_offer(pull, *candidate.member, it->second, now));
    }
    take_share(pull, candidate.member->info.incarnation);
  }
  all_busy = all_busy || (offers.empty() && !usable.empty());
  if (!offers.empty() && replicas_.is_task(pull.id, pull.puller.incarnation) &&
      limits_.recopy_bytes_per_second > 0) {
    const std::uint64_t each = limits_.recopy_bytes_per_second / offers.size();
    for (SourceOffer& offer : offers) {
      offer.grant.max_bytes_per_second = std::max(each, kMinRecopyRate);
    }
  }
  return offers;
}

// Those that wait come first, the longest before the others; what is left is shared evenly.
std::size_t Core::fair_count(const Pull& pull, bool runs, TimePoint now) const {
  std::size_t ahead = 0;
  std::size_t behind = 0;
  bool seen = false;
  for (const Waiting& waiting : waiting_) {
    if (waiting.id != pull.id) continue;
    if (waiting.puller == pull.puller.incarnation && waiting.shard == pull.shard) {
      seen = true;
    } else {
      ++(seen ? behind : ahead);
    }
  }
  if (ahead + behind == 0) return limits_.max_sources_per_pull;
  // A pull that runs takes no more while others have nothing; one that lost all may go on.
  if (runs) return pull.sources.empty() ? 1 : 0;
  bool ignored = false;
  std::size_t free = 0;
  for (const Candidate& candidate : candidates(pull, now, ignored)) {
    if (!candidate.full()) free += candidate.limit - candidate.active;
  }
  if (free <= ahead) return 0;
  return std::max<std::size_t>((free - ahead) / (behind + 1), 1);
}

void Core::wait(const Pull& pull, Duration retry_after, TimePoint now) {
  const TimePoint expires = now + retry_after + kWaitSlack;
  for (Waiting& waiting : waiting_) {
    if (waiting.puller == pull.puller.incarnation && waiting.id == pull.id &&
        waiting.shard == pull.shard) {
      waiting.expires = expires;
      return;
    }
  }
  if (waiting_.size() >= limits_.max_waiting) return;  // it waits without a place
  waiting_.push_back({pull.puller.incarnation, pull.id, pull.shard, expires});
}

void Core::stop_waiting(const Incarnation& puller, const ModelVersion& id,
                        const std::string& shard) {
  std::erase_if(waiting_, [&](const Waiting& waiting) {
    return waiting.puller == puller && waiting.id == id && waiting.shard == shard;
  });
}

void Core::take_share(Pull& pull, const Incarnation& source) {
  const auto place = std::lower_bound(pull.sources.begin(), pull.sources.end(), source);
  if (place != pull.sources.end() && *place == source) return;
  pull.sources.insert(place, source);
  ++shares_[source];
}

void Core::drop_share(Pull& pull, const Incarnation& source) {
  if (std::erase(pull.sources, source) == 0) return;
  const auto share = shares_.find(source);
  if (share != shares_.end() && --share->second == 0) shares_.erase(share);
}

void Core::drop_shares(Pull& pull) {
  while (!pull.sources.empty()) drop_share(pull, Incarnation(pull.sources.back()));
}

// How long until a share may be free: the pull that will end first, by its own rate; much sooner
// where somebody has begun to pull the same, who will have something to give in a moment.
Duration Core::queue_hint(const ModelVersion& id, TimePoint now) const {
  Duration shortest = kMaxQueueHint;
  bool known = false;
  for (const auto& [pull_id, pull] : pulls_) {
    if (pull.id == id && now - pull.opened < kFirstPieces) return kMinQueueHint;
    if (pull.bytes_per_second <= 0 || pull.bytes_total <= pull.bytes_done) continue;
    const double left = static_cast<double>(pull.bytes_total - pull.bytes_done);
    const double seconds_left = left / pull.bytes_per_second;
    known = true;
    if (seconds_left >= seconds(shortest)) continue;
    shortest = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds_left));
  }
  return std::max(known ? shortest : kDefaultQueueHint, kMinQueueHint);
}

}  // namespace rekindle::coordinator
