#include "transport/verbs/staged/staged_path.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>
#include <utility>

namespace rekindle::transport::verbs {
namespace {

constexpr std::uint64_t kProveBytes = BouncePool::kScratchBytes;
static_assert(BouncePool::kBlockBytes >= kMaxStageBlockBytes, "a part is bounced whole");
constexpr auto kProveNap = std::chrono::microseconds(50);
// After this time without an answer the path asks whether the source's NIC is still there. While
// nothing is in the send queue, no NIC reports a dead peer.
constexpr Duration kPingAfter = std::chrono::milliseconds(200);
// After this time the source's thread counts as gone. The engine's progress deadline comes first
// where it is shorter.
constexpr Duration kAnswerDeadline = std::chrono::seconds(10);

// REM_OP_ERR is about a block of the window, not about the region: another path may do better.
OpStatus read_status(ibv_wc_status status) {
  return status == IBV_WC_REM_OP_ERR ? OpStatus::kPeerLost : to_op_status(status);
}

}  // namespace

std::uint32_t stage_blocks_for(std::uint32_t send_depth) {
  // A request and a read of each block, and a ping.
  return std::min<std::uint32_t>(kMaxStageBlocks, send_depth > 0 ? (send_depth - 1) / 2 : 0);
}

Result<std::unique_ptr<StagedPath>> StagedPath::create(VerbsPathParts parts, StageOffer offer,
                                                       std::vector<RegionKey> stale) {
  const std::size_t blocks = offer.blocks.size();
  if (parts.connection->queue_pair_count() != 1 ||
      blocks > stage_blocks_for(parts.connection->send_depth())) {
    return fail(ErrorCode::kInvalid, "{}: the source stages {} blocks, more than asked for",
                parts.description, blocks);
  }
  std::vector<RemoteWindow> sizes;
  for (const auto& region : offer.regions) {
    sizes.push_back({region.key, 0, region.bytes, 0, {0}});
  }
  TRY(parts.windows, RemoteWindows::create(std::move(sizes), std::move(stale), 1));
  TRY(auto control, StageControl::create(parts.connection->rail().device()));
  parts.description += " (staged)";
  std::unique_ptr<StagedPath> path(
      new StagedPath(std::move(parts), std::move(offer), std::move(control)));
  for (std::size_t i = 0; i < blocks; ++i) {
    if (path->post_receive(i)) continue;
    return fail(ErrorCode::kUnavailable, "{}: post a receive to a queue pair", path->describe());
  }
  return path;
}

StagedPath::StagedPath(VerbsPathParts parts, StageOffer offer,
                       std::unique_ptr<StageControl> control)
    : VerbsPath(std::move(parts)),
      offer_(std::move(offer)),
      limits_{offer_.blocks.size(), offer_.block_bytes},
      control_(std::move(control)),
      slots_(offer_.blocks.size()),
      queue_(kMaxOps) {}

// The NIC may write to the messages until the queue pair is gone.
StagedPath::~StagedPath() { parts_.connection->destroy_queue_pairs(); }

Result<void> StagedPath::prove(TimePoint deadline) {
  if (offer_.regions.empty()) return {};
  const auto& region = offer_.regions.front();
  const ReadOp op{.remote = region.key,
                  .local = parts_.bounce->scratch().data,
                  .run_bytes = std::min(kProveBytes, region.bytes)};
  proving_ = true;
  TRY_VOID(post({&op, 1}));
  Completion done;
  bool late = false;
  while (poll({&done, 1}) == 0) {
    if (!late && std::chrono::steady_clock::now() >= deadline) {
      late = true;
      abort();
      // No op's memory is read into, so there is no need to wait for the flush.
      drain_by_force();
    }
    std::this_thread::sleep_for(kProveNap);
  }
  proving_ = false;
  if (late) {
    return fail(ErrorCode::kUnavailable, "{}: a first request was not answered in time",
                parts_.description);
  }
  if (done.status == OpStatus::kOk || done.status == OpStatus::kFault) return {};
  const std::string why = why_broken();
  return fail(to_error_code(done.status), "{}: a first request failed: {}", parts_.description,
              why.empty() ? to_string(done.status) : std::string_view(why));
}

void StagedPath::accept(std::uint16_t slot, const ReadOp& op, OpStatus status) {
  // Answers may have to be copied to their places, and nobody can copy to a device.
  if (status == OpStatus::kOk && op.in_device) status = OpStatus::kLocalFault;
  if (status != OpStatus::kOk || op.total_bytes() == 0) {
    op_slots_.report(slot, op.wr_id, status);
  } else {
    queue_.add(slot, op);
  }
}

// --- asking and reading

void StagedPath::pump() {
  for (std::size_t i = 0; i < slots_.size() && running(); ++i) {
    if (slots_[i].state == Slot::State::kAnswered) read_block(i);
  }
  for (std::size_t i = 0; i < slots_.size() && running() && !queue_.empty(); ++i) {
    if (slots_[i].state != Slot::State::kFree || slots_[i].sending) continue;
    if (!ask(i)) break;
  }
  if (running()) watch_silence();
}

// False: the rate lets nothing through now.
bool StagedPath::ask(std::size_t index) {
  Slot& slot = slots_[index];
  std::uint64_t granted = queue_.bytes_wanted(limits_.block_bytes);
  const bool limited = parts_.limiter != nullptr && !proving_;
  if (limited) granted = take_rate(granted);
  if (granted == 0) return false;
  slot.part = queue_.take(granted);
  const ReadOp& read = slot.part.read;
  if (limited) parts_.limiter->give_back(granted - read.total_bytes());
  slot.sequence = ++sequence_;
  slot.asked_at = std::chrono::steady_clock::now();
  slot.state = Slot::State::kAsked;
  const StageRequest request{.slot = static_cast<std::uint16_t>(index),
                             .sequence = slot.sequence,
                             .region = read.remote,
                             .offset = read.remote_offset,
                             .stride = read.remote_stride,
                             .run_bytes = static_cast<std::uint32_t>(read.run_bytes),
                             .count = static_cast<std::uint32_t>(read.count)};
  const auto message = control_->to_send(index);
  ibv_sge sge = control_->entry(message.first(encode(request, message)));
  ibv_send_wr wr{};
  wr.opcode = IBV_WR_SEND;
  wr.sg_list = &sge;
  wr.num_sge = 1;
  slot.sending = post_send(Kind::kRequest, index, slot.sequence, wr);
  return true;
}

// One read of the whole block: to the runs' own places when one scatter list can say so, else by
// way of a bounce block.
void StagedPath::plan_landing(Slot& slot) {
  ReadOp packed = slot.part.read;
  packed.remote_offset = 0;
  packed.remote_stride = packed.count == 1 ? 0 : packed.run_bytes;
  ExpandLimits expand;
  expand.request_bytes = expand.bounce_bytes = limits_.block_bytes;
  expand.max_sge = std::min(kMaxSge, parts_.connection->max_sge());
  const auto total = static_cast<std::uint32_t>(packed.total_bytes());
  // All bounce blocks may be in use.
  if (proving_) {
    slot.landing = {.wire_bytes = total, .payload_bytes = total, .sge_count = 1, .sges = {}};
    slot.landing.sges[0] = {reinterpret_cast<std::uint64_t>(packed.local), total,
                            parts_.bounce->scratch().lkey};
    return;
  }
  OpCursor cursor(packed, expand);
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
    slot.bounce = acquire_block();
    if (slot.bounce.data == nullptr) return;
    whole = {reinterpret_cast<std::uint64_t>(slot.bounce.data), slot.landing.wire_bytes,
             slot.bounce.lkey};
    wr.sg_list = &whole;
    wr.num_sge = 1;
  }
  wr.opcode = IBV_WR_RDMA_READ;
  wr.wr.rdma.remote_addr = offer_.blocks[index].address;
  wr.wr.rdma.rkey = offer_.blocks[index].key;
  slot.state = Slot::State::kReading;
  if (post_send(Kind::kRead, index, slot.sequence, wr)) return;
  // The read was not posted: no completion will come for it.
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
    wr.wr.rdma.remote_addr = offer_.blocks.front().address;
    wr.wr.rdma.rkey = offer_.blocks.front().key;
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
  return parts_.connection->api().post_recv(parts_.connection->queue_pair(0), &request, &bad) == 0;
}

// False: it failed, and the path has stopped.
bool StagedPath::post_send(Kind kind, std::size_t index, std::uint32_t sequence,
                           ibv_send_wr& request) {
  request.wr_id = std::uint64_t{sequence} << kSequenceShift |
                  std::uint64_t{static_cast<std::uint8_t>(kind)} << kKindShift | index;
  request.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad = nullptr;
  const int error =
      parts_.connection->api().post_send(parts_.connection->queue_pair(0), &request, &bad);
  if (error == 0) return true;
  stop(OpStatus::kPeerLost, fmt::format("post: {}", std::strerror(error)));
  return false;
}

// --- completions

void StagedPath::complete(const ibv_wc& completion) {
  const auto kind = static_cast<Kind>(completion.wr_id >> kKindShift & 0xffff);
  const auto index = static_cast<std::size_t>(completion.wr_id & 0xffff);
  const auto sequence = static_cast<std::uint32_t>(completion.wr_id >> kSequenceShift);
  if (index >= slots_.size()) return;
  Slot& slot = slots_[index];
  const bool good = completion.status == IBV_WC_SUCCESS;
  if (good) heard_at_ = std::chrono::steady_clock::now();
  if (kind == Kind::kPing) pinging_ = false;
  if (kind == Kind::kRequest) slot.sending = false;
  if (kind == Kind::kReceive && good) take_answer(index, completion.byte_len);
  if (kind == Kind::kRead && slot.state == Slot::State::kReading && slot.sequence == sequence) {
    end_part(slot,
             good ? land_part(slot)
                  : failure_status(completion.status, read_status(completion.status), stopped()));
  }
  if (good) return;
  if (kind == Kind::kPing && running()) {
    const auto waits = std::find_if(slots_.begin(), slots_.end(), [](const Slot& other) {
      return other.state == Slot::State::kAsked;
    });
    if (waits != slots_.end()) end_part(*waits, read_status(completion.status));
  }
  stop(OpStatus::kPeerLost, explain(completion.status));
}

void StagedPath::take_answer(std::size_t index, std::size_t bytes) {
  if (!running()) return;
  std::array<std::byte, kStageMessageBytes> message;
  std::memcpy(message.data(), control_->to_receive(index).data(), message.size());
  const auto answer =
      parse_stage_answer(StageBytes(message).first(std::min(bytes, message.size())), limits_);
  if (!answer) return stop(OpStatus::kPeerLost, answer.error().message());
  Slot& slot = slots_[answer->slot];
  const bool asked = slot.state == Slot::State::kAsked && slot.sequence == answer->sequence;
  const bool all = answer->status != OpStatus::kOk || answer->bytes == slot.part.read.total_bytes();
  if (!asked || !all) {
    return stop(OpStatus::kPeerLost, "the source answered a request that was not made");
  }
  if (!post_receive(index)) return stop(OpStatus::kPeerLost, "post a receive");
  if (answer->status != OpStatus::kOk) return end_part(slot, answer->status);
  slot.state = Slot::State::kAnswered;
}

// The bytes of the proof belong to no slice: they do not count as landed.
OpStatus StagedPath::land_part(const Slot& slot) {
  return proving_ ? OpStatus::kOk : land(slot.part.read, slot.landing, slot.bounce.data);
}

void StagedPath::end_part(Slot& slot, OpStatus status) {
  if (slot.bounce.data != nullptr) parts_.bounce->release(std::exchange(slot.bounce, {}));
  slot.state = Slot::State::kFree;
  queue_.end(slot.part, status, [this](std::uint16_t op, std::uint64_t wr_id, OpStatus how) {
    op_slots_.report(op, wr_id, how);
  });
}

// --- the end

// Only reads touch the memory of ops: parts that were asked for and are not read yet end at once.
void StagedPath::end_unsent() {
  for (Slot& slot : slots_) {
    const bool waits = slot.state == Slot::State::kAsked || slot.state == Slot::State::kAnswered;
    if (waits) end_part(slot, stopped());
  }
  queue_.end_rest(stopped(), [this](std::uint16_t op, std::uint64_t wr_id, OpStatus how) {
    op_slots_.report(op, wr_id, how);
  });
}

void StagedPath::end_outstanding() {
  for (Slot& slot : slots_) {
    if (slot.state == Slot::State::kReading) end_part(slot, stopped());
  }
}

}  // namespace rekindle::transport::verbs
