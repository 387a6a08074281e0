// What a staged path sends: requests, reads of blocks, and pings.
#include <algorithm>
#include <cstring>
#include <functional>

#include "transport/verbs/stage_part.h"
#include "transport/verbs/staged_path.h"

namespace rekindle::transport::verbs {
namespace {

constexpr Duration kBlockWait = std::chrono::milliseconds(1);  // all bounce blocks are in use
// No answer for so long: is its NIC still there? While nothing is in the send queue, nobody says.
constexpr Duration kPingAfter = std::chrono::milliseconds(200);
// Its NIC is, and its thread is not. The engine's progress deadline comes first where it is
// shorter.
constexpr Duration kAnswerDeadline = std::chrono::seconds(10);

}  // namespace

// False: not now, because of the rate.
bool StagedPath::ask(std::size_t index) {
  Slot& slot = slots_[index];
  const Op& op = ops_[first_];
  const TimePoint now = std::chrono::steady_clock::now();
  std::uint64_t granted = limits_.block_bytes;
  if (op.next == kNone) granted = std::min(granted, op.total - op.position);
  const bool limited = limiter_ != nullptr && !proving_;
  if (limited) {
    granted = limiter_->take(granted, now);
    if (granted == 0) {
      wake_by(limiter_->ready_at(now));
      return false;
    }
  }
  take_parts(slot, granted);
  if (limited) limiter_->give_back(granted - slot.part.total_bytes());
  slot.sequence = ++sequence_;
  slot.asked_at = now;
  slot.state = Slot::State::kAsked;
  const StageRequest request{.slot = static_cast<std::uint16_t>(index),
                             .sequence = slot.sequence,
                             .region = slot.part.remote,
                             .offset = slot.part.remote_offset,
                             .stride = slot.part.remote_stride,
                             .run_bytes = static_cast<std::uint32_t>(slot.part.run_bytes),
                             .count = static_cast<std::uint32_t>(slot.part.count)};
  const auto message = control_->to_send(index);
  ibv_sge sge = control_->entry(message.first(encode(request, message)));
  ibv_send_wr wr{};
  wr.opcode = IBV_WR_SEND;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  slot.sending = post_send(Kind::kRequest, index, slot.sequence, wr);
  return true;
}

// The next part of the first op, with the whole of the ops after it that continue its runs: a
// message costs as much as some KiB on the wire. They share its fate.
void StagedPath::take_parts(Slot& slot, std::uint64_t max_bytes) {
  slot.op = first_;
  slot.op_count = 1;
  Op& op = ops_[first_];
  slot.part = next_part(op.read, op.position, max_bytes);
  const bool whole = slot.part.total_bytes() == op.total;
  ++op.outstanding;
  op.position += slot.part.total_bytes();
  if (op.position < op.total) return;
  std::uint16_t last = first_;
  leave_queue();
  while (whole && first_ != kNone && continues(slot.part, ops_[first_]) &&
         slot.part.total_bytes() + slot.part.run_bytes <= max_bytes) {
    const std::uint16_t next = first_;
    Op& more = ops_[next];
    if (slot.part.count == 1) {
      slot.part.remote_stride = more.read.remote_offset - slot.part.remote_offset;
      slot.part.local_stride = static_cast<std::uint64_t>(more.read.local - slot.part.local);
    }
    ++slot.part.count;
    ++slot.op_count;
    ++more.outstanding;
    more.position = more.total;
    leave_queue();
    last = ops_[last].next = next;
  }
}

bool StagedPath::continues(const ReadOp& part, const Op& op) const {
  const ReadOp& read = op.read;
  const std::uint64_t last = (part.count - 1) * part.remote_stride;
  const std::byte* const last_local = part.local + (part.count - 1) * part.local_stride;
  if (read.count != 1 || read.run_bytes != part.run_bytes || read.remote != part.remote)
    return false;
  if (std::less<>()(read.local, last_local + part.run_bytes) ||
      read.remote_offset < part.remote_offset + last) {
    return false;
  }
  return part.count == 1 ||
         (read.remote_offset - part.remote_offset - last == part.remote_stride &&
          static_cast<std::uint64_t>(read.local - last_local) == part.local_stride);
}

// One read of the whole block: to where the runs belong when one scatter list says so, else by way
// of a bounce block.
void StagedPath::plan_landing(Slot& slot) {
  ReadOp packed = slot.part;
  packed.remote_offset = 0;
  packed.remote_stride = packed.count == 1 ? 0 : packed.run_bytes;
  ExpandLimits expand;
  expand.request_bytes = expand.bounce_bytes = limits_.block_bytes;
  expand.max_sge = std::min(kMaxSge, connection_->max_sge());
  const auto total = static_cast<std::uint32_t>(packed.total_bytes());
  if (proving_) {  // also while all bounce blocks are in use
    slot.landing = {.wire_bytes = total, .payload_bytes = total, .sge_count = 1, .sges = {}};
    slot.landing.sges[0] = {reinterpret_cast<std::uint64_t>(packed.local), total,
                            bounce_->scratch().lkey};
    return;
  }
  OpCursor cursor(packed);
  cursor.next(packed, expand, *this, slot.landing);
  if (cursor.done()) return;
  slot.landing.wire_bytes = slot.landing.payload_bytes = total;
  slot.landing.payload_offset = 0;
  slot.landing.bounced = true;
}

void StagedPath::read_block(std::size_t index) {
  Slot& slot = slots_[index];
  plan_landing(slot);
  ibv_send_wr wr{};
  ibv_sge whole{};
  wr.sg_list = slot.landing.sges.data();
  wr.num_sge = static_cast<int>(slot.landing.sge_count);
  if (slot.landing.bounced) {
    slot.bounce = bounce_->acquire();
    if (slot.bounce.data == nullptr) {
      wake_by(std::chrono::steady_clock::now() + kBlockWait);
      return;
    }
    whole = {reinterpret_cast<std::uint64_t>(slot.bounce.data), slot.landing.wire_bytes,
             slot.bounce.lkey};
    wr.sg_list = &whole;
    wr.num_sge = 1;
  }
  wr.opcode = IBV_WR_RDMA_READ;
  wr.wr.rdma.remote_addr = stage_.blocks[index].address;
  wr.wr.rdma.rkey = stage_.blocks[index].key;
  slot.state = Slot::State::kReading;
  if (post_send(Kind::kRead, index, slot.sequence, wr)) return;
  // Not posted: nothing will be said of it.
  end_part(slot, OpStatus::kPeerLost);
}

// While the source gathers, its NIC has nothing to acknowledge, so ours would never miss it.
void StagedPath::watch_silence() {
  const auto oldest =
      std::min_element(slots_.begin(), slots_.end(), [](const Slot& a, const Slot& b) {
        const bool asked = a.state == Slot::State::kAsked;
        return asked != (b.state == Slot::State::kAsked) ? asked : a.asked_at < b.asked_at;
      });
  if (oldest->state != Slot::State::kAsked) return;
  const TimePoint now = std::chrono::steady_clock::now();
  if (now - oldest->asked_at >= kAnswerDeadline) {
    return stop(OpStatus::kPeerLost, "the source's NIC is there, but it answers no request");
  }
  if (!pinging_ && now - std::max(heard_at_, oldest->asked_at) >= kPingAfter) {
    ibv_sge sge = control_->entry(control_->scratch());
    ibv_send_wr wr{};
    wr.opcode = IBV_WR_RDMA_READ;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.wr.rdma.remote_addr = stage_.blocks.front().address;
    wr.wr.rdma.rkey = stage_.blocks.front().key;
    pinging_ = post_send(Kind::kPing, 0, 0, wr);
  }
  wake_by(pinging_ ? oldest->asked_at + kAnswerDeadline
                   : std::max(heard_at_, oldest->asked_at) + kPingAfter);
}

bool StagedPath::post_receive(std::size_t index) {
  ibv_sge sge = control_->entry(control_->to_receive(index));
  ibv_recv_wr request{};
  request.wr_id = std::uint64_t{static_cast<std::uint8_t>(Kind::kReceive)} << kKindShift | index;
  request.sg_list = &sge;
  request.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  return connection_->api().post_recv(connection_->queue_pair(0), &request, &bad) == 0;
}

// False: it failed, and the path has stopped.
bool StagedPath::post_send(Kind kind, std::size_t index, std::uint32_t sequence,
                           ibv_send_wr& request) {
  request.wr_id = std::uint64_t{sequence} << kSequenceShift |
                  std::uint64_t{static_cast<std::uint8_t>(kind)} << kKindShift | index;
  request.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  const int error = connection_->api().post_send(connection_->queue_pair(0), &request, &bad);
  if (error == 0) return true;
  stop(OpStatus::kPeerLost, fmt::format("post: {}", std::strerror(error)));
  return false;
}

}  // namespace rekindle::transport::verbs
