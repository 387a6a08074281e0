#include "recovery/rpc/update_phases.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include <fmt/ranges.h>

namespace rekindle::rpc {

namespace {

constexpr std::uint64_t kLongestPhase = std::uint64_t{30} * 86400 * 1'000'000;

// Of ascending times, by the nearest rank.
std::uint64_t percentile(const std::vector<std::uint64_t>& times, std::size_t percent) {
  const std::size_t rank = (times.size() * percent + 99) / 100;
  return times[std::max<std::size_t>(rank, 1) - 1];
}

}  // namespace

Result<void> check_phases(const PhaseTimes& phases) {
  std::set<std::string_view> seen;
  for (const auto& phase : phases) {
    if (std::ranges::find(kUpdatePhases, phase.name()) == kUpdatePhases.end()) {
      return fail(ErrorCode::kInvalid, "a phase of an update has an unknown name: there are {}",
                  fmt::join(kUpdatePhases, ", "));
    }
    if (!seen.insert(phase.name()).second) {
      return fail(ErrorCode::kInvalid, "the phase {} is there twice", phase.name());
    }
    if (std::max(phase.elapsed_us(), phase.ago_us()) > kLongestPhase) {
      return fail(ErrorCode::kInvalid, "the phase {} took, or began, more than 30 days",
                  phase.name());
    }
  }
  return {};
}

Result<PhaseTimes> phases_of(const proto::PhasesReport& report) {
  PhaseTimes phases = report.phases();
  if (report.ago_us_size() > 0 && report.ago_us_size() != phases.size()) {
    return fail(ErrorCode::kInvalid, "the beginnings of {} of {} phases of an update",
                report.ago_us_size(), phases.size());
  }
  for (int i = 0; i < phases.size(); ++i) {
    phases[i].clear_ago_us();
    if (report.ago_us_size() > 0) phases[i].set_ago_us(report.ago_us(i));
  }
  TRY_VOID(check_phases(phases));
  return phases;
}

std::string name_of(const proto::RoundStatus::Member& member) {
  if (member.instance().starts_with("pid-")) {
    return fmt::format("{} on {}", member.instance(), member.node_id());
  }
  return fmt::format("rank {} of {} on {}", member.rank(), member.instance(), member.node_id());
}

std::vector<proto::PhaseSummary> summarize_phases(const proto::RoundStatus& round) {
  std::vector<proto::PhaseSummary> summaries;
  for (const std::string_view name : kUpdatePhases) {
    std::vector<std::uint64_t> times;
    proto::PhaseSummary summary;
    for (const auto& member : round.members()) {
      for (const auto& phase : member.phases()) {
        if (phase.name() != name) continue;
        if (times.empty() || phase.elapsed_us() > summary.slowest_us()) {
          summary.set_slowest_us(phase.elapsed_us());
          summary.set_slowest(name_of(member));
        }
        times.push_back(phase.elapsed_us());
      }
    }
    if (times.empty()) continue;
    std::ranges::sort(times);
    summary.set_name(std::string(name));
    summary.set_median_us(percentile(times, 50));
    summary.set_p95_us(percentile(times, 95));
    summaries.push_back(std::move(summary));
  }
  return summaries;
}

}  // namespace rekindle::rpc
