#include "recovery/device/process/uploading.h"

#include <algorithm>
#include <utility>

#include "src/base/log.h"

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

NicReads::~NicReads() {
  if (!offered_ || ended_) return;
  if (auto over = end(false, verified_, "the session has ended"); !over) {
    log::warn("device.direct_end", "session", means_.session, "why", over.error().message());
  }
}

Result<void> NicReads::offer() {
  TRY(auto memory, means_.device.export_memory(*means_.slots.memory));
  offered_ = true;
  means_.say(SlotsOffered{means_.session, means_.slots.bucket_bytes, means_.slots.count(),
                          bucket::digest_of(means_.contents), std::move(memory)});
  return {};
}

Mailbox::News NicReads::hear() {
  auto news = means_.mailbox.take();
  means_.told.ready.insert(means_.told.ready.end(), news.ready.begin(), news.ready.end());
  means_.told.complete = means_.told.complete || news.complete;
  if (news.ended) session_end_ = news.ended;
  return news;
}

Result<void> NicReads::read(std::size_t bucket, std::uint32_t slot,
                            std::span<const TileIndex> wrong) {
  means_.say(BucketWanted{means_.session, bucket, slot, verified_, {wrong.begin(), wrong.end()}});
  broken_ = true;
  const TimePoint give_up = steady_now() + means_.times.direct_read;
  for (;;) {
    const auto news = hear();
    if (news.reads_over) return fail(ErrorCode::kUnavailable, "{}", *news.reads_over);
    if (news.landed == bucket) break;
    if (news.ended) return fail(*news.ended);
    const TimePoint now = steady_now();
    if (now >= give_up) {
      return fail(ErrorCode::kTimeout, "no NIC has brought bucket {} in {} ms", bucket,
                  means_.times.direct_read.count());
    }
    sleep_for(give_up - now, nullptr, means_.mailbox);
  }
  broken_ = false;
  return {};
}

Result<void> NicReads::end(bool all, std::uint64_t buckets, std::string why) {
  ended_ = true;
  means_.say(ReadsEnded{means_.session, all, buckets, std::move(why)});
  const TimePoint give_up = steady_now() + means_.times.direct_end;
  while (!hear().reads_over) {
    const TimePoint now = steady_now();
    if (now >= give_up) {
      return fail(ErrorCode::kUnavailable,
                  "the agent has not said in {} ms that NICs leave the memory of {} alone",
                  means_.times.direct_end.count(), means_.device.id());
    }
    sleep_for(give_up - now, nullptr, means_.mailbox);
  }
  return {};
}

Result<void> Uploading::begin() {
  TRY(plan_, bucket::Plan::create(means_.contents, means_.slots.bucket_bytes));
  fetch_ = std::make_unique<bucket::SegmentFetch>(*plan_, means_.pinner, means_.segments,
                                                  means_.contents.tiles().tile_count());
  TRY_VOID(fetch_->mark_ready(means_.told.ready));
  complete_ = means_.told.complete;
  if (complete_) fetch_->mark_all_ready();
  means_.worker.bring([this](std::size_t index) { return parts_of(index); });
  if (means_.direct) {
    if (auto started = start_direct(); !started) {
      means_.say(ReadsEnded{means_.session, false, 0, started.error().message()});
      direct_.reset();
    }
  }
  bucket::Fetch* const fetch =
      direct_ ? static_cast<bucket::Fetch*>(&direct_->fetch) : fetch_.get();
  pipeline_ = std::make_unique<bucket::Pipeline>(
      means_.device, direct_ ? direct_->buckets : plan_->size(), means_.slots, *fetch, nullptr,
      means_.worker, bucket::PipelineOptions{means_.times.release, means_.times.drain});
  if (direct_) {
    TRY_VOID(pipeline_->verify_with(*direct_->verify));
  } else if (means_.verify_upload) {
    TRY_VOID(start_verifying());
  }
  return pipeline_->start();
}

Result<void> Uploading::start_direct() {
  std::vector<std::size_t> buckets;
  for (const auto& direct : bucket::direct_buckets(means_.contents, *plan_)) {
    buckets.push_back(direct.bucket);
  }
  if (buckets.empty()) {
    return fail(ErrorCode::kUnavailable, "every bucket has parts of tiles");
  }
  TRY_VOID(means_.device.see_nic_writes());
  // The worker opens its buckets while the kernels are compiled.
  TRY_VOID(means_.worker.send(steady_now()));
  direct_ = std::make_unique<Direct>(means_, std::move(buckets));
  TRY(direct_->verify,
      bucket::DirectVerify::create({means_.device, direct_->fetch, means_.contents, means_.leaves},
                                   means_.slots.count(), plan_->most_tiles(),
                                   [this](std::size_t index) { return parts_of(index); }));
  return direct_->reads.offer();
}

// The worker keeps the buckets that it has. The others are uploads, as their tiles verify in host
// memory.
Result<void> Uploading::leave_direct(std::string why) {
  const std::size_t given = pipeline_->handed_over();
  const bool all = given == plan_->size();
  if (why.empty() && !all) why = "the other buckets have parts of tiles";
  TRY_VOID(direct_->reads.end(all, given, std::move(why)));
  if (direct_->reads.session_end()) return fail(*direct_->reads.session_end());
  for (const std::size_t bucket : direct_->fetch.first(given)) fetch_->leave_out(bucket);
  TRY_VOID(fetch_->mark_ready(means_.told.ready));
  complete_ = means_.told.complete;
  if (complete_) fetch_->mark_all_ready();
  auto alone = pipeline_->go_on_without_spread(plan_->size() - given, *fetch_,
                                               steady_now() + means_.times.drain);
  if (!alone) {
    return fail(ErrorCode::kInternal, "{} does not end what it verifies: {}", means_.device.name(),
                alone.error().message());
  }
  refilled_before_ = direct_->verify->refilled();
  handed_over_directly_ = given;
  direct_.reset();
  return means_.verify_upload ? start_verifying() : Result<void>();
}

// Without a helper, the session uploads over its own link, as always.
Result<void> Uploading::borrow_links() {
  has_asked_for_links_ = true;
  // The own link has the buckets that its slots have room for.
  if (means_.loans == nullptr || fetch_->waiting() <= means_.slots.count()) return {};
  auto helped = std::make_unique<bucket::HelpedUpload>(means_.device, *plan_, *fetch_,
                                                       means_.slots.bucket_bytes);
  auto loans = means_.loans->borrow(means_.device.id(), [this] { means_.mailbox.wake(); });
  for (auto& loan : loans) {
    if (helped->helpers() == means_.loans->most()) break;
    const std::string helper = loan->device().id();
    auto added = helped->add(std::move(loan), means_.free_fraction);
    if (!added) {
      log::debug("device.no_helper", "session", means_.session, "helper", helper, "why",
                 added.error().message());
    }
  }
  if (helped->helpers() == 0) return {};
  TRY_VOID(pipeline_->spread_with(helped->fetch(), helped->spread()));
  helped_ = std::move(helped);
  return {};
}

// A helper has failed. The buckets that the worker does not have come once more.
Result<void> Uploading::leave_helpers() {
  const TimePoint give_up = steady_now() + means_.times.drain;
  const std::size_t given = pipeline_->handed_over();
  auto ended = helped_->end(give_up);
  if (ended) {
    ended = pipeline_->go_on_without_spread(plan_->size() - given, *fetch_, give_up);
  }
  if (!ended) {
    return fail(ErrorCode::kInternal, "the helpers of {} do not end what they copy: {}",
                means_.device.name(), ended.error().message());
  }
  fetch_->give_again_after(given - handed_over_directly_);
  helped_bytes_ = helped_->bytes();
  helper_lost_ = helped_->lost();
  helped_.reset();
  return verify_ != nullptr ? pipeline_->verify_with(*verify_) : Result<void>();
}

// Their devices are free before the worker closes its buckets.
Result<void> Uploading::end_helpers() {
  if (helped_bytes() > 0) {
    log::info("device.helped", "session", means_.session, "device", means_.device.id(), "bytes",
              helped_bytes(), "of", means_.worker.bytes());
  }
  return helped_ != nullptr ? helped_->end(steady_now() + means_.times.drain) : Result<void>();
}

Result<void> Uploading::drain(TimePoint deadline) {
  if (helped_ != nullptr) TRY_VOID(helped_->end(deadline));
  return pipeline_ != nullptr ? pipeline_->drain(deadline) : Result<void>();
}

std::uint64_t Uploading::refilled() const {
  const std::uint64_t before = direct_ ? direct_->verify->refilled() : refilled_before_;
  return before + (verify_ != nullptr ? verify_->refilled() : 0);
}

// A fault of the direct reads, also bytes that are wrong twice, ends only these. So does a fault of
// a helper.
Result<bucket::Pipeline::State> Uploading::step(TimePoint now) {
  auto given_back = helped_ != nullptr ? helped_->give_back() : Result<void>();
  auto state = given_back ? pipeline_->step(now)
                          : Result<bucket::Pipeline::State>(fail(std::move(given_back).error()));
  if (!state && helped_ != nullptr && helped_->broken()) {
    log::warn("device.helper_left", "session", means_.session, "device", means_.device.id(),
              "delivered", pipeline_->handed_over(), "why", state.error().message());
    TRY_VOID(leave_helpers());
    return pipeline_->step(steady_now());
  }
  if (!direct_) return state;
  direct_->reads.note_verified(pipeline_->handed_over());
  if (!state) {
    const Error& why = state.error();
    if (!direct_->reads.broken() && why.code() != ErrorCode::kCorrupt) return state;
    log::warn("device.direct_left", "session", means_.session, "device", means_.device.id(),
              "delivered", pipeline_->handed_over(), "why", why.message());
    TRY_VOID(leave_direct(why.message()));
    return pipeline_->step(steady_now());
  }
  if (pipeline_->handed_over() < direct_->buckets) return state;
  TRY_VOID(leave_direct(""));
  return pipeline_->step(steady_now());
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
  complete_ = complete_ || news.complete;
  if (news.complete) fetch_->mark_all_ready();
  return {};
}

Result<void> Uploading::deliver_all() {
  for (;;) {
    const TimePoint now = steady_now();
    TRY_VOID(hear());
    TRY_VOID(means_.worker.receive(now));
    TRY(const auto state, step(now));
    if (!began_ && (means_.worker.bytes() > 0 || pipeline_->awaits_hand_over())) began_ = now;
    note_change(now);
    TRY_VOID(means_.worker.send(now));
    if (state == bucket::Pipeline::State::kDone) return end_helpers();
    // The own link has work by now.
    if (complete_ && !direct_ && !has_asked_for_links_) TRY_VOID(borrow_links());
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
  // The device does not say when the work of a helper is done.
  if (helped_ != nullptr && helped_->wanted_back()) pause = kUploadPinTick;
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
