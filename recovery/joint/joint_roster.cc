#include "recovery/joint/joint_roster.h"

#include <chrono>
#include <optional>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"
#include "src/tensor/joint_plan.h"

namespace rekindle::joint {

using async::Task;

namespace {

constexpr std::chrono::milliseconds kReportWait{2000};
constexpr std::chrono::milliseconds kReportAgain{250};
// The coordinator drops reports after 15 s.
constexpr std::chrono::seconds kReportEvery{5};

// Never 0, which stands for a report without one.
std::uint64_t new_attempt() {
  std::uint64_t attempt = 0;
  fill_random(&attempt, sizeof attempt);
  return attempt | 1;
}

}  // namespace

Result<Roster> Roster::from_proto(const ModelVersion& id, const proto::JointRoster& from,
                                  const rpc::Identity& identity, std::function<bool()> over) {
  Roster roster;
  roster.id = id;
  roster.number = from.number();
  std::optional<std::uint32_t> self;
  for (const auto& host : from.hosts()) {
    if (host.node().incarnation() == identity.incarnation.to_bytes())
      self = static_cast<std::uint32_t>(roster.hosts.size());
    roster.hosts.push_back({host.node(),
                            {host.ranks().begin(), host.ranks().end()},
                            std::make_unique<JointPeer>(host.node(), identity, over)});
  }
  if (!self) return fail(ErrorCode::kInvalid, "the roster does not have this agent");
  roster.self = *self;
  return roster;
}

proto::JointRequest Roster::request() const {
  proto::JointRequest request;
  *request.mutable_id() = rpc::to_proto(id);
  request.set_roster(number);
  request.set_host(self);
  return request;
}

RankReports::RankReports(JointAgent& agent, const LocalRanks& ranks, Course& course)
    : agent_(agent), ranks_(ranks), course_(course), attempt_(new_attempt()) {}

proto::JointReport RankReports::report_on(std::span<const std::uint32_t> ranks) const {
  proto::JointReport report;
  *report.mutable_id() = rpc::to_proto(ranks_.id());
  report.set_world(ranks_.world());
  report.set_attempt(attempt_);
  report.mutable_ranks()->Add(ranks.begin(), ranks.end());
  report.set_leave(ranks.empty());
  return report;
}

void RankReports::note_missing(const Result<proto::JointRoster>& roster) {
  if (!roster) {
    missing_ = "unknown, " + roster.error().message();
    return;
  }
  const std::vector<std::uint32_t> missing(roster->missing().begin(), roster->missing().end());
  missing_ = missing.empty() ? "" : name_ranks(missing);
  if (roster->missing_total() > missing.size()) {
    missing_ += fmt::format(" and {} more", roster->missing_total() - missing.size());
  }
}

std::string RankReports::missing() const {
  return "missing: " + (missing_.empty() ? "unknown" : missing_);
}

Task<Result<Roster>> RankReports::gather() {
  // The first answer comes at once, for ranks that give up soon: it names the missing ones.
  auto wait = std::chrono::milliseconds(0);
  while (true) {
    CO_TRY_VOID(course_.check());
    if (co_await async::is_cancelled()) co_return fail(ErrorCode::kUnavailable, "this agent stops");
    const auto present = ranks_.present();
    proto::JointReport report = report_on(present);
    if (!present.empty()) {
      report.set_wait_ms(static_cast<std::uint32_t>(std::exchange(wait, kReportWait).count()));
    }
    const TimePoint asked = steady_now();
    auto roster = co_await agent_.report_ranks(std::move(report));
    if (!roster && !may_pass(roster.error())) co_return fail(std::move(roster).error());
    if (roster && roster->number() != 0) {
      co_return Roster::from_proto(ranks_.id(), *roster, agent_.identity(),
                                   [&course = course_] { return course.error().has_value(); });
    }
    note_missing(roster);
    // A rank that came meanwhile is reported at once.
    if (present != ranks_.present()) continue;
    co_await course_.wait_until(asked + kReportAgain);
  }
}

Task<void> RankReports::keep(std::span<const std::uint32_t> ranks) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  bool cancelled = false;
  while (!course_.over() && !cancelled) {
    proto::JointReport report = report_on(ranks);
    auto asked = agent_.report_ranks(std::move(report));
    (void)co_await std::move(asked);
    co_await async::sleep_for(kReportEvery);
    cancelled = co_await async::is_cancelled();
  }
}

Task<void> RankReports::leave() {
  proto::JointReport report = report_on({});
  auto said = agent_.report_ranks(std::move(report));
  (void)co_await std::move(said);
}

}  // namespace rekindle::joint
