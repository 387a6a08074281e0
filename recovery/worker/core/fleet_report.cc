#include "recovery/worker/core/fleet_report.h"

#include <utility>

namespace rekindle::worker {

bool is_refusal(const Error& error) {
  return error.code() == ErrorCode::kStale || error.code() == ErrorCode::kDenied ||
         error.code() == ErrorCode::kInvalid;
}

RankReport FleetReport::report_of(const Instance& instance, const Instance::RankView& rank) const {
  using State = RankReport::State;
  RankReport report;
  report.instance = instance.name();
  report.generation = instance.generation();
  report.rank = rank.rank;
  report.world = instance.world();
  report.model = instance.model();
  report.version = asked_;
  report.has = instance.version();
  const bool here = rank.session != 0;
  report.state = rank.left     ? State::kGone
                 : !here       ? State::kFailed
                 : rank.loaded ? State::kLoaded
                               : State::kAttached;
  report.why = rank.why;
  return report;
}

std::vector<RankReport> FleetReport::reports(const Instance& instance) const {
  std::vector<RankReport> reports;
  if (!asked_ && !instance.version()) return reports;
  for (const auto& rank : instance.ranks()) reports.push_back(report_of(instance, rank));
  return reports;
}

// A coordinator that has just begun its term hears of the ranks one by one. Until it has said
// COMMITTED, or has had time to hear of them all, its LOADING takes nothing back.
bool FleetReport::has_heard_all(std::uint64_t term, TimePoint now, Duration patience) {
  if (term == committed_term_) return true;
  if (std::exchange(loading_term_, term) != term) loading_since_ = now;
  return now - loading_since_ >= patience;
}

FleetReport::Ruling FleetReport::hear(Instance& instance, const Answers& answers, TimePoint now,
                                      Duration patience) {
  Ruling ruling;
  // Later changes are reported anew. These answers know nothing of them.
  if (answers.change != changed_) return ruling;
  const auto ranks = instance.ranks();
  for (const auto& rank : ranks) {
    const auto why = answers.refused.find(rank.rank);
    if (rank.session != 0 && why != answers.refused.end()) {
      ruling.failed.emplace_back(rank.session, why->second);
    }
  }
  // Without a verdict nothing else changes.
  if (!ruling.failed.empty() || !answers.verdict || !*answers.verdict) return ruling;
  const InstanceVerdict& verdict = **answers.verdict;
  reported_ = answers.change;
  if (instance.version() && verdict.id != *instance.version()) {
    const Error stale(
        ErrorCode::kStale,
        fmt::format("instance {} is at {} in the fleet, at {} here; attach again", instance.name(),
                    verdict.id.to_string(), instance.version()->to_string()));
    for (const auto& rank : ranks) {
      if (rank.session != 0) ruling.failed.emplace_back(rank.session, stale);
    }
    return ruling;
  }
  switch (verdict.state) {
    case InstanceVerdict::State::kCommitted:
      committed_term_ = verdict.term;
      ruling.change = instance.others_loaded();
      break;
    case InstanceVerdict::State::kUnfit:
      ruling.change = instance.others_failed(verdict.why);
      break;
    case InstanceVerdict::State::kLoading:
      if (has_heard_all(verdict.term, now, patience)) ruling.change = instance.others_loading();
  }
  return ruling;
}

}  // namespace rekindle::worker
