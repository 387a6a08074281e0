#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/ranges.h>

#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/core/seeded_bugs.h"

// Pulls: resolving, reports, leases.
namespace rekindle::coordinator {

namespace {

constexpr std::size_t kMaxReports = 64;
constexpr std::size_t kMaxStruckBy = 64;
constexpr std::uint32_t kMaxStrikeShift = 16;
constexpr Duration kExpireEvery = std::chrono::milliseconds(100);
constexpr Duration kForgetClosed = std::chrono::seconds(60);

}  // namespace

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

std::vector<std::string> Core::yet_to_verify(const OpenPullRequest& request) const {
  auto version = request.version;
  if (!version) {
    if (const auto newest = catalog_.latest(request.model)) version = newest->version;
  }
  const auto waits_for = [&](const ModelVersion& id, const Holding& holding) {
    if (id.model != request.model || (version && id.version != *version)) return false;
    if (!holding.complete || holding.verified || catalog_.is_retired(id)) return false;
    const DurableVersion* const known = catalog_.find(id);
    return known == nullptr || holding.root == known->root;
  };
  std::vector<std::string> names;
  for (const auto& [node_id, member] : members_.all()) {
    if (member.state == NodeState::kDead) continue;
    if (member.info.incarnation == request.puller.incarnation) continue;
    if (std::ranges::any_of(member.holdings, [&](const auto& held) {
          return waits_for(held.first.id, held.second);
        })) {
      names.push_back(node_id);
    }
  }
  return names;
}

std::optional<Error> Core::yet_to_verify(const ModelVersion& id, const Incarnation& puller) const {
  OpenPullRequest request;
  request.puller.incarnation = puller;
  request.model = id.model;
  request.version = id.version;
  const auto names = yet_to_verify(request);
  if (names.empty()) return std::nullopt;
  return Error(ErrorCode::kUnavailable,
               fmt::format("{}: its holder has yet to verify it: {}; retry in a while",
                           id.to_string(), fmt::join(names, ", ")));
}

bool Core::holds_all_itself(const ModelVersion& id, const Digest& root,
                            const Incarnation& puller) const {
  for (const auto& [node_id, member] : members_.all()) {
    if (member.info.incarnation != puller) continue;
    return std::ranges::any_of(member.holdings, [&](const auto& held) {
      const Holding& holding = held.second;
      return held.first.id == id && holding.root == root && holding.whole && holding.complete &&
             holding.verified;
    });
  }
  return false;
}

// Nobody was offered and nobody is busy: who holds it is kept away, or there is nobody.
Failure Core::nobody_usable(const ModelVersion& id, const Incarnation& puller,
                            TimePoint now) const {
  if (auto unverified = yet_to_verify(id, puller)) return fail(*std::move(unverified));
  std::string names;
  std::string drained;
  Duration longest{};
  for (const auto& [node_id, member] : members_.all()) {
    if (member.state == NodeState::kDead) continue;
    const auto it = member.holdings.lower_bound({id, {}});
    if (it == member.holdings.end() || it->first.id != id) continue;
    if (member.quarantined_until <= now) {
      if (catalog_.drained(node_id)) drained += (drained.empty() ? "" : ", ") + node_id;
      continue;
    }
    names += (names.empty() ? "" : ", ") + node_id;
    longest = std::max<Duration>(longest, member.quarantined_until - now);
  }
  if (!drained.empty()) {
    return fail(
        ErrorCode::kUnavailable,
        "{}: only drained nodes hold it: {}; end that with `rekindle drain NODE --undo`, or "
        "keep more copies (`rekindle publish --replicas`)",
        id.to_string(), drained);
  }
  if (names.empty()) return no_source(id.to_string(), id.model, now);
  return fail(ErrorCode::kUnavailable,
              "{}: all that hold it have served wrong bytes and are quarantined for {} ms: {}; "
              "run `rekindle verify` there, or retire and publish it again",
              id.to_string(), milliseconds(longest), names);
}

Result<ModelVersion> Core::resolve(const OpenPullRequest& request, TimePoint now) const {
  if (!request.version) {
    // What has been READY is durable: neither a restart nor the silence of its holders turns
    // `latest` back.
    const auto newest = seeded(SeededBug::kLatestGoesBack)
                            ? catalog_.newest_ready(request.model, members_)
                            : catalog_.latest(request.model);
    if (!newest) return no_source(request.model, request.model, now);
    if (catalog_.state_of(*newest, members_) == VersionState::kReady) return *newest;
    return fail(ErrorCode::kUnavailable,
                "{} is the newest version of {}, and the nodes that hold it are not heard of (or "
                "have yet to verify it) now; retry, start one of them, or retire it to go back to "
                "an older version",
                newest->to_string(), request.model);
  }
  const ModelVersion id{request.model, *request.version};
  if (catalog_.is_retired(id)) {
    return fail(ErrorCode::kNotFound, "{} is retired; {}", id.to_string(),
                catalog_.describe_versions(request.model, members_));
  }
  if (catalog_.find(id) == nullptr) {
    // An unverified copy does not vouch for its version: that comes with its verification.
    if (auto unverified = yet_to_verify(id, request.puller.incarnation)) {
      return fail(*std::move(unverified));
    }
    return no_source(id.to_string(), request.model, now);
  }
  return id;
}

Result<ModelVersion> Core::latest(const std::string& model, TimePoint now) {
  tick(now);
  return resolve({{}, model, std::nullopt, ""}, now);
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
  opened.sources = offer_sources(pull, now, fair_count(pull, /*runs=*/false, now), all_busy);
  if (opened.sources.empty()) {
    if (!all_busy) {
      if (holds_all_itself(id, version.root, request.puller.incarnation)) return opened;
      return nobody_usable(id, request.puller.incarnation, now);
    }
    opened.retry_after = queue_hint(id, now);
    wait(pull, opened.retry_after, now);
    return opened;
  }
  stop_waiting(pull.puller.incarnation, id, pull.shard);
  opened.pull_id = new_pull_id_();
  pulls_.emplace(opened.pull_id, std::move(pull));
  return opened;
}

void Core::judge_sources(const Pull& pull, const std::vector<SourceReport>& reports,
                         TimePoint now) {
  std::vector<std::pair<Member*, double>> rates;
  for (const SourceReport& report : reports) {
    Member* member = members_.find(report.node_id, report.incarnation);
    if (member == nullptr) continue;
    const auto before = std::ranges::find_if(pull.reports, [&](const SourceReport& earlier) {
      return earlier.incarnation == report.incarnation;
    });
    const bool known = before != pull.reports.end();
    if (report.failures > (known ? before->failures : 0)) member->health.observe(0, now);
    if (report.bytes <= (known ? before->bytes : 0)) continue;
    if (!report.lost) member->last_vouched = now;
    const double rate = report.goodput_bytes_per_second;
    if (!std::isfinite(rate) || rate <= 0) continue;
    // One that serves many gives each of them less: that is no fault of its own.
    const auto pullers = std::max<std::size_t>(pullers_of(report.incarnation), 1);
    rates.emplace_back(member, rate * static_cast<double>(pullers));
  }
  if (rates.size() < 2) return;
  const auto middle = rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2);
  std::ranges::nth_element(rates, middle, {}, &std::pair<Member*, double>::second);
  const double median = middle->second;
  for (const auto& [member, rate] : rates) member->health.observe(rate / median, now);
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
      if (member->quarantined_until <= now) member->struck_by.clear();
      if (member->struck_by.size() < kMaxStruckBy) {
        member->struck_by.insert(pull.puller.incarnation);
      }
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

// What it says that it reads from it may go on reading from.
void Core::keep_shares(Pull& pull, const std::vector<SourceReport>& reports) {
  for (const SourceReport& report : reports) {
    const Member* member = members_.find(report.node_id, report.incarnation);
    if (member == nullptr || member->state == NodeState::kDead || report.lost) continue;
    if (pullers_of(report.incarnation) >= puller_limit(*member, pull.id)) continue;
    if (pull.sources.size() < limits_.max_sources_per_pull) take_share(pull, report.incarnation);
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
  const auto closed = closed_.find(progress.pull_id);
  if (closed != closed_.end() && closed->second.by == progress.puller.incarnation) {
    return fail(ErrorCode::kStale, "{}: the pull has been closed", progress.id.to_string());
  }
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
  keep_shares(pull, progress.sources);
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
  judge_sources(*pull, progress.sources, now);
  take_reports(*pull, progress.sources, now);
  replicas_.progressed(pull->id, pull->puller.incarnation, progress.bytes_done, now);
  // Shares of sources that died or fell out are given back; the ones in use are kept first.
  bool all_busy = false;
  PullProgressAnswer answer;
  answer.sources = offer_sources(*pull, now, fair_count(*pull, /*runs=*/true, now), all_busy);
  Pull kept;
  for (const SourceOffer& offer : answer.sources) take_share(kept, offer.node.incarnation);
  drop_shares(*pull);
  pull->sources = std::move(kept.sources);
  answer.grace = in_grace(now);
  return answer;
}

Result<void> Core::close_pull(const PullId& pull_id, const Incarnation& puller, TimePoint now) {
  tick(now);
  const auto found = pulls_.find(pull_id);
  if (found != pulls_.end() && found->second.puller.incarnation != puller) {
    return fail(ErrorCode::kDenied, "the pull belongs to another puller");
  }
  if (closed_.size() < limits_.max_pulls) closed_[pull_id] = {now, puller};
  if (found == pulls_.end()) return {};
  if (!seeded(SeededBug::kShareLeakedAtClose)) drop_shares(found->second);
  pulls_.erase(found);
  return {};
}

void Core::expire_pulls(TimePoint now) {
  if (now < next_expiry_) return;
  next_expiry_ = now + kExpireEvery;
  std::erase_if(closed_, [&](const auto& entry) { return now - entry.second.at >= kForgetClosed; });
  std::erase_if(waiting_, [&](const Waiting& waiting) { return waiting.expires <= now; });
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
