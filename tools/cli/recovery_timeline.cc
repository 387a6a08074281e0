#include "tools/cli/recovery_timeline.h"

#include <algorithm>
#include <string_view>

namespace rekindle::cli {
namespace {

// The kernel tells the start of a process by ticks, which are rounded down.
constexpr double kStartResolutionS = 0.02;

bool ends_worker(const proto::AgentEvent& event) {
  return event.kind() == "died" || event.kind() == "failed" || event.kind() == "detached";
}

std::optional<double> phase_of(const proto::AgentEvent& attach, std::string_view name) {
  for (const auto& phase : attach.phases()) {
    if (phase.name() == name) return static_cast<double>(phase.elapsed_us()) / 1e6;
  }
  return std::nullopt;
}

}  // namespace

double RecoveryTimeline::at(const proto::AgentEvent& event) const {
  const auto since_death = static_cast<std::int64_t>(event.unix_us() - died_unix_us_);
  return *died_s_ + static_cast<double>(since_death) / 1e6;
}

void RecoveryTimeline::add(const proto::AgentEvent& event, double arrived_s) {
  if (!died_s_) {
    if (!ends_worker(event) || event.pid() != victim_pid_) return;
    died_s_ = arrived_s;
    died_unix_us_ = event.unix_us();
    return;
  }
  if (event.kind() == "ready") ready_s_ = at(event);
  if (!event.has_rank() || event.rank() != rank_) return;
  if (event.kind() == "attach") {
    attached_s_ = at(event);
    process_age_s_ = phase_of(event, "start");
    // By the agent's clock alone, and before the moment when the old worker was last seen alive.
    const double since_alive_s = at(event) - *died_s_ + phase_of(event, "detect").value_or(0);
    takes_over_ = process_age_s_.value_or(0) > since_alive_s + kStartResolutionS;
    // Those of an earlier worker, which has failed as well.
    loaded_s_.reset();
    ready_s_.reset();
  }
  if (event.kind() == "loaded") {
    loaded_s_ = at(event);
    rung_ = event.rung();
  }
}

std::vector<RecoveryTimeline::Phase> RecoveryTimeline::phases() const {
  std::vector<Phase> phases;
  double now = 0;
  const auto until = [&](const char* name, std::optional<double> end, std::string what) {
    if (!end) return;
    phases.push_back({name, now, std::max(*end - now, 0.0), std::move(what)});
    now = std::max(now, *end);
  };
  until("detect", died_s_, "the agent sees the death");
  if (attached_s_) {
    const double started_s = *attached_s_ - process_age_s_.value_or(0);
    if (takes_over_) {
      until("takeover", attached_s_, "a process that had started up before attaches");
    } else if (process_age_s_) {
      until("restart", started_s, "a new process starts");
      until("start", attached_s_, "the new process attaches: imports, devices");
    } else {
      until("restart", attached_s_, "a new process attaches");
    }
    until("load", loaded_s_, "every byte is in place, rung " + (rung_.empty() ? "?" : rung_));
    until("commit", ready_s_, "the instance is ready: every rank has loaded");
  }
  until("first_token", first_token_s_, "a request succeeds: graphs, warm-up");
  return phases;
}

}  // namespace rekindle::cli
