#include "transport/verbs/path.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <functional>
#include <utility>

#include "src/base/log.h"
#include "transport/guarded_op.h"
#include "transport/read_range.h"

namespace rekindle::transport::verbs {
namespace {

constexpr std::size_t kCompletionsPerPoll = 64;
constexpr Duration kBlockWait = std::chrono::milliseconds(1);  // all bounce blocks are in use
// A queue pair in ERR reports everything at once. One that does not is destroyed.
constexpr Duration kDrainTime = std::chrono::seconds(2);

}  // namespace

VerbsPath::VerbsPath(VerbsPathParts parts)
    : description_(std::move(parts.description)),
      home_{parts.connection->rail().name(), parts.connection->rail().device().cpus()},
      windows_(std::move(parts.windows)),
      limits_(parts.limits),
      bounce_(std::move(parts.bounce)),
      limiter_(std::move(parts.limiter)),
      memory_(std::move(parts.memory), parts.connection->rail().device()),
      connection_(std::move(parts.connection)),
      ops_(kMaxOps),
      done_(kMaxOps) {
  for (std::size_t i = 0; i < connection_->queue_pair_count(); ++i) {
    queues_.push_back({connection_->queue_pair(i),
                       SendQueue(static_cast<std::uint32_t>(i), connection_->send_depth())});
  }
  for (std::size_t slot = kMaxOps; slot > 0; --slot) {
    free_slots_.push_back(static_cast<std::uint16_t>(slot - 1));
  }
  memory_.refresh();
}

VerbsPath::~VerbsPath() {
  assert(in_flight() == 0 && "a Path with ops in flight was destroyed: abort() and poll() first");
}

std::uint64_t VerbsPath::remote_span(RegionKey region, std::uint64_t offset) const {
  const RemoteWindow& window = windows_.at(region, offset);
  return window.offset + window.bytes - offset;
}

// --- taking ops

OpStatus VerbsPath::check(const ReadOp& op) const {
  const auto region = windows_.region(op.remote);
  if (region.status != OpStatus::kOk) return region.status;
  const StridedRange range{op.remote_offset, op.run_bytes, op.count, op.remote_stride};
  return fits(range, region.bytes) ? OpStatus::kOk : OpStatus::kInvalid;
}

void VerbsPath::accept(const ReadOp& op) {
  const std::uint16_t slot = free_slots_.back();
  free_slots_.pop_back();
  ++taken_;
  auto lightest =
      std::min_element(queues_.begin(), queues_.end(),
                       [](const Queue& a, const Queue& b) { return a.open_bytes < b.open_bytes; });
  Op& state = ops_[slot];
  state.read = op;
  state.outstanding = 0;
  state.next = kNone;
  state.status = check(op);
  state.cursor = state.status == OpStatus::kOk ? OpCursor(op) : OpCursor();
  state.bytes = state.cursor.payload_left();
  lightest->open_bytes += state.bytes;
  if (state.cursor.done()) {
    finish_if_over(*lightest, slot);
    return;
  }
  (lightest->first == kNone ? lightest->first : ops_[lightest->last].next) = slot;
  lightest->last = slot;
}

Result<std::size_t> VerbsPath::post(std::span<const ReadOp> ops) {
  stop_if_rail_moved();
  if (stopped_ != OpStatus::kOk) {
    return fail(ErrorCode::kPeerLost, "{}: {}", description_,
                why_broken_.empty() ? "aborted" : why_broken_);
  }
  std::size_t taken = 0;
  while (taken < ops.size() && !free_slots_.empty() && in_flight() < kMaxOps) accept(ops[taken++]);
  if (taken > 0) pump();
  return taken;
}

// --- posting requests

void VerbsPath::pump() {
  wake_at_.reset();
  memory_.refresh();
  for (std::size_t i = 0; i < queues_.size() && stopped_ == OpStatus::kOk; ++i) pump(i);
}

void VerbsPath::pump(std::size_t index) {
  Queue& queue = queues_[index];
  bool more = true;
  while (more && stopped_ == OpStatus::kOk) {
    more = queue.first != kNone && !queue.sent.full() && push_request(queue, index);
    if (more && !queue.sent.chain_full()) continue;
    unposted_.clear();
    const int error = queue.sent.flush(connection_->api(), queue.queue_pair, unposted_);
    if (error == 0) continue;
    for (const auto& request : unposted_) retire(queue, request, OpStatus::kPeerLost);
    stop(OpStatus::kPeerLost, fmt::format("post: {}", std::strerror(error)));
    if (queue.sent.silent()) drain_by_ = {};
  }
}

// False: not now, for want of a bounce block, because of the rate, or because the op has failed.
bool VerbsPath::push_request(Queue& queue, std::size_t index) {
  const std::uint16_t slot = queue.first;
  Op& op = ops_[slot];
  if (op.status != OpStatus::kOk) return false;  // ends when what is out of it has come back
  const OpCursor before = op.cursor;
  ExpandLimits limits = limits_;
  std::uint64_t granted = 0;
  if (limiter_ != nullptr && !within_rate(limits, before.payload_left(), granted)) return false;
  op.cursor.next(op.read, limits, *this, request_);
  SentRequest sent{.op = slot,
                   .bounced = request_.bounced,
                   .wire_bytes = request_.wire_bytes,
                   .payload_bytes = request_.payload_bytes,
                   .payload_offset = request_.payload_offset,
                   .block = {}};
  if (sent.bounced) sent.block = bounce_->acquire();
  const bool waits = sent.bounced && sent.block.data == nullptr;
  if (limiter_ != nullptr) limiter_->give_back(waits ? granted : granted - request_.wire_bytes);
  if (waits) {
    op.cursor = before;
    wake_by(std::chrono::steady_clock::now() + kBlockWait);
    return false;
  }
  ++op.outstanding;
  const RemoteWindow& window = windows_.at(op.read.remote, request_.remote_offset);
  queue.sent.add(sent, request_, window.address + (request_.remote_offset - window.offset),
                 window.key(index), op.cursor.done());
  if (op.cursor.done()) leave_queue(queue);
  return true;
}

bool VerbsPath::within_rate(ExpandLimits& limits, std::uint64_t wanted, std::uint64_t& granted) {
  const TimePoint now = std::chrono::steady_clock::now();
  granted = limiter_->take(std::min<std::uint64_t>(wanted, limits.request_bytes), now);
  if (granted == 0) {
    wake_by(limiter_->ready_at(now));
    return false;
  }
  limits.request_bytes = static_cast<std::uint32_t>(granted);
  limits.bounce_bytes = std::min(limits.bounce_bytes, limits.request_bytes);
  return true;
}

// Whichever queue can go on first.
void VerbsPath::wake_by(TimePoint at) { wake_at_ = std::min(wake_at_.value_or(at), at); }

void VerbsPath::leave_queue(Queue& queue) {
  Op& op = ops_[queue.first];
  queue.first = std::exchange(op.next, kNone);
  if (queue.first == kNone) queue.last = kNone;
}

// --- completions

std::size_t VerbsPath::poll(std::span<Completion> out) {
  stop_if_rail_moved();
  (void)drain_completions();
  if (stopped_ == OpStatus::kOk) {
    pump();
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

bool VerbsPath::drain_completions() {
  std::array<ibv_wc, kCompletionsPerPoll> completions;
  const int count = connection_->api().poll_cq(
      connection_->cq(), static_cast<int>(completions.size()), completions.data());
  if (count < 0) {
    // Sized so that it cannot overrun, but the device may break it: what is outstanding will not be
    // reported any more.
    stop(OpStatus::kPeerLost, "the completion queue is broken");
    drain_by_ = {};
    return false;
  }
  for (int i = 0; i < count; ++i) complete(completions[static_cast<std::size_t>(i)]);
  // What was asked for when it was armed has come.
  if (count > 0 && armed_ && connection_->take_event()) armed_ = false;
  return count > 0;
}

void VerbsPath::complete(const ibv_wc& wc) {
  const std::uint64_t tag = wc.wr_id >> 32;
  if (tag >= queues_.size()) return;
  Queue& queue = queues_[tag];
  bool is_last = false;
  while (!is_last) {
    const auto request = queue.sent.retire(wc.wr_id, is_last);
    if (!request) return;
    if (!is_last || wc.status == IBV_WC_SUCCESS) {
      retire(queue, *request, OpStatus::kOk);
      continue;
    }
    const bool flushed = wc.status == IBV_WC_WR_FLUSH_ERR && stopped_ != OpStatus::kOk;
    // After abort() nobody asks any more why a read did not make it.
    const bool ours = flushed || stopped_ == OpStatus::kAborted;
    retire(queue, *request, ours ? stopped_ : to_op_status(wc.status));
    stop(OpStatus::kPeerLost, explain(wc.status));
  }
}

void VerbsPath::retire(Queue& queue, const SentRequest& request, OpStatus status) {
  if (status == OpStatus::kOk) status = land(request);
  if (request.block.data != nullptr) bounce_->release(request.block);
  Op& op = ops_[request.op];
  --op.outstanding;
  if (op.status == OpStatus::kOk) op.status = status;
  finish_if_over(queue, request.op);
}

OpStatus VerbsPath::land(const SentRequest& request) {
  const Op& op = ops_[request.op];
  if (request.bounced) {
    ReadRequest what;
    what.wire_bytes = request.wire_bytes;
    what.payload_bytes = request.payload_bytes;
    what.payload_offset = request.payload_offset;
    const auto copy = [&] { scatter(op.read, what, request.block.data); };
    const OpStatus status = guard_op(op.read, std::cref(copy));  // a copy of it would be allocated
    if (status != OpStatus::kOk) return status;
  }
  bytes_landed_ += request.payload_bytes;
  return OpStatus::kOk;
}

// Nothing of it is out, and nothing more will be: report it.
void VerbsPath::finish_if_over(Queue& queue, std::uint16_t slot) {
  Op& op = ops_[slot];
  if (op.outstanding > 0) return;
  if (!op.cursor.done() && op.status == OpStatus::kOk && stopped_ == OpStatus::kOk) return;
  if (!op.cursor.done()) {
    if (queue.first == slot) leave_queue(queue);
    if (op.status == OpStatus::kOk) op.status = stopped_;
  }
  queue.open_bytes -= op.bytes;
  done_[(done_head_ + done_count_++) % kMaxOps] = {op.read.wr_id, op.status};
  free_slots_.push_back(slot);
}

// --- the end

void VerbsPath::stop_if_rail_moved() {
  if (stopped_ == OpStatus::kOk && connection_->rail_moved()) {
    stop(OpStatus::kPeerLost, connection_->why_moved());
  }
}

void VerbsPath::abort() { stop(OpStatus::kAborted, {}); }

void VerbsPath::stop(OpStatus status, std::string why) {
  if (stopped_ != OpStatus::kOk) return;
  stopped_ = status;
  why_broken_ = std::move(why);
  drain_by_ = std::chrono::steady_clock::now() + kDrainTime;
  connection_->stop();
  for (auto& queue : queues_) {
    for (std::uint16_t slot = queue.first; slot != kNone;) {
      const std::uint16_t next = ops_[slot].next;
      finish_if_over(queue, slot);
      slot = next;
    }
  }
}

// The device does not say what became of the requests: without queue pairs there are none.
void VerbsPath::force_drain() {
  log::warn("verbs.forced_drain", "path", description_, "hint",
            "not all that was posted will be reported; its queue pairs were destroyed");
  connection_->destroy_queue_pairs();
  for (auto& queue : queues_) {
    while (const auto request = queue.sent.drop()) retire(queue, *request, stopped_);
  }
}

// --- sleeping

bool VerbsPath::arm() {
  if (armed_ && connection_->take_event()) armed_ = false;
  if (!armed_) {
    connection_->arm();
    armed_ = true;
  }
  // What came before it was armed raises no event.
  return !drain_completions() && done_count_ == 0;
}

std::optional<TimePoint> VerbsPath::wake_at() const {
  if (stopped_ != OpStatus::kOk && in_flight() > 0) return drain_by_;
  return wake_at_;
}

}  // namespace rekindle::transport::verbs
