#include "recovery/device/serving.h"

#include <algorithm>
#include <utility>

#include "recovery/device/pause.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::device {

namespace {

constexpr std::chrono::milliseconds kPinTick{1};
constexpr std::chrono::hours kIdle{1};

}  // namespace

Result<void> Serving::serve() {
  TRY_VOID(prepare());
  if (order_.in_round) {
    say_joined();
    TRY(auto ordered, await_orders());
    if (ordered) {
      TRY(const bool by_round, spread(std::move(*ordered)));
      if (by_round) return {};
    }
  }
  TRY_VOID(prepare_alone());
  return deliver_all();
}

Result<void> Serving::prepare() {
  TRY(device_, order_.open());
  TRY(auto channel, ipc::Channel::adopt(std::move(order_.socket), 2 * order_.slots.slots));
  deliver_ = std::make_unique<WorkerDeliver>(std::move(channel), *device_);
  AttachedWords words = std::move(order_.attached);
  version_ = std::move(words.version);
  if (words.segment_bytes.size() != order_.segments.size()) {
    return fail(ErrorCode::kInternal, "{} segments came for {}", order_.segments.size(),
                words.segment_bytes.size());
  }
  TRY(contents_,
      bucket::Contents::create(words.tensor_set, words.layout, words.wanted, words.segment_bytes));
  TRY(slots_, bucket::allocate_slots(*device_, order_.slots, contents_->total_bytes()));
  if (!slots_->warning.empty()) {
    log::warn("device.buckets", "session", order_.number, "warning", slots_->warning);
  }
  return deliver_->offer(*slots_);
}

void Serving::say_joined() {
  order_.say(DeviceJoined{order_.number, slots_->bucket_bytes, bucket::digest_of(*contents_),
                          contents_->total_bytes(), order_.communicators->kept(device_->id())});
}

// nullopt: it takes part in no round. The worker opens its buckets meanwhile.
Result<std::optional<SpreadOrder>> Serving::await_orders() {
  const TimePoint give_up = steady_now() + order_.times.orders;
  for (;;) {
    const TimePoint now = steady_now();
    auto news = mailbox_.take();
    told_.ready.insert(told_.ready.end(), news.ready.begin(), news.ready.end());
    told_.complete = told_.complete || news.complete;
    if (news.stop) {
      if (news.spread) refuse(*news.spread, *news.stop);
      return std::nullopt;
    }
    // The other ranks count on this one, whatever has become of its worker.
    if (news.spread) return std::move(news.spread);
    if (news.ended) return fail(std::move(*news.ended));
    TRY_VOID(deliver_->receive(now));
    TRY_VOID(deliver_->send(now));
    if (now >= give_up) return std::nullopt;
    Duration pause = give_up - now;
    if (const auto due = deliver_->channel().receive_deadline()) {
      pause = std::min<Duration>(pause, *due - now);
    }
    sleep_for(pause, deliver_.get(), mailbox_);
  }
}

// False: nothing came of it.
Result<bool> Serving::spread(SpreadOrder order) {
  spreading_ = std::make_unique<Spreading>(
      Spreading::Means{*device_, *order_.pinner, order_.segments, *contents_, *slots_, *deliver_,
                       mailbox_, *order_.communicators, told_, order_.times, order_.leaves,
                       order_.verify_upload, version_, order_.say},
      std::move(order));
  TRY(const bool begun, spreading_->begin());
  if (!begun) {
    spreading_.reset();
    return false;
  }
  began_ = spreading_->met();
  TRY_VOID(spreading_->deliver_all());
  return true;
}

void Serving::refuse(const SpreadOrder& order, std::string_view why) {
  SpreadOver over;
  over.session = order.session;
  over.error = Error(ErrorCode::kStale, std::string(why));
  order_.say(std::move(over));
}

Result<void> Serving::prepare_alone() {
  TRY(plan_, bucket::Plan::create(*contents_, slots_->bucket_bytes));
  fetch_ = std::make_unique<bucket::SegmentFetch>(*plan_, *order_.pinner, order_.segments,
                                                  contents_->tiles().tile_count());
  TRY_VOID(fetch_->mark_ready(told_.ready));
  if (told_.complete) fetch_->mark_all_ready();
  deliver_->bring([this](std::size_t index) { return parts_of(index); });
  pipeline_ = std::make_unique<bucket::Pipeline>(
      *device_, *plan_, *slots_, *fetch_, nullptr, *deliver_,
      bucket::PipelineOptions{order_.times.release, order_.times.drain});
  if (order_.verify_upload) TRY_VOID(start_verifying());
  return pipeline_->start();
}

std::vector<bucket::Part> Serving::parts_of(std::size_t index) const {
  const auto parts = plan_->parts(index);
  return {parts.begin(), parts.end()};
}

// The worker opens its buckets while the kernels are compiled.
Result<void> Serving::start_verifying() {
  TRY_VOID(deliver_->send(steady_now()));
  auto verify = bucket::UploadVerify::create(
      {*device_, *fetch_, *contents_, order_.leaves, order_.segments}, slots_->count(),
      plan_->most_tiles(), [this](std::size_t index) { return parts_of(index); });
  if (!verify) return fail(cannot_verify(*device_, verify.error()));
  verify_ = std::move(*verify);
  return pipeline_->verify_with(*verify_);
}

Result<void> Serving::hear() {
  auto news = mailbox_.take();
  if (news.spread) refuse(*news.spread, "the session goes on by itself already");
  if (news.ended) return fail(std::move(*news.ended));
  TRY_VOID(fetch_->mark_ready(news.ready));
  if (news.complete) fetch_->mark_all_ready();
  return {};
}

Result<void> Serving::deliver_all() {
  for (;;) {
    const TimePoint now = steady_now();
    TRY_VOID(hear());
    TRY_VOID(deliver_->receive(now));
    TRY(const auto state, pipeline_->step(now));
    if (!began_ && (deliver_->bytes() > 0 || pipeline_->awaits_hand_over())) began_ = now;
    note_change(now);
    TRY_VOID(deliver_->send(now));
    if (state == bucket::Pipeline::State::kDone) return {};
    wait(state, now);
  }
}

// The device says nothing when it has verified a bucket. The pauses between questions grow from the
// last hand-over on, or from the first bucket that waits for one.
void Serving::note_change(TimePoint now) {
  const bool awaits = pipeline_->awaits_hand_over();
  if (handed_over_ != pipeline_->handed_over() || awaits > awaited_) last_change_ = now;
  handed_over_ = pipeline_->handed_over();
  awaited_ = awaits;
}

bool Serving::all_pinned() {
  pinned_ = pinned_ || all_settled(*order_.pinner, order_.segments);
  return pinned_;
}

void Serving::wait(bucket::Pipeline::State state, TimePoint now) {
  Duration pause = kIdle;
  if (const auto due = pipeline_->deadline()) pause = std::min<Duration>(pause, *due - now);
  if (const auto due = deliver_->channel().receive_deadline()) {
    pause = std::min<Duration>(pause, *due - now);
  }
  if (deliver_->awaits_device() || pipeline_->awaits_hand_over()) {
    const TimePoint last_change = std::max(deliver_->last_release(), last_change_);
    const auto asked = pause_before_asking(now - last_change);
    if (!asked) return;
    pause = std::min(pause, *asked);
  } else if (state == bucket::Pipeline::State::kFetching && !all_pinned()) {
    pause = std::min<Duration>(pause, kPinTick);
  }
  sleep_for(pause, deliver_.get(), mailbox_);
}

bucket::Pipeline* Serving::pipeline() {
  return spreading_ != nullptr ? spreading_->pipeline() : pipeline_.get();
}

std::uint64_t Serving::refilled() const {
  const std::uint64_t alone = verify_ != nullptr ? verify_->refilled() : 0;
  return alone + (spreading_ != nullptr ? spreading_->refilled() : 0);
}

// Until the worker has closed what it opened, or is gone: it may still have reads queued. One that
// was told all has given its last bucket back.
void Serving::wait_for_worker(bool told_all) {
  const TimePoint give_up = steady_now() + (told_all ? order_.times.close : order_.times.release);
  while (steady_now() < give_up && !mailbox_.take().gone) {
    if (deliver_->wait_closed(mailbox_.fd(), give_up)) return;
  }
}

// The device first, so that its buckets can be freed; then the worker, unless it hangs. The error:
// the device is not to be had back.
std::optional<Error> Serving::let_go(bool told_all, bool hung) {
  if (pipeline() != nullptr) {
    if (auto drained = pipeline()->drain(steady_now() + order_.times.drain); !drained) {
      return std::move(drained).error().with_context(device_->id());
    }
  }
  if (!hung && deliver_ != nullptr && slots_) wait_for_worker(told_all);
  spreading_.reset();
  pipeline_.reset();
  verify_.reset();
  deliver_.reset();
  fetch_.reset();
  slots_.reset();
  order_.segments.clear();
  return std::nullopt;
}

SessionEnd Serving::run() {
  SessionEnd end;
  auto served = serve();
  if (began_) end.elapsed = steady_now() - *began_;
  if (pipeline() != nullptr) end.buckets = pipeline()->delivered();
  if (deliver_ != nullptr) end.bytes = deliver_->bytes();
  end.refilled = refilled();
  if (deliver_ != nullptr && served) deliver_->say(bucket::FinishedMessage{});
  if (deliver_ != nullptr && !served) deliver_->say(bucket::FailedMessage{served.error()});
  bool hung = false;
  if (!served) {
    // In a round it was given seconds: it may read what it has for longer.
    hung = served.error().code() == ErrorCode::kTimeout && !order_.in_round;
    end.error = std::move(served).error();
  }
  std::optional<Error> lost;
  if (device_ != nullptr && end.error && end.error->code() == ErrorCode::kInternal) {
    // A context that is broken says so to whatever is asked.
    if (auto memory = device_->memory(); !memory) lost = std::move(memory).error();
  }
  if (!lost) lost = let_go(!end.error, hung);
  if (lost) {
    end.device_lost = true;
    end.error = std::move(lost);
  }
  return end;
}

}  // namespace rekindle::device
