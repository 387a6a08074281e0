#include "transport/verbs/direct/direct_path.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace rekindle::transport::verbs {

DirectPath::DirectPath(VerbsPathParts parts, const ExpandLimits& limits)
    : VerbsPath(std::move(parts)), limits_(limits), ops_(kMaxOps) {
  for (std::size_t i = 0; i < parts_.connection->queue_pair_count(); ++i) {
    queues_.push_back({parts_.connection->queue_pair(i),
                       SendQueue(static_cast<std::uint32_t>(i), parts_.connection->send_depth())});
  }
}

std::uint64_t DirectPath::remote_span(RegionKey region, std::uint64_t offset) const {
  const RemoteWindow& window = parts_.windows.at(region, offset);
  return window.offset + window.bytes - offset;
}

void DirectPath::accept(std::uint16_t slot, const ReadOp& op, OpStatus status) {
  auto lightest =
      std::min_element(queues_.begin(), queues_.end(),
                       [](const Queue& a, const Queue& b) { return a.open_bytes < b.open_bytes; });
  Op& state = ops_[slot];
  state.read = op;
  state.window = nullptr;
  state.outstanding = 0;
  state.next = kNone;
  state.status = status;
  state.cursor = status == OpStatus::kOk ? OpCursor(op, limits_) : OpCursor();
  state.bytes = state.cursor.payload_left();
  lightest->open_bytes += state.bytes;
  if (state.cursor.done()) {
    finish_if_over(*lightest, slot);
    return;
  }
  (lightest->first == kNone ? lightest->first : ops_[lightest->last].next) = slot;
  lightest->last = slot;
}

// --- posting requests

void DirectPath::pump() {
  for (std::size_t i = 0; i < queues_.size() && running(); ++i) pump_queue(i);
}

void DirectPath::pump_queue(std::size_t index) {
  Queue& queue = queues_[index];
  bool more = true;
  while (more && running()) {
    more = queue.first != kNone && !queue.sent.full() && push_request(queue, index);
    if (more && !queue.sent.chain_full()) continue;
    unposted_.clear();
    const int error = queue.sent.flush(parts_.connection->api(), queue.queue_pair, unposted_);
    if (error == 0) continue;
    for (const auto& request : unposted_) retire(queue, request, OpStatus::kPeerLost);
    stop(OpStatus::kPeerLost, fmt::format("post: {}", std::strerror(error)));
    if (queue.sent.silent()) drain_by_force();
  }
}

// False: the request has to wait for a bounce block or for the rate, or its op has failed.
bool DirectPath::push_request(Queue& queue, std::size_t index) {
  const std::uint16_t slot = queue.first;
  Op& op = ops_[slot];
  // An op that has failed ends when its outstanding requests have come back.
  if (op.status != OpStatus::kOk) return false;
  const OpCursor before = op.cursor;
  std::uint64_t granted = 0;
  if (parts_.limiter == nullptr) {
    op.cursor.next(op.read, limits_, *this, request_);
  } else {
    ExpandLimits limits = limits_;
    granted = take_rate(std::min<std::uint64_t>(before.payload_left(), limits.request_bytes));
    if (granted == 0) return false;
    limits.request_bytes = static_cast<std::uint32_t>(granted);
    limits.bounce_bytes = std::min(limits.bounce_bytes, limits.request_bytes);
    op.cursor.next(op.read, limits, *this, request_);
  }
  if (request_.bounced && op.read.in_device) {
    // The device of this path has not registered the memory.
    if (parts_.limiter != nullptr) parts_.limiter->give_back(granted);
    op.cursor = before;
    op.status = OpStatus::kLocalFault;
    finish_if_over(queue, slot);
    return false;
  }
  BouncePool::Block block;
  if (request_.bounced) block = acquire_block();
  const bool waits = request_.bounced && block.data == nullptr;
  if (parts_.limiter != nullptr)
    parts_.limiter->give_back(waits ? granted : granted - request_.wire_bytes);
  if (waits) {
    op.cursor = before;
    return false;
  }
  ++op.outstanding;
  if (op.window == nullptr || request_.remote_offset - op.window->offset >= op.window->bytes) {
    op.window = &parts_.windows.at(op.read.remote, request_.remote_offset);
  }
  queue.sent.add(slot, request_, block,
                 op.window->address + (request_.remote_offset - op.window->offset),
                 op.window->key(index), op.cursor.done());
  if (op.cursor.done()) leave_queue(queue);
  return true;
}

void DirectPath::leave_queue(Queue& queue) {
  Op& op = ops_[queue.first];
  queue.first = std::exchange(op.next, kNone);
  if (queue.first == kNone) queue.last = kNone;
}

// --- completions

void DirectPath::complete(const ibv_wc& completion) {
  const std::uint64_t tag = completion.wr_id >> 32;
  if (tag >= queues_.size()) return;
  Queue& queue = queues_[tag];
  bool is_last = false;
  while (!is_last) {
    const SentRequest* const request = queue.sent.retire(completion.wr_id, is_last);
    if (request == nullptr) return;
    if (!is_last || completion.status == IBV_WC_SUCCESS) {
      retire(queue, *request, OpStatus::kOk);
      continue;
    }
    retire(queue, *request,
           failure_status(completion.status, to_op_status(completion.status), stopped()));
    stop(OpStatus::kPeerLost, explain(completion.status));
  }
}

void DirectPath::retire(Queue& queue, const SentRequest& request, OpStatus status) {
  Op& op = ops_[request.op];
  if (status == OpStatus::kOk && !request.bounced) {
    count_landed(request.payload_bytes);
  } else if (status == OpStatus::kOk) {
    ReadRequest landed;
    landed.wire_bytes = request.wire_bytes;
    landed.payload_bytes = request.payload_bytes;
    landed.payload_offset = request.payload_offset;
    landed.bounced = true;
    status = land(op.read, landed, request.block.data);
  }
  if (request.block.data != nullptr) parts_.bounce->release(request.block);
  --op.outstanding;
  if (op.status == OpStatus::kOk) op.status = status;
  finish_if_over(queue, request.op);
}

// Reports the op once nothing of it is out and nothing more will be sent.
void DirectPath::finish_if_over(Queue& queue, std::uint16_t slot) {
  Op& op = ops_[slot];
  if (op.outstanding > 0) return;
  if (!op.cursor.done() && op.status == OpStatus::kOk && running()) return;
  if (!op.cursor.done()) {
    if (queue.first == slot) leave_queue(queue);
    if (op.status == OpStatus::kOk) op.status = stopped();
  }
  queue.open_bytes -= op.bytes;
  op_slots_.report(slot, op.read.wr_id, op.status);
}

// --- the end

void DirectPath::end_unsent() {
  for (auto& queue : queues_) {
    for (std::uint16_t slot = queue.first; slot != kNone;) {
      const std::uint16_t next = ops_[slot].next;
      finish_if_over(queue, slot);
      slot = next;
    }
  }
}

void DirectPath::end_outstanding() {
  for (auto& queue : queues_) {
    while (const SentRequest* const request = queue.sent.drop()) retire(queue, *request, stopped());
  }
}

}  // namespace rekindle::transport::verbs
