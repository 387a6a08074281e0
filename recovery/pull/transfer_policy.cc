#include "recovery/pull/transfer_policy.h"

#include <utility>

namespace rekindle::pull {

namespace {

// One more reconnect may go over another transport.
constexpr int kReconnectsPerSource = 1;

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

}  // namespace rekindle::pull
