#include "recovery/device/process/uploading.h"

#include <algorithm>
#include <utility>

namespace rekindle::device {

namespace {
constexpr std::chrono::milliseconds kUploadPinTick{1};
constexpr std::chrono::hours kNoUploadDeadline{1};
}  // namespace

SpreadOver refused(const SpreadOrder& order, std::string_view why) {
  SpreadOver over;
  over.session = order.session;
  over.error = Error(ErrorCode::kStale, std::string(why));
  return over;
}

Error cannot_verify(const bucket::Device& device, const Error& why) {
  return Error(
      ErrorCode::kDenied,
      fmt::format("uploads to {} cannot be verified, and the agent's --verify-gpu allows no "
                  "others: {}",
                  device.id(), why.message()));
}

bool all_settled(const bucket::Pinner& pinner, const bucket::SegmentFetch::Segments& segments) {
  return std::ranges::all_of(segments, [&pinner](const auto& segment) {
    return pinner.settled(*segment, 0, segment->bytes());
  });
}

Result<void> Uploading::begin() {
  TRY(plan_, bucket::Plan::create(means_.contents, means_.slots.bucket_bytes));
  fetch_ = std::make_unique<bucket::SegmentFetch>(*plan_, means_.pinner, means_.segments,
                                                  means_.contents.tiles().tile_count());
  TRY_VOID(fetch_->mark_ready(means_.told.ready));
  if (means_.told.complete) fetch_->mark_all_ready();
  means_.worker.bring([this](std::size_t index) { return parts_of(index); });
  pipeline_ = std::make_unique<bucket::Pipeline>(
      means_.device, *plan_, means_.slots, *fetch_, nullptr, means_.worker,
      bucket::PipelineOptions{means_.times.release, means_.times.drain});
  if (means_.verify_upload) TRY_VOID(start_verifying());
  return pipeline_->start();
}

// The worker opens its buckets while the kernels are compiled.
Result<void> Uploading::start_verifying() {
  TRY_VOID(means_.worker.send(steady_now()));
  auto verify = bucket::UploadVerify::create(
      {means_.device, *fetch_, means_.contents, means_.leaves, means_.segments},
      means_.slots.count(), plan_->most_tiles(),
      [this](std::size_t index) { return parts_of(index); });
  if (!verify) return fail(cannot_verify(means_.device, verify.error()));
  verify_ = std::move(*verify);
  return pipeline_->verify_with(*verify_);
}

std::vector<bucket::Part> Uploading::parts_of(std::size_t index) const {
  const auto parts = plan_->parts(index);
  return {parts.begin(), parts.end()};
}

Result<void> Uploading::hear() {
  auto news = means_.mailbox.take();
  if (news.spread) means_.say(refused(*news.spread, "the session uploads by itself already"));
  if (news.ended) return fail(std::move(*news.ended));
  TRY_VOID(fetch_->mark_ready(news.ready));
  if (news.complete) fetch_->mark_all_ready();
  return {};
}

Result<void> Uploading::deliver_all() {
  for (;;) {
    const TimePoint now = steady_now();
    TRY_VOID(hear());
    TRY_VOID(means_.worker.receive(now));
    TRY(const auto state, pipeline_->step(now));
    if (!began_ && (means_.worker.bytes() > 0 || pipeline_->awaits_hand_over())) began_ = now;
    note_change(now);
    TRY_VOID(means_.worker.send(now));
    if (state == bucket::Pipeline::State::kDone) return {};
    wait(state, now);
  }
}

// The device does not say when it has verified a bucket. The pauses between questions grow from the
// last hand-over, or from the first bucket that waits for one.
void Uploading::note_change(TimePoint now) {
  const bool awaits = pipeline_->awaits_hand_over();
  if (handed_over_ != pipeline_->handed_over() || awaits > awaited_hand_over_) last_change_ = now;
  handed_over_ = pipeline_->handed_over();
  awaited_hand_over_ = awaits;
}

bool Uploading::all_pinned() {
  pinned_ = pinned_ || all_settled(means_.pinner, means_.segments);
  return pinned_;
}

void Uploading::wait(bucket::Pipeline::State state, TimePoint now) {
  Duration pause = kNoUploadDeadline;
  if (const auto due = pipeline_->deadline()) pause = std::min<Duration>(pause, *due - now);
  if (const auto due = means_.worker.channel().receive_deadline()) {
    pause = std::min<Duration>(pause, *due - now);
  }
  if (means_.worker.awaits_device() || pipeline_->awaits_hand_over()) {
    const TimePoint last_change = std::max(means_.worker.last_release(), last_change_);
    const auto asked = pause_before_asking(now - last_change);
    if (!asked) return;
    pause = std::min(pause, *asked);
  } else if (state == bucket::Pipeline::State::kFetching && !all_pinned()) {
    pause = std::min<Duration>(pause, kUploadPinTick);
  }
  sleep_for(pause, &means_.worker, means_.mailbox);
}

}  // namespace rekindle::device
