#include "recovery/device/serving.h"

#include <algorithm>
#include <utility>

#include <poll.h>

#include <time.h>

#include "src/base/log.h"

namespace rekindle::device {

namespace {

// A release is noticed within these of the device being done with it: at once at first, then with
// pauses in proportion to how long it has taken already.
constexpr std::chrono::microseconds kSpin{200};
constexpr std::chrono::microseconds kShortestPause{20};
constexpr std::chrono::microseconds kLongestPause{1000};
constexpr int kPauseShare = 8;
constexpr std::chrono::milliseconds kPinTick{1};
constexpr std::chrono::hours kIdle{1};

TimePoint clock_now() { return SteadyClock().now(); }

timespec to_timespec(Duration duration) {
  const auto ns = std::max<std::int64_t>(0, duration.count());
  return {.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
}

}  // namespace

Result<void> Serving::prepare() {
  TRY(auto channel, ipc::Channel::adopt(std::move(order_.socket), 2 * order_.slots.slots));
  deliver_ = std::make_unique<WorkerDeliver>(std::move(channel), *order_.device);
  const AttachedWords words = std::move(order_.attached);
  if (words.segment_bytes.size() != order_.segments.size()) {
    return fail(ErrorCode::kInternal, "{} segments came for {}", order_.segments.size(),
                words.segment_bytes.size());
  }
  TRY(contents_,
      bucket::Contents::create(words.tensor_set, words.layout, words.wanted, words.segment_bytes));
  TRY(slots_, bucket::allocate_slots(*order_.device, order_.slots, contents_->total_bytes()));
  if (!slots_->warning.empty()) {
    log::warn("device.buckets", "session", order_.number, "warning", slots_->warning);
  }
  TRY(plan_, bucket::Plan::create(*contents_, slots_->bucket_bytes));
  fetch_ = std::make_unique<bucket::SegmentFetch>(*plan_, *order_.pinner, order_.segments,
                                                  contents_->tiles().tile_count());
  pipeline_ = std::make_unique<bucket::Pipeline>(
      *order_.device, *plan_, *slots_, *fetch_, nullptr, *deliver_,
      bucket::PipelineOptions{order_.times.release, order_.times.drain});
  TRY_VOID(pipeline_->start());
  return deliver_->offer(*plan_, *slots_);
}

Result<void> Serving::hear() {
  auto news = mailbox_.take();
  if (news.ended) return fail(std::move(*news.ended));
  TRY_VOID(fetch_->mark_ready(news.ready));
  if (news.complete) fetch_->mark_all_ready();
  return {};
}

Result<void> Serving::deliver_all() {
  for (;;) {
    const TimePoint now = clock_now();
    TRY_VOID(hear());
    TRY_VOID(deliver_->receive(now));
    TRY(const auto state, pipeline_->step(now));
    if (!began_ && deliver_->bytes() > 0) began_ = now;
    TRY_VOID(deliver_->send(now));
    if (state == bucket::Pipeline::State::kDone) return {};
    wait(state, now);
  }
}

bool Serving::all_settled() {
  settled_ = settled_ || std::ranges::all_of(order_.segments, [this](const auto& segment) {
               return order_.pinner->settled(*segment, 0, segment->bytes());
             });
  return settled_;
}

void Serving::wait(bucket::Pipeline::State state, TimePoint now) {
  Duration pause = kIdle;
  if (const auto due = pipeline_->deadline()) pause = std::min<Duration>(pause, *due - now);
  if (const auto due = deliver_->channel().receive_deadline()) {
    pause = std::min<Duration>(pause, *due - now);
  }
  if (deliver_->awaits_device()) {
    const Duration quiet = now - deliver_->last_release();
    if (quiet < kSpin) return;
    pause =
        std::min(pause, std::clamp<Duration>(quiet / kPauseShare, kShortestPause, kLongestPause));
  } else if (state == bucket::Pipeline::State::kFetching && !all_settled()) {
    pause = std::min<Duration>(pause, kPinTick);
  }
  const short send_too = deliver_->channel().wants_to_send() ? POLLOUT : 0;
  pollfd entries[] = {{deliver_->channel().fd(), static_cast<short>(POLLIN | send_too), 0},
                      {mailbox_.fd(), POLLIN, 0}};
  const timespec timeout = to_timespec(pause);
  (void)::ppoll(entries, 2, &timeout, nullptr);
}

// Until the worker has closed what it opened, or is gone: it may still have reads queued. One that
// was told all has given its last bucket back.
void Serving::wait_for_worker(bool told_all) {
  const TimePoint give_up = clock_now() + (told_all ? order_.times.close : order_.times.release);
  while (clock_now() < give_up && !mailbox_.take().gone) {
    if (deliver_->wait_closed(mailbox_.fd(), give_up)) return;
  }
}

// The device first, so that its buckets can be freed; then the worker, unless it hangs. The error:
// the device is not to be had back.
std::optional<Error> Serving::let_go(bool told_all, bool hung) {
  if (pipeline_ != nullptr) {
    if (auto drained = pipeline_->drain(clock_now() + order_.times.drain); !drained) {
      return std::move(drained).error().with_context(order_.device->id());
    }
  }
  if (!hung && deliver_ != nullptr && slots_) wait_for_worker(told_all);
  pipeline_.reset();
  deliver_.reset();
  fetch_.reset();
  slots_.reset();
  order_.segments.clear();
  return std::nullopt;
}

SessionEnd Serving::run() {
  SessionEnd end;
  auto served = prepare();
  if (served) served = deliver_all();
  if (began_) end.elapsed = clock_now() - *began_;
  if (pipeline_ != nullptr) end.buckets = pipeline_->delivered();
  if (deliver_ != nullptr) end.bytes = deliver_->bytes();
  if (deliver_ != nullptr && served) deliver_->say(bucket::FinishedMessage{});
  if (deliver_ != nullptr && !served) deliver_->say(bucket::FailedMessage{served.error()});
  bool hung = false;
  if (!served) {
    hung = served.error().code() == ErrorCode::kTimeout;
    end.error = std::move(served).error();
  }
  std::optional<Error> lost;
  if (end.error && end.error->code() == ErrorCode::kInternal) {
    // A context that is broken says so to whatever is asked.
    if (auto memory = order_.device->memory(); !memory) lost = std::move(memory).error();
  }
  if (!lost) lost = let_go(!end.error, hung);
  if (lost) {
    end.device_lost = true;
    end.error = std::move(lost);
  }
  return end;
}

}  // namespace rekindle::device
