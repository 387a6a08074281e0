#include "recovery/pull/pull_policy.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace rekindle::pull {

using transport::SourceIndex;

namespace {

// One more reconnect may go over another transport.
constexpr int kReconnectsPerSource = 1;
constexpr Duration kFirstJoinPause = std::chrono::seconds(1);
constexpr Duration kLongestJoinPause = std::chrono::seconds(16);

}  // namespace

void SourceState::connect() {
  if (!lost()) phase_ = Phase::kConnecting;
}

void SourceState::connected() {
  if (phase_ == Phase::kConnecting) phase_ = Phase::kConnected;
}

SourceState::AfterLoss SourceState::on_paths_lost(const Error& cause, Means means) {
  if (cause.code() == ErrorCode::kUnavailable) {
    // Others finish its slices sooner. It has done nothing wrong and may be needed again.
    if (!lost()) phase_ = Phase::kSlow;
    return AfterLoss::kWait;
  }
  if (cause.code() == ErrorCode::kCorrupt || !means.is_peer) return AfterLoss::kLose;
  if (reconnects_ < kReconnectsPerSource) {
    ++reconnects_;
    return AfterLoss::kReconnect;
  }
  if (!means.has_another_transport) return AfterLoss::kLose;
  // Its paths broke, were made again and proved themselves with a read, and broke again.
  ++reconnects_;
  return AfterLoss::kReconnectOverAnother;
}

bool SourceState::revive() {
  if (phase_ != Phase::kSlow) return false;
  phase_ = Phase::kIdle;
  return true;
}

void SourceState::lose(Loss loss, std::string cause) {
  phase_ = Phase::kLost;
  if (loss_ != Loss::kWrongBytes) loss_ = loss;
  cause_ = std::move(cause);
}

void SourceState::restart() {
  if (lost()) return;
  phase_ = Phase::kIdle;
  reconnects_ = 0;
}

bool TransferPolicy::starved(std::uint64_t additions) {
  starved_at_ = additions;
  return starved();
}

TransferPolicy::Step TransferPolicy::next(bool batch_finished, bool cancelled) const {
  Step step;
  step.ended = batch_finished && connecting_ == 0;
  if (step.ended) return step;
  step.stop_connecting = batch_finished || cancelled;
  step.cancel_batch = cancelled || (starved() && connecting_ == 0);
  step.join_rails = !batch_finished && !cancelled;
  return step;
}

std::vector<RailKeeper::LostRail> RailKeeper::update(const transport::BatchProgress& progress) {
  std::map<SourceIndex, std::set<std::string>> alive;
  for (const auto& path : progress.paths) {
    if (path.alive && !path.home.empty()) alive[path.source].insert(path.home);
  }
  std::vector<LostRail> lost;
  for (auto& [source, rails] : rails_) {
    const auto now = alive.find(source);
    if (now != alive.end()) {
      for (const std::string& rail : rails.alive) {
        if (!now->second.contains(rail)) lost.push_back({source, rail});
      }
    }
    rails.alive.clear();
  }
  for (auto& [source, homes] : alive) rails_[source].alive = std::move(homes);
  return lost;
}

std::vector<std::string> RailKeeper::alive(SourceIndex source) const {
  const auto found = rails_.find(source);
  if (found == rails_.end()) return {};
  return {found->second.alive.begin(), found->second.alive.end()};
}

bool RailKeeper::begin_join(SourceIndex source, TimePoint now) {
  Rails& rails = rails_[source];
  if (rails.joining) return false;
  if (rails.next_join == TimePoint{}) {
    rails.pause = kFirstJoinPause;
    rails.next_join = now + rails.pause;
  }
  if (now < rails.next_join) return false;
  return rails.joining = true;
}

void RailKeeper::end_join(SourceIndex source, Join outcome, TimePoint now) {
  Rails& rails = rails_[source];
  rails.joining = false;
  if (outcome == Join::kJoined) rails.pause = kFirstJoinPause;
  if (outcome == Join::kFailed) rails.pause = std::min(rails.pause * 2, kLongestJoinPause);
  rails.next_join = now + rails.pause;
}

bool RailKeeper::joining(SourceIndex source) const {
  const auto found = rails_.find(source);
  return found != rails_.end() && found->second.joining;
}

}  // namespace rekindle::pull
