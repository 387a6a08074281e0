#include "recovery/device/process/serving.h"

#include <algorithm>
#include <utility>

#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::device {

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
  uploading_ = std::make_unique<Uploading>(means());
  TRY_VOID(uploading_->begin());
  return uploading_->deliver_all();
}

Result<void> Serving::prepare() {
  TRY(device_, order_.open());
  TRY(auto channel, ipc::Channel::adopt(std::move(order_.socket), 2 * order_.slots.slots));
  deliver_ = std::make_unique<WorkerDeliver>(std::move(channel), *device_);
  AttachedContents attached = std::move(order_.attached);
  version_ = std::move(attached.version);
  if (attached.segment_bytes.size() != order_.segments.size()) {
    return fail(ErrorCode::kInternal, "{} segments came for {}", order_.segments.size(),
                attached.segment_bytes.size());
  }
  TRY(contents_, bucket::Contents::create(attached.tensor_set, attached.layout, attached.wanted,
                                          attached.segment_bytes));
  TRY(slots_, bucket::allocate_slots(*device_, order_.slots, contents_->total_bytes()));
  if (!slots_->warning.empty()) {
    log::warn("device.buckets", "session", order_.number, "warning", slots_->warning);
  }
  return deliver_->offer(*slots_);
}

SessionMeans Serving::means() {
  return {*device_,        *order_.pinner,
          order_.segments, *contents_,
          *slots_,         *deliver_,
          mailbox_,        order_.communicators,
          told_,           order_.times,
          order_.leaves,   order_.verify_upload,
          version_,        order_.say,
          order_.number,   order_.direct,
          order_.loans,    order_.slots.free_fraction};
}

void Serving::say_joined() {
  order_.say(DeviceJoined{order_.number, slots_->bucket_bytes, bucket::digest_of(*contents_),
                          contents_->total_bytes(), order_.communicators->kept(device_->id())});
}

// nullopt: the session takes part in no round. The worker opens its buckets meanwhile.
Result<std::optional<SpreadOrder>> Serving::await_orders() {
  const TimePoint give_up = steady_now() + order_.times.orders;
  for (;;) {
    const TimePoint now = steady_now();
    auto news = mailbox_.take();
    told_.ready.insert(told_.ready.end(), news.ready.begin(), news.ready.end());
    told_.complete = told_.complete || news.complete;
    if (news.stop) {
      if (news.spread) order_.say(refused(*news.spread, *news.stop));
      return std::nullopt;
    }
    // The other ranks count on this one, even if its worker is lost.
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

// False: the ranks have not met.
Result<bool> Serving::spread(SpreadOrder order) {
  spreading_ = std::make_unique<Spreading>(means(), std::move(order));
  TRY(const bool begun, spreading_->begin());
  if (!begun) {
    spreading_.reset();
    return false;
  }
  TRY_VOID(spreading_->deliver_all());
  return true;
}

bucket::Pipeline* Serving::pipeline() {
  if (spreading_ != nullptr) return spreading_->pipeline();
  return uploading_ != nullptr ? uploading_->pipeline() : nullptr;
}

std::optional<TimePoint> Serving::began() const {
  if (spreading_ != nullptr) return spreading_->met();
  return uploading_ != nullptr ? uploading_->began() : std::nullopt;
}

std::uint64_t Serving::refilled() const {
  if (spreading_ != nullptr) return spreading_->refilled();
  return uploading_ != nullptr ? uploading_->refilled() : 0;
}

// Waits until the worker has closed its handles, or is gone: it may still have reads queued. A
// worker that was told that all is delivered has given its last bucket back.
void Serving::wait_for_worker(bool told_all) {
  const TimePoint give_up = steady_now() + (told_all ? order_.times.close : order_.times.release);
  while (steady_now() < give_up && !mailbox_.take().gone) {
    if (deliver_->wait_closed(mailbox_.fd(), give_up)) return;
  }
}

// Waits for the device first, so that its buckets can be freed, then for the worker, unless it
// hangs. Returns an error when the device is lost.
std::optional<Error> Serving::let_go(bool told_all, bool hung) {
  const TimePoint give_up = steady_now() + order_.times.drain;
  Result<void> drained;
  if (spreading_ != nullptr && spreading_->pipeline() != nullptr) {
    drained = spreading_->pipeline()->drain(give_up);
  } else if (uploading_ != nullptr) {
    drained = uploading_->drain(give_up);
  }
  if (!drained) return std::move(drained).error().with_context(device_->id());
  if (!hung && deliver_ != nullptr && slots_) wait_for_worker(told_all);
  spreading_.reset();
  uploading_.reset();
  deliver_.reset();
  slots_.reset();
  order_.segments.clear();
  return std::nullopt;
}

SessionEnd Serving::run() {
  SessionEnd end;
  auto served = serve();
  if (const auto first = began()) end.elapsed = steady_now() - *first;
  if (pipeline() != nullptr) end.buckets = pipeline()->delivered();
  if (deliver_ != nullptr) end.bytes = deliver_->bytes();
  end.refilled = refilled();
  if (uploading_ != nullptr) {
    end.helped_bytes = uploading_->helped_bytes();
    end.helper_lost = uploading_->helper_lost();
  }
  if (deliver_ != nullptr && served) deliver_->say(bucket::FinishedMessage{});
  if (deliver_ != nullptr && !served) deliver_->say(bucket::FailedMessage{served.error()});
  bool hung = false;
  if (!served) {
    // In a round the worker had only seconds: it may still read its last buckets.
    hung = served.error().code() == ErrorCode::kTimeout && !order_.in_round;
    end.error = std::move(served).error();
  }
  std::optional<Error> lost;
  if (device_ != nullptr && end.error && end.error->code() == ErrorCode::kInternal) {
    // Every call to a broken context fails.
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
