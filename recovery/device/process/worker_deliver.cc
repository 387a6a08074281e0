#include "recovery/device/process/worker_deliver.h"

#include <algorithm>
#include <utility>

#include <poll.h>

#include <time.h>

#include "src/base/clock.h"

namespace rekindle::device {

namespace {
constexpr int kReadsAtOnce = 16;

template <typename... F>
struct Cases : F... {
  using F::operator()...;
};
template <typename... F>
Cases(F...) -> Cases<F...>;
}  // namespace

WorkerDeliver::WorkerDeliver(ipc::Channel channel, bucket::Device& device)
    : channel_(std::move(channel)), device_(device) {}

Result<void> WorkerDeliver::offer(bucket::Slots& slots) {
  bucket::BuffersMessage buffers;
  buffers.bucket_bytes = slots.bucket_bytes;
  buffers.memory_bytes = slots.memory->bytes();
  buffers.warning = slots.warning;
  TRY(buffers.memory, device_.share(*slots.memory));
  for (const auto& event : slots.filled) {
    TRY(auto handle, device_.share(*event));
    buffers.filled.push_back(std::move(handle));
  }
  slots_.resize(slots.count());
  return push(std::move(buffers));
}

Result<void> WorkerDeliver::push(bucket::Message message) {
  auto encoded = bucket::encode(std::move(message));
  return channel_.push(std::move(encoded.body), std::move(encoded.descriptors));
}

Result<void> WorkerDeliver::receive(TimePoint now) {
  for (int i = 0; i < kReadsAtOnce; ++i) {
    auto got = channel_.receive_some(now);
    if (!got || *got == ipc::Received::kEnd) {
      closed_ = true;
      if (!got) return fail(std::move(got).error().with_context("the worker's channel"));
      return fail(ErrorCode::kPeerLost, "the worker has closed its channel");
    }
    if (*got == ipc::Received::kNothing) break;
    for (;;) {
      TRY(auto frame, channel_.next());
      if (!frame) break;
      TRY(auto message, bucket::decode(frame->body, std::move(frame->descriptors)));
      TRY_VOID(on_message(std::move(message), now));
    }
  }
  // The pipeline limits how long the worker may leave messages unread.
  return channel_.check_receive_deadline(now);
}

Result<void> WorkerDeliver::on_message(bucket::Message message, TimePoint now) {
  return std::visit(
      Cases{[&](const bucket::OpenedMessage& opened) { return on_opened(opened); },
            [&](const bucket::ReleasedMessage& released) { return on_released(released, now); },
            [](const bucket::FailedMessage& failed) -> Result<void> {
              return fail(failed.error.with_context("the worker"));
            },
            [](const auto&) -> Result<void> {
              return fail(ErrorCode::kInvalid,
                          "the worker sent a message that only the device process sends");
            }},
      std::move(message));
}

Result<void> WorkerDeliver::on_opened(const bucket::OpenedMessage& opened) {
  if (opened_ || opened.released.size() != slots_.size()) {
    return fail(ErrorCode::kInvalid, "the worker has opened {} buckets{}, there are {}",
                opened.released.size(), opened_ ? " again" : "", slots_.size());
  }
  opened_ = true;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    TRY(slots_[i].released, device_.open_event(opened.released[i]));
  }
  return {};
}

Result<void> WorkerDeliver::on_released(const bucket::ReleasedMessage& message, TimePoint now) {
  if (!opened_ || message.slot >= slots_.size() ||
      slots_[message.slot].state != Slot::State::kWorkers ||
      slots_[message.slot].sequence != message.sequence) {
    return fail(ErrorCode::kInvalid,
                "the worker releases bucket {} in slot {}, which it does not hold",
                message.sequence, message.slot);
  }
  slots_[message.slot].state = Slot::State::kReleased;
  ++awaited_;
  last_release_ = now;
  return {};
}

Result<void> WorkerDeliver::send(TimePoint now) {
  if (!channel_.wants_to_send()) return {};
  auto sent = channel_.send_some(now);
  if (sent || sent.error().code() != ErrorCode::kPeerLost) return sent;
  // The worker may have sent the reason.
  auto last = closed_ ? sent : receive(now);
  closed_ = true;
  return last ? sent : last;
}

void WorkerDeliver::say(bucket::Message last) {
  if (closed_ || said_last_ || !push(std::move(last))) return;
  said_last_ = true;
  (void)send(SteadyClock().now());
}

bool WorkerDeliver::wait_closed(int stop, TimePoint deadline) {
  while (!closed_) {
    const TimePoint now = SteadyClock().now();
    if (now >= deadline) return false;
    const short send_too = channel_.wants_to_send() ? POLLOUT : 0;
    pollfd entries[] = {{channel_.fd(), static_cast<short>(POLLIN | send_too), 0},
                        {stop, POLLIN, 0}};
    (void)::poll(entries, 2, ipc::poll_timeout_ms(now, deadline));
    if (entries[1].revents != 0) return false;
    // Further messages do not matter, only the end of the stream.
    if (!send(now)) return closed_;
    const auto got = channel_.receive_some(now);
    if (!got || *got == ipc::Received::kEnd) closed_ = true;
    while (!closed_) {
      const auto frame = channel_.next();
      if (!frame) return false;
      if (!*frame) break;
    }
  }
  return true;
}

Result<void> WorkerDeliver::hand_over(std::size_t bucket, std::uint32_t slot) {
  auto parts = parts_of_(bucket);
  const std::uint64_t sequence = sequence_++;
  slots_[slot].state = Slot::State::kWorkers;
  slots_[slot].sequence = sequence;
  for (const auto& part : parts) bytes_ += part.bytes;
  return push(bucket::FilledMessage{slot, sequence, std::move(parts)});
}

Result<bool> WorkerDeliver::released(std::uint32_t slot) {
  Slot& mine = slots_[slot];
  if (mine.state != Slot::State::kReleased) return false;
  TRY(const bool done, device_.is_done(*mine.released));
  if (!done) return false;
  mine.state = Slot::State::kOurs;
  --awaited_;
  return true;
}

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
