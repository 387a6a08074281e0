#include "transport/verbs/staged_path.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <thread>
#include <utility>

#include "src/base/log.h"
#include "transport/guarded_op.h"
#include "transport/read_range.h"
#include "transport/verbs/stage_part.h"

namespace rekindle::transport::verbs {
namespace {

constexpr std::size_t kCompletionsPerPoll = 16;
constexpr Duration kDrainTime = std::chrono::seconds(2);
constexpr std::uint64_t kProveBytes = BouncePool::kScratchBytes;
static_assert(BouncePool::kBlockBytes >= kMaxStageBlockBytes, "a part is bounced whole");
constexpr auto kNap = std::chrono::microseconds(50);

// REM_OP_ERR is about a block of the window, not about the region: another path may do better.
OpStatus read_status(ibv_wc_status status) {
  return status == IBV_WC_REM_OP_ERR ? OpStatus::kPeerLost : to_op_status(status);
}

}  // namespace

std::uint32_t stage_blocks_for(std::uint32_t send_depth) {
  // A request and a read of each block, and a ping.
  return std::min<std::uint32_t>(kMaxStageBlocks, send_depth > 0 ? (send_depth - 1) / 2 : 0);
}

// --- making it

Result<std::unique_ptr<StagedPath>> StagedPath::create(StagedPathParts parts) {
  const std::size_t blocks = parts.stage.blocks.size();
  if (parts.connection->queue_pair_count() != 1 ||
      blocks > stage_blocks_for(parts.connection->send_depth())) {
    return fail(ErrorCode::kInvalid, "{}: the source stages {} blocks, more than asked for",
                parts.description, blocks);
  }
  std::vector<RemoteWindow> sizes;
  for (const auto& region : parts.stage.regions) {
    sizes.push_back({region.key, 0, region.bytes, 0, {0}});
  }
  TRY(auto regions, RemoteWindows::create(std::move(sizes), std::move(parts.stale), 1));
  TRY(auto control, StageControl::create(parts.connection->rail().device()));
  std::unique_ptr<StagedPath> path(
      new StagedPath(std::move(parts), std::move(control), std::move(regions)));
  for (std::size_t i = 0; i < blocks; ++i) {
    if (path->post_receive(i)) continue;
    return fail(ErrorCode::kUnavailable, "{}: post a receive to a queue pair", path->description_);
  }
  return path;
}

StagedPath::StagedPath(StagedPathParts parts, std::unique_ptr<StageControl> control,
                       RemoteWindows regions)
    : description_(parts.description + " (staged)"),
      home_{parts.connection->rail().name(), parts.connection->rail().device().cpus()},
      stage_(std::move(parts.stage)),
      regions_(std::move(regions)),
      limits_{stage_.blocks.size(), stage_.block_bytes},
      bounce_(std::move(parts.bounce)),
      limiter_(std::move(parts.limiter)),
      memory_(std::move(parts.memory), parts.connection->rail().device()),
      control_(std::move(control)),
      connection_(std::move(parts.connection)),
      slots_(stage_.blocks.size()),
      ops_(kMaxOps),
      done_(kMaxOps) {
  for (std::size_t op = kMaxOps; op > 0; --op) {
    free_ops_.push_back(static_cast<std::uint16_t>(op - 1));
  }
  memory_.refresh();
}

StagedPath::~StagedPath() {
  assert(in_flight() == 0 && "a Path with ops in flight was destroyed: abort() and poll() first");
}

Result<void> StagedPath::prove(TimePoint deadline) {
  if (stage_.regions.empty()) return {};
  const auto& region = stage_.regions.front();
  const ReadOp op{.remote = region.key,
                  .local = bounce_->scratch().data,
                  .run_bytes = std::min(kProveBytes, region.bytes)};
  proving_ = true;
  TRY_VOID(post({&op, 1}));
  Completion done;
  bool late = false;
  while (poll({&done, 1}) == 0) {
    if (!late && std::chrono::steady_clock::now() >= deadline) {
      late = true;
      abort();
      drain_by_ = {};  // nobody's memory is read into: no need to wait for the flush
    }
    std::this_thread::sleep_for(kNap);
  }
  proving_ = false;
  bytes_landed_ = 0;
  if (late) {
    return fail(ErrorCode::kUnavailable, "{}: a first request was not answered in time",
                description_);
  }
  if (done.status == OpStatus::kOk || done.status == OpStatus::kFault) return {};
  return fail(to_error_code(done.status), "{}: a first request failed: {}", description_,
              why_broken_.empty() ? to_string(done.status) : std::string_view(why_broken_));
}

// --- taking ops

OpStatus StagedPath::check(const ReadOp& op) const {
  const auto region = regions_.region(op.remote);
  if (region.status != OpStatus::kOk) return region.status;
  const StridedRange range{op.remote_offset, op.run_bytes, op.count, op.remote_stride};
  return fits(range, region.bytes) ? OpStatus::kOk : OpStatus::kInvalid;
}

void StagedPath::accept(const ReadOp& op) {
  const std::uint16_t slot = free_ops_.back();
  free_ops_.pop_back();
  ++taken_;
  Op& state = ops_[slot];
  state = {};
  state.status = check(op);
  if (state.status == OpStatus::kOk) {
    state.read = with_merged_runs(op);
    state.total = op.total_bytes();
  } else {
    state.read = op;
  }
  if (state.total == 0) return finish_if_over(slot);
  (first_ == kNone ? first_ : ops_[last_].next) = slot;
  last_ = slot;
}

Result<std::size_t> StagedPath::post(std::span<const ReadOp> ops) {
  if (stopped_ == OpStatus::kOk && connection_->rail_moved()) {
    stop(OpStatus::kPeerLost, connection_->why_moved());
  }
  if (stopped_ != OpStatus::kOk) {
    return fail(ErrorCode::kPeerLost, "{}: {}", description_,
                why_broken_.empty() ? "aborted" : why_broken_);
  }
  std::size_t taken = 0;
  while (taken < ops.size() && !free_ops_.empty() && in_flight() < kMaxOps) accept(ops[taken++]);
  if (taken > 0) pump();
  return taken;
}

// --- asking and reading: staged_requests.cc

void StagedPath::pump() {
  wake_at_.reset();
  memory_.refresh();
  for (std::size_t i = 0; i < slots_.size() && stopped_ == OpStatus::kOk; ++i) {
    if (slots_[i].state == Slot::State::kAnswered) read_block(i);
  }
  for (std::size_t i = 0; i < slots_.size() && stopped_ == OpStatus::kOk && first_ != kNone; ++i) {
    if (slots_[i].state != Slot::State::kFree || slots_[i].sending) continue;
    if (!ask(i)) break;
  }
  if (stopped_ == OpStatus::kOk) watch_silence();
}

// --- completions

std::size_t StagedPath::poll(std::span<Completion> out) {
  if (stopped_ == OpStatus::kOk && connection_->rail_moved()) {
    stop(OpStatus::kPeerLost, connection_->why_moved());
  }
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

bool StagedPath::drain_completions() {
  std::array<ibv_wc, kCompletionsPerPoll> completions;
  const int count = connection_->api().poll_cq(
      connection_->cq(), static_cast<int>(completions.size()), completions.data());
  if (count < 0) {
    stop(OpStatus::kPeerLost, "the completion queue is broken");
    drain_by_ = {};
    return false;
  }
  for (int i = 0; i < count; ++i) complete(completions[static_cast<std::size_t>(i)]);
  if (count > 0 && armed_ && connection_->take_event()) armed_ = false;
  return count > 0;
}

void StagedPath::complete(const ibv_wc& wc) {
  const auto kind = static_cast<Kind>(wc.wr_id >> kKindShift & 0xffff);
  const auto index = static_cast<std::size_t>(wc.wr_id & 0xffff);
  const auto sequence = static_cast<std::uint32_t>(wc.wr_id >> kSequenceShift);
  if (index >= slots_.size()) return;
  Slot& slot = slots_[index];
  const bool good = wc.status == IBV_WC_SUCCESS;
  if (good) heard_at_ = std::chrono::steady_clock::now();
  if (kind == Kind::kPing) pinging_ = false;
  if (kind == Kind::kRequest) slot.sending = false;
  if (kind == Kind::kReceive && good) take_answer(index, wc.byte_len);
  if (kind == Kind::kRead && slot.state == Slot::State::kReading && slot.sequence == sequence) {
    const bool flushed = wc.status == IBV_WC_WR_FLUSH_ERR && stopped_ != OpStatus::kOk;
    // After abort() nobody asks any more why a read did not make it.
    const bool ours = flushed || stopped_ == OpStatus::kAborted;
    end_part(slot, good ? land(slot) : ours ? stopped_ : read_status(wc.status));
  }
  if (good) return;
  if (kind == Kind::kPing && stopped_ == OpStatus::kOk) {
    const auto waits = std::find_if(slots_.begin(), slots_.end(), [](const Slot& other) {
      return other.state == Slot::State::kAsked;
    });
    if (waits != slots_.end()) end_part(*waits, read_status(wc.status));
  }
  stop(OpStatus::kPeerLost, explain(wc.status));
}

void StagedPath::take_answer(std::size_t index, std::size_t bytes) {
  if (stopped_ != OpStatus::kOk) return;
  std::array<std::byte, kStageMessageBytes> message;
  std::memcpy(message.data(), control_->to_receive(index).data(), message.size());
  const auto answer =
      parse_stage_answer(StageBytes(message).first(std::min(bytes, message.size())), limits_);
  if (!answer) return stop(OpStatus::kPeerLost, answer.error().message());
  Slot& slot = slots_[answer->slot];
  const bool asked = slot.state == Slot::State::kAsked && slot.sequence == answer->sequence;
  const bool all = answer->status != OpStatus::kOk || answer->bytes == slot.part.total_bytes();
  if (!asked || !all) return stop(OpStatus::kPeerLost, "the source answered what was not asked");
  if (!post_receive(index)) return stop(OpStatus::kPeerLost, "post a receive");
  if (answer->status != OpStatus::kOk) return end_part(slot, answer->status);
  slot.state = Slot::State::kAnswered;
}

OpStatus StagedPath::land(const Slot& slot) {
  if (slot.landing.bounced) {
    const OpStatus status =
        guard_op(slot.part, [&] { scatter(slot.part, slot.landing, slot.bounce.data); });
    if (status != OpStatus::kOk) return status;
  }
  bytes_landed_ += slot.landing.payload_bytes;
  return OpStatus::kOk;
}

void StagedPath::end_part(Slot& slot, OpStatus status) {
  if (slot.bounce.data != nullptr) bounce_->release(std::exchange(slot.bounce, {}));
  slot.state = Slot::State::kFree;
  std::uint16_t index = std::exchange(slot.op, kNone);
  for (; slot.op_count > 0; --slot.op_count) {
    Op& op = ops_[index];
    const std::uint16_t next = op.next;
    --op.outstanding;
    if (op.status == OpStatus::kOk) op.status = status;
    // The rest of an op that has failed is not asked for. Only the first op of the queue has parts.
    if (op.status != OpStatus::kOk && first_ == index) leave_queue();
    finish_if_over(index);
    index = next;
  }
}

void StagedPath::leave_queue() {
  first_ = std::exchange(ops_[first_].next, kNone);
  if (first_ == kNone) last_ = kNone;
}

void StagedPath::finish_if_over(std::uint16_t slot) {
  const Op& op = ops_[slot];
  if (op.outstanding > 0) return;
  if (op.status == OpStatus::kOk && op.position < op.total) return;
  done_[(done_head_ + done_count_++) % kMaxOps] = {op.read.wr_id, op.status};
  free_ops_.push_back(slot);
}

// --- the end

// Only reads touch the memory of ops: what was asked for and not read yet is over at once.
void StagedPath::stop(OpStatus status, std::string why) {
  if (stopped_ != OpStatus::kOk) return;
  stopped_ = status;
  why_broken_ = std::move(why);
  drain_by_ = std::chrono::steady_clock::now() + kDrainTime;
  connection_->stop();
  for (Slot& slot : slots_) {
    const bool waits = slot.state == Slot::State::kAsked || slot.state == Slot::State::kAnswered;
    if (waits) end_part(slot, stopped_);
  }
  while (first_ != kNone) {
    const std::uint16_t op = first_;
    leave_queue();
    if (ops_[op].status == OpStatus::kOk) ops_[op].status = stopped_;
    finish_if_over(op);
  }
}

void StagedPath::force_drain() {
  log::warn("verbs.forced_drain", "path", description_, "hint",
            "the NIC did not flush its queue; its queue pairs were destroyed");
  connection_->destroy_queue_pairs();
  for (Slot& slot : slots_) {
    if (slot.state == Slot::State::kReading) end_part(slot, stopped_);
  }
}

// --- sleeping

bool StagedPath::arm() {
  if (armed_ && connection_->take_event()) armed_ = false;
  if (!armed_) {
    connection_->arm();
    armed_ = true;
  }
  return !drain_completions() && done_count_ == 0;
}

void StagedPath::wake_by(TimePoint at) { wake_at_ = std::min(wake_at_.value_or(at), at); }

std::optional<TimePoint> StagedPath::wake_at() const {
  if (stopped_ != OpStatus::kOk && in_flight() > 0) return drain_by_;
  return wake_at_;
}

}  // namespace rekindle::transport::verbs
