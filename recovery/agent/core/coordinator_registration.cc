#include "recovery/agent/core/coordinator_registration.h"

#include <algorithm>
#include <utility>

namespace rekindle::agent {

namespace {

constexpr std::chrono::milliseconds kConnectDeadline{2000};
constexpr std::chrono::milliseconds kConnectDeadlineOfSeveral{700};
constexpr std::chrono::milliseconds kFirstBackoff{100};
constexpr std::chrono::milliseconds kMaxBackoff{1000};
// A connection that lived for this long resets the back-off.
constexpr std::chrono::milliseconds kStableAfter{2000};
constexpr std::chrono::milliseconds kAnnounceAgain{1000};

}  // namespace

CoordinatorRegistration::CoordinatorRegistration(std::vector<std::string> addresses, bool member,
                                                 std::uint32_t seed)
    : addresses_(std::move(addresses)), member_(member), random_(seed), backoff_(kFirstBackoff) {}

CoordinatorRegistration::Next CoordinatorRegistration::next(TimePoint now) {
  switch (state_) {
    case State::kPausing:
      if (now < wake_at_) return {Step::kWait, wake_at_};
      state_ = State::kConnecting;
      return {Step::kConnect};
    case State::kConnecting:
      return {Step::kConnect};
    case State::kRegistering:
      return {Step::kRegister};
    case State::kAnnouncing:
      return {Step::kAnnounce};
    case State::kIdle:
      if (!member_) return {Step::kWait, now + heartbeat_interval_};
      if (now < wake_at_ && !announcement_due_) return {Step::kWait, wake_at_};
      state_ = State::kHeartbeating;
      return {Step::kHeartbeat};
    case State::kHeartbeating:
      return {Step::kHeartbeat};
    case State::kStopped:
      break;
  }
  return {Step::kStop};
}

void CoordinatorRegistration::connected(TimePoint now) {
  if (state_ != State::kConnecting) return;
  connected_at_ = now;
  state_ = member_ ? State::kRegistering : State::kIdle;
}

void CoordinatorRegistration::registered(std::uint32_t heartbeat_interval_ms, std::uint32_t ttl_ms,
                                         TimePoint now) {
  if (state_ != State::kRegistering) return;
  heartbeat_interval_ =
      std::chrono::milliseconds(std::clamp<std::uint32_t>(heartbeat_interval_ms, 10, 10'000));
  ttl_ = std::chrono::milliseconds(std::clamp<std::uint32_t>(ttl_ms, 100, 60'000));
  wake_at_ = now;
  state_ = State::kAnnouncing;
}

void CoordinatorRegistration::begin_announcement() {
  announcement_due_ = false;
  announce_again_at_.reset();
}

void CoordinatorRegistration::announced(bool again, TimePoint now) {
  if (!is_registered()) return;
  if (again) announce_again_at_ = now + kAnnounceAgain;
  if (state_ == State::kAnnouncing) state_ = State::kIdle;
}

void CoordinatorRegistration::heartbeat_answered(TimePoint now) {
  if (state_ != State::kHeartbeating) return;
  wake_at_ = now + heartbeat_interval_;
  const bool again = announce_again_at_ && now >= *announce_again_at_;
  state_ = announcement_due_ || again ? State::kAnnouncing : State::kIdle;
}

bool CoordinatorRegistration::lost(Error why, TimePoint now) {
  if (state_ == State::kStopped) return false;
  last_error_ = std::move(why);
  const bool was_connected = connected_at_.has_value();
  if (was_connected && now - *connected_at_ > kStableAfter) backoff_ = kFirstBackoff;
  connected_at_.reset();
  const bool first = backoff_ == kFirstBackoff;
  pause_or_try_next(was_connected, now);
  return first;
}

void CoordinatorRegistration::pause_or_try_next(bool was_connected, TimePoint now) {
  current_ = (current_ + 1) % addresses_.size();
  if (!was_connected && current_ != 0) {
    state_ = State::kConnecting;
    return;
  }
  state_ = State::kPausing;
  wake_at_ = now + jittered_backoff();
  backoff_ = std::min(backoff_ * 2, kMaxBackoff);
}

std::chrono::milliseconds CoordinatorRegistration::jittered_backoff() {
  const auto half = backoff_.count() / 2;
  return std::chrono::milliseconds(
      half + static_cast<std::int64_t>(random_() % static_cast<unsigned>(half + 1)));
}

void CoordinatorRegistration::copies_changed() { announcement_due_ = true; }

void CoordinatorRegistration::stop() { state_ = State::kStopped; }

bool CoordinatorRegistration::is_registered() const {
  return state_ == State::kAnnouncing || state_ == State::kHeartbeating ||
         (member_ && state_ == State::kIdle);
}

std::chrono::milliseconds CoordinatorRegistration::connect_deadline() const {
  return addresses_.size() > 1 ? kConnectDeadlineOfSeveral : kConnectDeadline;
}

bool CoordinatorRegistration::hopeless() const {
  const ErrorCode code = last_error_.code();
  return code == ErrorCode::kNotFound || code == ErrorCode::kDenied || code == ErrorCode::kInvalid;
}

}  // namespace rekindle::agent
