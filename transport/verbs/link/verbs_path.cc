#include "transport/verbs/link/verbs_path.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <functional>
#include <utility>

#include "src/base/log.h"
#include "transport/read_op.h"

namespace rekindle::transport::verbs {
namespace {

constexpr std::size_t kCompletionsPerPoll = 64;
// A path looks for a bounce block again after this time.
constexpr Duration kBounceBlockRetry = std::chrono::milliseconds(1);
// A queue pair in ERR reports everything at once. One that has not done so by then is destroyed.
constexpr Duration kFlushTime = std::chrono::seconds(2);

}  // namespace

VerbsPath::VerbsPath(VerbsPathParts parts)
    : parts_(std::move(parts)),
      home_{parts_.connection->rail().name(), parts_.connection->rail().device().cpus()},
      memory_(parts_.memory, parts_.connection->rail().device()),
      done_(kMaxOps) {
  for (std::size_t slot = kMaxOps; slot > 0; --slot) {
    free_slots_.push_back(static_cast<std::uint16_t>(slot - 1));
  }
  memory_.refresh();
}

VerbsPath::~VerbsPath() {
  assert(in_flight() == 0 && "a Path with ops in flight was destroyed: abort() and poll() first");
}

// --- ops

OpStatus VerbsPath::check(const ReadOp& op) const {
  const auto region = parts_.windows.region(op.remote);
  if (region.status != OpStatus::kOk) return region.status;
  const StridedRange range{op.remote_offset, op.run_bytes, op.count, op.remote_stride};
  return fits(range, region.bytes) ? OpStatus::kOk : OpStatus::kInvalid;
}

Result<std::size_t> VerbsPath::post(std::span<const ReadOp> ops) {
  stop_if_rail_moved();
  if (!running()) {
    return fail(ErrorCode::kPeerLost, "{}: {}", parts_.description,
                why_broken_.empty() ? "aborted" : why_broken_);
  }
  std::size_t taken = 0;
  while (taken < ops.size() && !free_slots_.empty() && in_flight() < kMaxOps) {
    const ReadOp& op = ops[taken++];
    const std::uint16_t slot = free_slots_.back();
    free_slots_.pop_back();
    ++taken_;
    accept(slot, op, check(op));
  }
  if (taken > 0) pump_if_running();
  return taken;
}

void VerbsPath::report(std::uint16_t slot, std::uint64_t wr_id, OpStatus status) {
  done_[(done_head_ + done_count_++) % kMaxOps] = {wr_id, status};
  free_slots_.push_back(slot);
}

std::size_t VerbsPath::poll(std::span<Completion> out) {
  stop_if_rail_moved();
  (void)drain_completions();
  if (running()) {
    pump_if_running();
  } else if (in_flight() > done_count_ && std::chrono::steady_clock::now() >= drain_by_) {
    force_drain();
  }
  std::size_t count = 0;
  for (; count < out.size() && done_count_ > 0; ++count, --done_count_) {
    out[count] = done_[done_head_];
    done_head_ = (done_head_ + 1) % kMaxOps;
  }
  reported_ += count;
  return count;
}

void VerbsPath::pump_if_running() {
  wake_at_.reset();
  memory_.refresh();
  if (running()) pump();
}

OpStatus VerbsPath::land(const ReadOp& op, const ReadRequest& request, const std::byte* block) {
  if (request.bounced) {
    const auto copy = [&] { scatter(op, request, block); };
    // std::cref: a copy of the function would be allocated.
    const OpStatus status = guard_op(op, std::cref(copy));
    if (status != OpStatus::kOk) return status;
  }
  bytes_landed_ += request.payload_bytes;
  return OpStatus::kOk;
}

// --- what a path waits for

std::uint64_t VerbsPath::take_rate(std::uint64_t wanted) {
  const TimePoint now = std::chrono::steady_clock::now();
  const std::uint64_t granted = parts_.limiter->take(wanted, now);
  if (granted == 0) wake_by(parts_.limiter->ready_at(now));
  return granted;
}

BouncePool::Block VerbsPath::acquire_block() {
  const BouncePool::Block block = parts_.bounce->acquire();
  if (block.data == nullptr) wake_by(std::chrono::steady_clock::now() + kBounceBlockRetry);
  return block;
}

bool VerbsPath::arm() {
  if (armed_ && parts_.connection->take_event()) armed_ = false;
  if (!armed_) {
    parts_.connection->arm();
    armed_ = true;
  }
  // Completions that came before the arming raise no event.
  return !drain_completions() && done_count_ == 0;
}

std::optional<TimePoint> VerbsPath::wake_at() const {
  if (!running() && in_flight() > 0) return drain_by_;
  return wake_at_;
}

// --- completions

bool VerbsPath::drain_completions() {
  std::array<ibv_wc, kCompletionsPerPoll> completions;
  const int count = parts_.connection->api().poll_cq(
      parts_.connection->cq(), static_cast<int>(completions.size()), completions.data());
  if (count < 0) {
    // The queue is large enough for everything, but the device may break it. It reports nothing
    // more then.
    stop(OpStatus::kPeerLost, "the completion queue is broken");
    drain_by_force();
    return false;
  }
  for (int i = 0; i < count; ++i) complete(completions[static_cast<std::size_t>(i)]);
  // These completions are the event that was armed.
  if (count > 0 && armed_ && parts_.connection->take_event()) armed_ = false;
  return count > 0;
}

OpStatus VerbsPath::failure_status(ibv_wc_status status, OpStatus own) const {
  const bool flushed = status == IBV_WC_WR_FLUSH_ERR && !running();
  // After abort() nobody asks why a read did not make it.
  return flushed || stopped_ == OpStatus::kAborted ? stopped_ : own;
}

// --- the end

void VerbsPath::stop_if_rail_moved() {
  if (running() && parts_.connection->rail_moved()) {
    stop(OpStatus::kPeerLost, parts_.connection->why_moved());
  }
}

void VerbsPath::stop(OpStatus status, std::string why) {
  if (!running()) return;
  stopped_ = status;
  why_broken_ = std::move(why);
  drain_by_ = std::chrono::steady_clock::now() + kFlushTime;
  parts_.connection->stop();
  end_unsent();
}

// The device does not say how the requests ended. Without queue pairs there are none.
void VerbsPath::force_drain() {
  log::warn("verbs.forced_drain", "path", parts_.description, "hint",
            "the NIC did not report all that was posted; its queue pairs were destroyed");
  parts_.connection->destroy_queue_pairs();
  end_outstanding();
}

}  // namespace rekindle::transport::verbs
