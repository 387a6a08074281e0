#include "recovery/device/process/session_mailbox.h"

#include <algorithm>
#include <chrono>

#include <poll.h>

#include <time.h>

#include "recovery/device/process/worker_deliver.h"

namespace rekindle::device {

namespace {

constexpr std::chrono::microseconds kSpin{200};
constexpr std::chrono::microseconds kShortestPause{20};
constexpr std::chrono::microseconds kLongestPause{1000};
constexpr int kPauseShare = 8;

timespec to_timespec(Duration duration) {
  const auto ns = std::max<std::int64_t>(0, duration.count());
  return {.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
}

}  // namespace

std::optional<Duration> pause_before_asking(Duration quiet) {
  if (quiet < kSpin) return std::nullopt;
  return std::clamp<Duration>(quiet / kPauseShare, kShortestPause, kLongestPause);
}

void sleep_for(Duration pause, const WorkerDeliver* worker, const Mailbox& mailbox) {
  const bool send_too = worker != nullptr && worker->channel().wants_to_send();
  const short wanted = static_cast<short>(POLLIN | (send_too ? POLLOUT : 0));
  pollfd entries[] = {{worker != nullptr ? worker->channel().fd() : -1, wanted, 0},
                      {mailbox.fd(), POLLIN, 0}};
  const timespec timeout = to_timespec(pause);
  (void)::ppoll(entries, 2, &timeout, nullptr);
}

}  // namespace rekindle::device
