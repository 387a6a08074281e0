#include "recovery/device/process/round_deliver.h"

#include <algorithm>
#include <utility>

#include "src/base/clock.h"

namespace rekindle::device {

namespace {
constexpr std::chrono::milliseconds kLook{500};
constexpr std::chrono::milliseconds kPause{2000};

}  // namespace

Result<void> RoundDeliver::hand_over(std::size_t bucket, std::uint32_t slot) {
  last_change_ = steady_now();
  if (lost_) return {};
  if (auto handed = worker_.hand_over(bucket, slot); !handed) {
    lose(std::move(handed).error());
  } else {
    kept_since_[slot] = last_change_;
  }
  return {};
}

Result<bool> RoundDeliver::released(std::uint32_t slot) {
  if (lost_) return true;
  auto done = worker_.released(slot);
  if (!done) {
    lose(std::move(done).error());
    return true;
  }
  if (*done) {
    kept_since_[slot].reset();
    last_change_ = steady_now();
  }
  return *done;
}

Result<void> RoundDeliver::spoil(std::size_t bucket, Error why) {
  last_change_ = steady_now();
  lose(std::move(why).with_context(
      in_round_ ? fmt::format("{}, bucket {} of a round", version_, bucket) : version_));
  return {};
}

void RoundDeliver::hear(TimePoint now) {
  if (lost_) return;
  if (auto heard = worker_.receive(now); !heard) lose(std::move(heard).error());
  last_change_ = std::max(last_change_, worker_.last_release());
}

void RoundDeliver::send(TimePoint now) {
  if (lost_) return;
  if (auto sent = worker_.send(now); !sent) lose(std::move(sent).error());
}

void RoundDeliver::check(TimePoint now) {
  const Duration gap = checked_ ? now - *checked_ : Duration{0};
  checked_ = now;
  // This process could not hear the worker during a stop.
  if (gap > kPause) {
    for (auto& since : kept_since_) {
      if (since) *since += gap;
    }
  }
  const auto due = first_due();
  if (!due || now < *due) return;
  lose(Error(ErrorCode::kTimeout,
             fmt::format("the worker has kept a bucket of a round for {} ms: it is stopped, or "
                         "hangs; its device goes on without it",
                         patience_.count())));
}

void RoundDeliver::lose(Error why) {
  if (lost_) return;
  worker_.say(bucket::FailedMessage{why});
  lost_ = std::move(why);
}

std::optional<TimePoint> RoundDeliver::deadline() const {
  const auto due = first_due();
  return due && checked_ ? std::min(*due, *checked_ + kLook) : due;
}

std::optional<TimePoint> RoundDeliver::first_due() const {
  if (lost_) return std::nullopt;
  std::optional<TimePoint> first;
  for (const auto& since : kept_since_) {
    if (since && (!first || *since + patience_ < *first)) first = *since + patience_;
  }
  return first;
}

}  // namespace rekindle::device
