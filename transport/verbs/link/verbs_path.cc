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
// A queue pair in ERR reports all its requests at once. After this time it is destroyed.
constexpr Duration kFlushTime = std::chrono::seconds(2);

// Whether the session may read the bytes of `op`.
OpStatus check(const ReadOp& op, const RemoteWindows& windows) {
  const auto region = windows.region(op.remote);
  if (region.status != OpStatus::kOk) return region.status;
  const StridedRange range{op.remote_offset, op.run_bytes, op.count, op.remote_stride};
  return fits(range, region.bytes) ? OpStatus::kOk : OpStatus::kInvalid;
}

}  // namespace

OpSlots::OpSlots() : done_(kMaxOps) {
  for (std::size_t slot = kMaxOps; slot > 0; --slot) {
    free_.push_back(static_cast<std::uint16_t>(slot - 1));
  }
}

OpSlots::~OpSlots() {
  assert(in_flight() == 0 && "a Path with ops in flight was destroyed: abort() and poll() first");
}

std::uint16_t OpSlots::take() {
  const std::uint16_t slot = free_.back();
  free_.pop_back();
  ++taken_;
  return slot;
}

void OpSlots::report(std::uint16_t slot, std::uint64_t wr_id, OpStatus status) {
  done_[(done_head_ + done_count_++) % kMaxOps] = {wr_id, status};
  free_.push_back(slot);
}

std::size_t OpSlots::poll(std::span<Completion> out) {
  std::size_t count = 0;
  for (; count < out.size() && done_count_ > 0; ++count, --done_count_) {
    out[count] = done_[done_head_];
    done_head_ = (done_head_ + 1) % kMaxOps;
  }
  polled_ += count;
  return count;
}

OpStatus failure_status(ibv_wc_status status, OpStatus own, OpStatus stopped) {
  const bool flushed = status == IBV_WC_WR_FLUSH_ERR && stopped != OpStatus::kOk;
  // After abort() the cause of a failed read does not matter.
  return flushed || stopped == OpStatus::kAborted ? stopped : own;
}

VerbsPath::VerbsPath(VerbsPathParts parts)
    : parts_(std::move(parts)),
      home_{parts_.connection->rail().name(), parts_.connection->rail().device().cpus()},
      memory_(parts_.memory, parts_.connection->rail().device()) {
  memory_.refresh();
}

// --- ops

Result<std::size_t> VerbsPath::post(std::span<const ReadOp> ops) {
  stop_if_rail_moved();
  if (!running()) {
    return fail(ErrorCode::kPeerLost, "{}: {}", parts_.description,
                why_broken_.empty() ? "aborted" : why_broken_);
  }
  std::size_t taken = 0;
  while (taken < ops.size() && op_slots_.has_room()) {
    const ReadOp& op = ops[taken++];
    accept(op_slots_.take(), op, check(op, parts_.windows));
  }
  if (taken > 0) pump_if_running();
  return taken;
}

std::size_t VerbsPath::poll(std::span<Completion> out) {
  stop_if_rail_moved();
  (void)drain_completions();
  if (running()) {
    pump_if_running();
  } else if (in_flight() > op_slots_.done() && std::chrono::steady_clock::now() >= drain_by_) {
    // The device does not say how the requests ended. Without queue pairs there are none.
    log::warn("verbs.forced_drain", "path", parts_.description, "hint",
              "the NIC did not report all that was posted; its queue pairs were destroyed");
    parts_.connection->destroy_queue_pairs();
    end_outstanding();
  }
  return op_slots_.poll(out);
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
  return !drain_completions() && op_slots_.done() == 0;
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

}  // namespace rekindle::transport::verbs
