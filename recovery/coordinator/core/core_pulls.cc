#include <algorithm>
#include <tuple>
#include <utility>

#include "recovery/coordinator/core/core.h"

// Pulls: resolving, choosing sources, shares, reports, leases.
namespace rekindle::coordinator {

namespace {

constexpr Duration kMinQueueHint = std::chrono::milliseconds(200);
constexpr Duration kMaxQueueHint = std::chrono::seconds(10);
constexpr Duration kDefaultQueueHint = std::chrono::seconds(1);
constexpr std::size_t kMaxRunsPerOffer = 65536;  // a subset is still true, a frame stays in its cap
constexpr std::size_t kMaxReports = 64;
constexpr std::uint32_t kMaxStrikeShift = 16;

}  // namespace

struct Core::Candidate {
  const Member* member = nullptr;
  bool has_share = false;
  bool suspect = false;
  bool same_host = false;
  std::size_t active = 0;
  std::uint64_t rotation = 0;
  bool operator<(const Candidate& other) const {
    return std::tuple(!has_share, suspect, !same_host, active, rotation) <
           std::tuple(!other.has_share, other.suspect, !other.same_host, other.active,
                      other.rotation);
  }
};

Failure Core::no_source(const std::string& what, const std::string& model, TimePoint now) const {
  if (in_grace(now)) {
    return fail(ErrorCode::kUnavailable,
                "{}: the coordinator has just started and agents are still reporting in; retry in "
                "{} ms",
                what, std::max<std::int64_t>(milliseconds(grace_until_ - now), 1));
  }
  return fail(ErrorCode::kNotFound, "{}: no live agent holds it; {}", what,
              catalog_.describe_versions(model, members_));
}

// Nobody was offered and nobody is busy: who holds it is kept away, or there is nobody.
Failure Core::nobody_usable(const ModelVersion& id, TimePoint now) const {
  std::string names;
  Duration longest{};
  for (const auto& [node_id, member] : members_.all()) {
    if (member.state == NodeState::kDead || member.quarantined_until <= now) continue;
    const auto it = member.holdings.lower_bound({id, {}});
    if (it == member.holdings.end() || it->first.id != id) continue;
    names += (names.empty() ? "" : ", ") + node_id;
    longest = std::max<Duration>(longest, member.quarantined_until - now);
  }
  if (names.empty()) return no_source(id.to_string(), id.model, now);
  return fail(ErrorCode::kUnavailable,
              "{}: all that hold it have served wrong bytes and are quarantined for {} ms: {}; "
              "run `rekindle verify` there, or retire and publish it again",
              id.to_string(), milliseconds(longest), names);
}

Result<ModelVersion> Core::resolve(const OpenPullRequest& request, TimePoint now) const {
  if (!request.version) {
    const auto newest = catalog_.newest_ready(request.model, members_);
    // A restart must not turn `latest` back: its holders may not have reported yet.
    const bool may_be_newer = in_grace(now) && newest != catalog_.newest_claimed(request.model);
    if (newest && !may_be_newer) return *newest;
    return no_source(request.model, request.model, now);
  }
  const ModelVersion id{request.model, *request.version};
  const DurableVersion* version = catalog_.find(id);
  if (version == nullptr) return no_source(id.to_string(), request.model, now);
  if (version->retiring) {
    return fail(ErrorCode::kNotFound, "{} is retired; {}", id.to_string(),
                catalog_.describe_versions(request.model, members_));
  }
  return id;
}

std::vector<Core::Candidate> Core::candidates(const Pull& pull, TimePoint now,
                                              bool& all_busy) const {
  std::vector<Candidate> usable;
  bool any_busy = false;
  const std::uint64_t members = std::max<std::uint64_t>(members_.all().size(), 1);
  std::uint64_t index = 0;
  for (const auto& [node_id, member] : members_.all()) {
    const std::uint64_t position = index++;
    if (member.state == NodeState::kDead || member.info.incarnation == pull.puller.incarnation ||
        member.quarantined_until > now) {
      continue;
    }
    auto it = member.holdings.lower_bound({pull.id, {}});
    while (it != member.holdings.end() && it->first.id == pull.id && it->second.root != pull.root) {
      ++it;
    }
    if (it == member.holdings.end() || it->first.id != pull.id) continue;
    const auto share = shares_.find(member.info.incarnation);
    Candidate candidate;
    candidate.member = &member;
    candidate.active = share == shares_.end() ? 0 : share->second;
    candidate.has_share =
        std::binary_search(pull.sources.begin(), pull.sources.end(), member.info.incarnation);
    if (!candidate.has_share && candidate.active >= limits_.max_pullers_per_source) {
      any_busy = true;
      continue;
    }
    candidate.suspect =
        member.state == NodeState::kSuspect || member.connection.empty() || member.lost_until > now;
    candidate.same_host =
        !pull.puller.host_id.empty() && member.info.host_id == pull.puller.host_id;
    candidate.rotation = (position + members - rotation_ % members) % members;
    usable.push_back(candidate);
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
  offer.grant = {pull.puller.incarnation, member.info.incarnation, pull.root,
                 clock_ms(now + timing_.grant_ttl), next_serial_++};
  return offer;
}

std::vector<SourceOffer> Core::offer_sources(Pull& pull, TimePoint now, bool& all_busy) {
  std::vector<Candidate> usable = candidates(pull, now, all_busy);
  std::sort(usable.begin(), usable.end());
  ++rotation_;
  std::vector<SourceOffer> offers;
  for (const Candidate& candidate : usable) {
    if (offers.size() >= limits_.max_sources_per_pull) break;
    const auto& holdings = candidate.member->holdings;
    const auto begin = holdings.lower_bound({pull.id, {}});
    const Holding* whole = nullptr;
    for (auto it = begin; it != holdings.end() && it->first.id == pull.id; ++it) {
      const Holding& holding = it->second;
      if (holding.root == pull.root && holding.whole && holding.complete) whole = &holding;
    }
    for (auto it = begin; it != holdings.end() && it->first.id == pull.id; ++it) {
      if (it->second.root != pull.root || (whole != nullptr && whole != &it->second)) continue;
      if (offers.size() >= limits_.max_sources_per_pull) break;
      offers.push_back(make_offer(pull, *candidate.member, it->second, now));
    }
    take_share(pull, candidate.member->info.incarnation);
  }
  return offers;
}

void Core::take_share(Pull& pull, const Incarnation& source) {
  const auto place = std::lower_bound(pull.sources.begin(), pull.sources.end(), source);
  if (place != pull.sources.end() && *place == source) return;
  pull.sources.insert(place, source);
  ++shares_[source];
}

void Core::drop_shares(Pull& pull) {
  for (const Incarnation& source : pull.sources) {
    const auto share = shares_.find(source);
    if (share != shares_.end() && --share->second == 0) shares_.erase(share);
  }
  pull.sources.clear();
}

// How long until a share may be free: the pull that will end first, by its own rate.
Duration Core::queue_hint(TimePoint) const {
  Duration shortest = kMaxQueueHint;
  bool known = false;
  for (const auto& [id, pull] : pulls_) {
    if (pull.bytes_per_second <= 0 || pull.bytes_total <= pull.bytes_done) continue;
    const double left = static_cast<double>(pull.bytes_total - pull.bytes_done);
    const double seconds_left = left / pull.bytes_per_second;
    known = true;
    if (seconds_left >= seconds(shortest)) continue;
    shortest = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds_left));
  }
  return std::max(known ? shortest : kDefaultQueueHint, kMinQueueHint);
}

// The same process asking for the same thing again (its answer was lost) replaces its pull.
void Core::drop_pulls_like(const OpenPullRequest& request, const ModelVersion& id) {
  for (auto it = pulls_.begin(); it != pulls_.end();) {
    Pull& pull = it->second;
    if (pull.puller.incarnation == request.puller.incarnation && pull.id == id &&
        pull.shard == request.shard) {
      drop_shares(pull);
      it = pulls_.erase(it);
    } else {
      ++it;
    }
  }
}

Result<OpenedPull> Core::open_pull(const OpenPullRequest& request, TimePoint now) {
  tick(now);
  TRY(const ModelVersion id, resolve(request, now));
  drop_pulls_like(request, id);
  if (pulls_.size() >= limits_.max_pulls) {
    return fail(ErrorCode::kExhausted, "the coordinator has its {} open pulls; retry later",
                limits_.max_pulls);
  }
  const DurableVersion& version = *catalog_.find(id);
  Pull pull;
  pull.puller = request.puller;
  pull.id = id;
  pull.root = version.root;
  pull.shard = request.shard;
  pull.opened = pull.last_progress = now;
  bool all_busy = false;
  OpenedPull opened;
  opened.id = id;
  opened.version = version;
  opened.epoch = epoch();
  opened.lease = timing_.pull_lease;
  opened.sources = offer_sources(pull, now, all_busy);
  if (opened.sources.empty()) {
    if (!all_busy) return nobody_usable(id, now);
    opened.retry_after = queue_hint(now);
    return opened;
  }
  opened.pull_id = new_pull_id_();
  pulls_.emplace(opened.pull_id, std::move(pull));
  return opened;
}

void Core::take_reports(Pull& pull, const std::vector<SourceReport>& reports, TimePoint now) {
  for (const SourceReport& report : reports) {
    const auto before =
        std::find_if(pull.reports.begin(), pull.reports.end(), [&](const SourceReport& earlier) {
          return earlier.incarnation == report.incarnation && earlier.node_id == report.node_id;
        });
    const bool known = before != pull.reports.end();
    Member* member = members_.find(report.node_id, report.incarnation);
    // Reports repeat what was said before: each strike counts once per pull.
    if (member != nullptr && report.lost && !(known && before->lost)) {
      member->lost_until = now + timing_.lost_report;
    }
    if (member != nullptr && report.quarantine && !(known && before->quarantine)) {
      const Duration backoff =
          timing_.quarantine_first * (1L << std::min(member->strikes, kMaxStrikeShift));
      ++member->strikes;
      member->quarantined_until =
          std::max(member->quarantined_until, now + std::min(backoff, timing_.quarantine_max));
    }
    if (known) {
      const bool quarantine = before->quarantine || report.quarantine;
      *before = report;
      before->quarantine = quarantine;
    } else if (pull.reports.size() < kMaxReports) {
      pull.reports.push_back(report);
    }
  }
}

// After a restart the coordinator knows no pulls; their progress brings them back.
Result<Pull*> Core::find_or_adopt(const PullProgress& progress, TimePoint now) {
  const auto found = pulls_.find(progress.pull_id);
  if (found != pulls_.end()) {
    if (found->second.puller.incarnation != progress.puller.incarnation) {
      return fail(ErrorCode::kDenied, "the pull belongs to another puller");
    }
    return &found->second;
  }
  if (progress.pull_id.is_nil()) return fail(ErrorCode::kInvalid, "progress without a pull id");
  const DurableVersion* version = catalog_.find(progress.id);
  if (version == nullptr) return no_source(progress.id.to_string(), progress.id.model, now);
  if (pulls_.size() >= limits_.max_pulls) {
    return fail(ErrorCode::kExhausted, "the coordinator has its {} open pulls", limits_.max_pulls);
  }
  Pull pull;
  pull.puller = progress.puller;
  pull.id = progress.id;
  pull.root = version->root;
  pull.opened = pull.last_progress = now;
  pull.bytes_done = progress.bytes_done;
  return &pulls_.emplace(progress.pull_id, std::move(pull)).first->second;
}

Result<PullProgressAnswer> Core::pull_progress(const PullProgress& progress, TimePoint now) {
  tick(now);
  TRY(Pull * pull, find_or_adopt(progress, now));
  if (const double elapsed = seconds(now - pull->last_progress);
      elapsed > 0 && progress.bytes_done >= pull->bytes_done) {
    pull->bytes_per_second = static_cast<double>(progress.bytes_done - pull->bytes_done) / elapsed;
  }
  pull->bytes_done = progress.bytes_done;
  pull->bytes_total = progress.bytes_total;
  pull->last_progress = now;
  take_reports(*pull, progress.sources, now);
  // Shares of sources that died or fell out are given back; the ones in use are kept first.
  bool all_busy = false;
  PullProgressAnswer answer;
  answer.sources = offer_sources(*pull, now, all_busy);
  Pull kept;
  for (const SourceOffer& offer : answer.sources) take_share(kept, offer.node.incarnation);
  drop_shares(*pull);
  pull->sources = std::move(kept.sources);
  answer.grace = in_grace(now);
  return answer;
}

void Core::close_pull(const PullId& pull_id, TimePoint now) {
  tick(now);
  const auto found = pulls_.find(pull_id);
  if (found == pulls_.end()) return;
  drop_shares(found->second);
  pulls_.erase(found);
}

void Core::expire_pulls(TimePoint now) {
  for (auto it = pulls_.begin(); it != pulls_.end();) {
    if (now - it->second.last_progress >= timing_.pull_lease) {
      drop_shares(it->second);
      it = pulls_.erase(it);
    } else {
      ++it;
    }
  }
}

}  // namespace rekindle::coordinator
