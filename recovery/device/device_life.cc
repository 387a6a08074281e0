#include "recovery/device/device_life.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace rekindle::device {

namespace {
constexpr std::chrono::milliseconds kAskInterval{1000};
}  // namespace

std::string_view to_string(DeviceLife::State state) {
  switch (state) {
    case DeviceLife::State::kOff:
      return "off";
    case DeviceLife::State::kStarting:
      return "starting";
    case DeviceLife::State::kServing:
      return "serving";
    case DeviceLife::State::kRestarting:
      return "restarting";
  }
  return "?";
}

void DeviceLife::turn_off(std::string why) {
  state_ = State::kOff;
  problem_ = std::move(why);
}

void DeviceLife::launching(TimePoint now) {
  launched_at_ = now;
  heard_ = now;
}

Result<void> DeviceLife::greeted(TimePoint now, std::vector<DeviceInfo> devices,
                                 const std::string& problem) {
  if (greeted_) return fail(ErrorCode::kInvalid, "said hello twice");
  greeted_ = now;
  if (devices.empty()) {
    Error none(ErrorCode::kUnavailable, "there is no GPU here: " + problem);
    // If an earlier process had GPUs, this is a failure that may pass.
    if (devices_.empty()) turn_off(none.message());
    return fail(std::move(none));
  }
  state_ = State::kServing;
  devices_ = std::move(devices);
  if (!problem.empty()) problem_ = problem;
  return {};
}

// A process that hangs in a driver keeps its socket open, so it is asked.
DeviceLife::Check DeviceLife::check(TimePoint now) {
  if (!greeted_) {
    if (now - launched_at_ <= times_.hello) return {};
    return {.hangs = Error(ErrorCode::kTimeout, "did not say which GPUs it has")};
  }
  if (now - heard_ > times_.silence) {
    return {.hangs = Error(ErrorCode::kTimeout,
                           fmt::format("has not answered for {} ms: it hangs, or is stopped",
                                       times_.silence.count()))};
  }
  if (now - asked_ < kAskInterval) return {};
  asked_ = now;
  return {.hangs = std::nullopt, .ask = true};
}

void DeviceLife::disconnected(const Error& why) {
  if (state_ == State::kOff) return;
  state_ = State::kRestarting;
  problem_ = why.message();
}

std::optional<std::chrono::milliseconds> DeviceLife::ended(TimePoint now, const Error& why) {
  const bool was_healthy = greeted_ && now - *greeted_ >= times_.healthy;
  greeted_.reset();
  pid_ = 0;
  if (state_ == State::kOff) return std::nullopt;
  if (was_healthy) pause_ = times_.first_pause;
  disconnected(why);
  ++restarts_;
  return std::exchange(pause_, std::min(pause_ * 2, times_.longest_pause));
}

Result<void> DeviceLife::check_ready(const std::string& device) const {
  switch (state_) {
    case State::kOff:
      return fail(ErrorCode::kUnavailable, "{}", problem_);
    case State::kStarting:
      return fail(ErrorCode::kUnavailable, "the device process is being started");
    case State::kRestarting:
      return fail(ErrorCode::kUnavailable, "the device process is being restarted: {}", problem_);
    case State::kServing:
      break;
  }
  std::string seen;
  for (const DeviceInfo& info : devices_) {
    if (info.id == device) return {};
    seen += (seen.empty() ? "" : ", ") + info.id;
  }
  return fail(ErrorCode::kNotFound, "no GPU with UUID {} is visible to the agent; it sees {}",
              device, seen);
}

std::string DeviceLife::name() const {
  if (state_ != State::kServing) return {};
  return fmt::format("{}.{}", pid_, restarts_);
}

}  // namespace rekindle::device
