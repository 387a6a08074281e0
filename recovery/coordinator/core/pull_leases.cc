#include "recovery/coordinator/core/pull_leases.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace rekindle::coordinator {

namespace {

constexpr Duration kExpireEvery = std::chrono::milliseconds(100);
constexpr Duration kMinQueueHint = std::chrono::milliseconds(200);
constexpr Duration kMaxQueueHint = std::chrono::seconds(10);
constexpr Duration kDefaultQueueHint = std::chrono::seconds(1);
// A new puller serves others after about this long.
constexpr Duration kFirstPieces = std::chrono::seconds(2);

}  // namespace

PullLeases::PullLeases(FleetState& fleet, const VersionResolver& resolver, Replicas& replicas,
                       const Rounds& rounds, std::function<PullId()> new_pull_id)
    : fleet_(fleet),
      resolver_(resolver),
      replicas_(replicas),
      new_pull_id_(std::move(new_pull_id)),
      table_(fleet.timing.pull_lease, fleet.limits.max_pulls),
      queue_(fleet.limits.max_waiting),
      selection_(fleet, replicas, rounds, table_) {}

Result<OpenedPull> PullLeases::open(const OpenPullRequest& request, TimePoint now) {
  const Incarnation& puller = request.puller.incarnation;
  TRY(const ModelVersion id, resolver_.resolve(request, now));
  // A node that copies the version elsewhere may read from drained nodes.
  if (!replicas_.is_task(id, puller)) TRY_VOID(resolver_.check_drained_parts(id, puller));
  table_.drop_like(puller, id, request.shard);
  if (table_.full()) {
    return fail(ErrorCode::kExhausted, "the coordinator has its {} open pulls; retry later",
                fleet_.limits.max_pulls);
  }
  const DurableVersion& version = *fleet_.catalog.find(id);
  Pull pull;
  pull.puller = request.puller;
  pull.id = id;
  pull.root = version.root;
  pull.shard = request.shard;
  pull.opened = pull.last_progress = now;
  OpenedPull opened;
  opened.id = id;
  opened.version = version;
  opened.signatures = fleet_.signers.of(id, version.root);
  opened.epoch = fleet_.epoch();
  opened.lease = fleet_.timing.pull_lease;
  auto offers = selection_.offer(pull, fair_count(pull, /*runs=*/false, now), now);
  if (offers.sources.empty()) {
    if (!offers.all_busy) {
      if (resolver_.holds_all_itself(id, version.root, puller)) return opened;
      return resolver_.nobody_usable(id, puller, now);
    }
    opened.retry_after = queue_hint(id, now);
    queue_.enter(pull, opened.retry_after, now);
    return opened;
  }
  queue_.leave(pull);
  opened.sources = std::move(offers.sources);
  for (const SourceOffer& offer : opened.sources) pull.granted.insert(offer.node.incarnation);
  pull.opened_here = true;
  opened.pull_id = new_pull_id_();
  table_.add(opened.pull_id, std::move(pull));
  return opened;
}

void PullLeases::judge_rates(const Pull& pull, const std::vector<SourceReport>& reports,
                             TimePoint now) {
  const std::string party = pull.puller.responsible();
  std::vector<std::pair<Member*, double>> rates;
  for (const SourceReport& report : reports) {
    if (!pull.granted.contains(report.incarnation)) continue;
    Member* member = fleet_.members.find(report.node_id, report.incarnation);
    if (member == nullptr) continue;
    const SourceReports::News news = pull.reports.news_in(report);
    if (news.failed) member->standing.health.observe(party, 0, now);
    if (!news.delivered) continue;
    if (!report.lost) member->last_vouched = now;
    const double rate = report.goodput_bytes_per_second;
    if (!std::isfinite(rate) || rate <= 0) continue;
    // A source that serves many pullers gives each of them less, through no fault of its own.
    const auto pullers = std::max<std::size_t>(table_.pullers_of(report.incarnation), 1);
    rates.emplace_back(member, rate * static_cast<double>(pullers));
  }
  if (rates.size() < 2) return;
  const auto middle = rates.begin() + static_cast<std::ptrdiff_t>(rates.size() / 2);
  std::ranges::nth_element(rates, middle, {}, &std::pair<Member*, double>::second);
  const double median = middle->second;
  for (const auto& [member, rate] : rates) {
    member->standing.health.observe(party, rate / median, now);
  }
}

void PullLeases::take_reports(Pull& pull, const std::vector<SourceReport>& reports, TimePoint now) {
  for (const SourceReport& report : reports) {
    const SourceReports::News news = pull.reports.news_in(report);
    Member* const member = pull.granted.contains(report.incarnation)
                               ? fleet_.members.find(report.node_id, report.incarnation)
                               : nullptr;
    if (member != nullptr && pull.opened_here) {
      const std::string& party = pull.puller.party;
      if (news.lost) member->standing.lost(fleet_.timing, now);
      if (news.delivered) member->standing.delivered(party);
      // A process without a name is another party the next time.
      if (news.lost && report.bytes == 0 && !party.empty()) {
        member->standing.gave_nothing(party, fleet_.timing, now);
      }
      if (news.quarantined) {
        member->standing.strike(pull.puller.incarnation, pull.puller.responsible(), fleet_.timing,
                                now);
      }
    }
    pull.reports.keep(report);
  }
}

// A pull keeps reading from the sources that its report names.
void PullLeases::adopt_shares(Pull& pull, const std::vector<SourceReport>& reports) {
  for (const SourceReport& report : reports) {
    const Member* member = fleet_.members.find(report.node_id, report.incarnation);
    if (member == nullptr || member->is_dead() || report.lost) continue;
    const std::size_t limit = selection_.puller_limit(*member, pull.id);
    if (table_.shares_left(report.incarnation, limit, pull.puller.party) == 0) continue;
    if (pull.sources.size() < selection_.source_limit(pull.id)) {
      table_.take_share(pull, report.incarnation);
      pull.granted.insert(report.incarnation);
    }
  }
}

Result<Pull*> PullLeases::find_or_adopt(const PullProgress& progress, TimePoint now) {
  const Incarnation& puller = progress.puller.incarnation;
  if (Pull* const known = table_.find(progress.pull_id)) {
    if (known->puller.incarnation != puller) {
      return fail(ErrorCode::kDenied, "the pull belongs to another puller");
    }
    if (known->id != progress.id) {
      return fail(ErrorCode::kDenied, "the pull is one of {}, not of {}", known->id.to_string(),
                  progress.id.to_string());
    }
    return known;
  }
  if (progress.pull_id.is_nil()) return fail(ErrorCode::kInvalid, "progress without a pull id");
  if (table_.was_closed_by(progress.pull_id, puller)) {
    return fail(ErrorCode::kStale, "{}: the pull has been closed", progress.id.to_string());
  }
  if (!fleet_.grace.active(now)) {
    return fail(ErrorCode::kStale,
                "{}: this coordinator knows no such pull; the puller has to open another",
                progress.id.to_string());
  }
  const DurableVersion* version = fleet_.catalog.find(progress.id);
  if (version == nullptr) {
    return resolver_.no_source(progress.id.to_string(), progress.id.model, now);
  }
  if (table_.full()) {
    return fail(ErrorCode::kExhausted, "the coordinator has its {} open pulls",
                fleet_.limits.max_pulls);
  }
  table_.drop_like(puller, progress.id, /*shard=*/"");
  Pull pull;
  pull.puller = progress.puller;
  pull.id = progress.id;
  pull.root = version->root;
  pull.opened = pull.last_progress = now;
  pull.bytes_done = progress.bytes_done;
  adopt_shares(pull, progress.sources);
  return &table_.add(progress.pull_id, std::move(pull));
}

Result<PullProgressAnswer> PullLeases::progress(const PullProgress& progress, TimePoint now) {
  TRY(Pull * pull, find_or_adopt(progress, now));
  if (const double elapsed = seconds(now - pull->last_progress);
      elapsed > 0 && progress.bytes_done >= pull->bytes_done) {
    pull->bytes_per_second = static_cast<double>(progress.bytes_done - pull->bytes_done) / elapsed;
  }
  pull->bytes_done = progress.bytes_done;
  pull->bytes_total = progress.bytes_total;
  pull->last_progress = now;
  if (pull->opened_here) judge_rates(*pull, progress.sources, now);
  take_reports(*pull, progress.sources, now);
  replicas_.progressed(pull->id, pull->puller.incarnation, progress.bytes_done, now);
  PullProgressAnswer answer;
  answer.sources = selection_.offer(*pull, fair_count(*pull, /*runs=*/true, now), now).sources;
  // Sources that died or fell out of favour lose their shares.
  std::vector<Incarnation> offered;
  for (const SourceOffer& offer : answer.sources) {
    offered.push_back(offer.node.incarnation);
    pull->granted.insert(offer.node.incarnation);
  }
  table_.keep_shares_of(*pull, offered);
  answer.grace = fleet_.grace.active(now);
  return answer;
}

void PullLeases::expire(TimePoint now) {
  if (now < next_expiry_) return;
  next_expiry_ = now + kExpireEvery;
  table_.expire(now);
  queue_.expire(now);
}

void PullLeases::shift(Duration by) {
  table_.shift(by);
  queue_.shift(by);
}

// The pulls ahead take their shares first; the rest is shared evenly with those behind.
std::size_t PullLeases::fair_count(const Pull& pull, bool runs, TimePoint now) const {
  const PullQueue::Place place = queue_.place_of(pull, table_.pulls_of(pull.id));
  if (place.ahead + place.behind == 0) return fleet_.limits.max_sources_per_pull;
  // A running pull takes no more while others wait, unless it has lost all its sources.
  if (runs) return pull.sources.empty() ? 1 : 0;
  const std::size_t free = selection_.free_shares(pull, now);
  if (free <= place.ahead) return 0;
  return std::max<std::size_t>((free - place.ahead) / (place.behind + 1), 1);
}

// How long until a share may be free: until the first running pull ends, by its own rate. Much
// sooner where another pull of the same version has just begun and will soon serve others.
Duration PullLeases::queue_hint(const ModelVersion& id, TimePoint now) const {
  Duration shortest = kMaxQueueHint;
  bool known = false;
  for (const auto& [pull_id, pull] : table_.all()) {
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
