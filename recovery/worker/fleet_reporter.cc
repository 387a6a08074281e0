#include "recovery/worker/fleet_reporter.h"

#include <utility>
#include <vector>

#include <boost/asio/this_coro.hpp>

#include "src/async/task.h"

namespace rekindle::worker {

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kReportInterval{500};

}  // namespace

bool FleetReporter::spans(const LocalInstances::Entry& entry) const {
  return entry.named && entry.state.world() > 1 && host_.has_fleet();
}

void FleetReporter::ranks_changed(LocalInstances::Entry& entry) {
  entry.fleet.change(++last_change_);
  if (!spans(entry)) return;
  changed_ = true;
  news_.notify();
  if (!std::exchange(running_, true)) tasks_.spawn("worker.report", run());
}

void FleetReporter::rank_detached(const LocalInstances::Entry& entry, std::uint32_t rank) {
  if (!spans(entry)) return;
  RankReport report = entry.fleet.report_of(entry.state, {rank, 0, false, true, "has detached"});
  report.sequence = ++last_report_;
  tasks_.spawn("worker.report", report_once(std::move(report)));
}

async::Task<void> FleetReporter::report_once(RankReport report) {
  co_await asio::this_coro::throw_if_cancelled(false);
  (void)co_await host_.report(std::move(report));
}

async::Task<Result<ModelVersion>> FleetReporter::newest_for(std::string instance,
                                                            std::uint32_t rank) {
  const auto* const entry = instances_.find(instance);
  if (entry == nullptr) co_return fail(ErrorCode::kStale, "the instance is gone");
  RankReport report = entry->fleet.report_of(entry->state, {rank, 0, false, false, ""});
  report.version.reset();
  report.state = RankReport::State::kAttached;
  report.sequence = ++last_report_;
  CO_TRY(auto verdict, co_await host_.report(std::move(report)));
  co_return std::move(verdict.id);
}

async::Task<void> FleetReporter::run() {
  co_await asio::this_coro::throw_if_cancelled(false);
  while (!co_await async::is_cancelled()) {
    std::vector<std::string> names;
    for (const auto& [name, entry] : instances_.all()) {
      if (spans(*entry) && entry->fleet.is_due(entry->state)) names.push_back(name);
    }
    if (names.empty()) break;
    changed_ = false;
    for (const auto& name : names) co_await report_instance(name);
    if (!changed_) {
      co_await news_.wait_until(steady_now() + kReportInterval);
    }
  }
  running_ = false;
}

async::Task<void> FleetReporter::report_instance(std::string name) {
  auto* entry = instances_.find(name);
  if (entry == nullptr) co_return;
  auto reports = entry->fleet.reports(entry->state);
  if (reports.empty()) co_return;
  for (auto& report : reports) report.sequence = ++last_report_;
  FleetReport::Answers answers;
  answers.change = entry->fleet.last_change();
  for (auto& report : reports) {
    const bool here =
        report.state == RankReport::State::kAttached || report.state == RankReport::State::kLoaded;
    const std::uint32_t rank = report.rank;
    auto verdict = co_await host_.report(std::move(report));
    // A refusal concerns no other rank. A rank that failed here may live elsewhere by now.
    if (!verdict && is_refusal(verdict.error())) {
      if (here) answers.refused.emplace(rank, std::move(verdict).error());
      continue;
    }
    answers.verdict = std::move(verdict);
    if (!*answers.verdict) break;
  }
  entry = instances_.find(name);
  if (entry == nullptr) co_return;
  const auto ruling = entry->fleet.hear(entry->state, answers, steady_now(), hear_ranks_);
  for (const auto& [session, why] : ruling.failed) effects_.fail_rank(session, why);
  if (ruling.failed.empty()) effects_.apply(*entry, ruling.change);
}

}  // namespace rekindle::worker
