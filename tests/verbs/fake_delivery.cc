#include <algorithm>
#include <cerrno>

#include "src/store/fault_guard.h"
#include "tests/verbs/fake_state.h"
#include "tests/verbs/fake_verbs.h"

// Requests: posted, and done by the one who owns the network.
namespace rekindle::transport::verbs {
namespace {

constexpr unsigned kRnrForEver = 7;
constexpr Duration kRetryEvery = std::chrono::milliseconds(1);  // by the thread, what is stuck

enum class Attempt { kDone, kNoAnswer, kNoReceive };

ibv_wc_opcode completed_opcode(ibv_wr_opcode opcode) {
  switch (opcode) {
    case IBV_WR_RDMA_READ:
      return IBV_WC_RDMA_READ;
    case IBV_WR_BIND_MW:
      return IBV_WC_BIND_MW;
    case IBV_WR_LOCAL_INV:
      return IBV_WC_LOCAL_INV;
    default:
      return IBV_WC_SEND;
  }
}

std::uint64_t bytes_of(const std::vector<ibv_sge>& entries) {
  std::uint64_t bytes = 0;
  for (const ibv_sge& entry : entries) bytes += entry.length;
  return bytes;
}

// A device keeps the pages that it has pinned, even when their file is truncated. Here they are
// gone, and nobody may rely on the bytes that are read from them.
void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  (void)store::find_mapping_fault([&] { std::memmove(to, from, bytes); });
}

// Pops the first request, reports it if it must be, and fails the queue pair at its first error.
void finish(FakeState& state, QpObject& qp, ibv_wc_status status) {
  remove_head(state, qp);
  const SendRequest request = std::move(qp.sends.front());
  qp.sends.pop_front();
  const bool signalled = qp.signal_all || (request.wr.send_flags & IBV_SEND_SIGNALED) != 0;
  if (signalled || status != IBV_WC_SUCCESS) {
    ibv_wc wc{};
    wc.wr_id = request.wr.wr_id;
    wc.status = status;
    wc.opcode = completed_opcode(request.wr.opcode);
    wc.qp_num = qp.qp_num;
    wc.byte_len = static_cast<std::uint32_t>(bytes_of(request.sges));
    push_completion(state, qp.send_queue(), {wc, &qp, request.position + 1, false}, false);
  }
  if (status != IBV_WC_SUCCESS) {
    // Its head is off the list, the others are not on it.
    qp.ibv_qp::state = IBV_QPS_ERR;
    if (qp.owner->spec.flushes) flush(state, qp);
    return;
  }
  update_head(state, qp);
}

// The responder refuses (IBTA class C): its queue pair fails, too.
void fail_responder(FakeState& state, QpObject& peer, ibv_event_type type) {
  ibv_async_event event{};
  event.event_type = type;
  event.element.qp = &peer;
  push_event(*static_cast<ContextObject*>(peer.context), event);
  fail_queue_pair(state, peer);
}

ibv_wc_status refuse(FakeState& state, QpObject& peer, ibv_wc_status status) {
  fail_responder(state, peer,
                 status == IBV_WC_REM_ACCESS_ERR ? IBV_EVENT_QP_ACCESS_ERR : IBV_EVENT_QP_REQ_ERR);
  return status;
}

ibv_wc_status do_read(FakeState& state, QpObject& qp, QpObject& peer, const SendRequest& request) {
  const std::uint64_t bytes = bytes_of(request.sges);
  if (bytes > qp.owner->spec.ports[qp.attr.port_num - 1u].max_message_bytes) {
    return IBV_WC_LOC_LEN_ERR;
  }
  if (qp.attr.max_rd_atomic == 0) return IBV_WC_LOC_QP_OP_ERR;
  if (qp.attr.max_rd_atomic > peer.attr.max_dest_rd_atomic ||
      (peer.attr.qp_access_flags & IBV_ACCESS_REMOTE_READ) == 0) {
    return refuse(state, peer, IBV_WC_REM_INV_REQ_ERR);
  }
  if (bytes == 0) return IBV_WC_SUCCESS;
  const auto& target = request.wr.wr.rdma;
  const std::byte* from = remote_address(peer, target.remote_addr, bytes, target.rkey);
  if (from == nullptr) return refuse(state, peer, IBV_WC_REM_ACCESS_ERR);
  for (const ibv_sge& entry : request.sges) {
    if (entry.length == 0) continue;
    std::byte* const to = local_address(qp, entry, Rights::kWriteLocal);
    if (to == nullptr) return IBV_WC_LOC_PROT_ERR;
    copy(to, from, entry.length);
    from += entry.length;
  }
  return IBV_WC_SUCCESS;
}

// The bytes of a SEND in one piece. False: a scatter entry is not allowed.
bool gather(QpObject& qp, const SendRequest& request, std::vector<std::byte>& message) {
  if (request.is_inline) {
    message = request.inlined;
    return true;
  }
  for (const ibv_sge& entry : request.sges) {
    if (entry.length == 0) continue;
    const std::byte* const from = local_address(qp, entry, Rights::kReadLocal);
    if (from == nullptr) return false;
    message.insert(message.end(), from, from + entry.length);
  }
  return true;
}

ibv_wc_status scatter(QpObject& peer, const ReceiveRequest& receive,
                      const std::vector<std::byte>& message) {
  if (message.size() > bytes_of(receive.sges)) return IBV_WC_LOC_LEN_ERR;
  std::size_t at = 0;
  for (const ibv_sge& entry : receive.sges) {
    const std::size_t bytes = std::min<std::size_t>(entry.length, message.size() - at);
    if (bytes == 0) break;
    std::byte* const to = local_address(peer, entry, Rights::kWriteLocal);
    if (to == nullptr) return IBV_WC_LOC_PROT_ERR;
    std::memcpy(to, message.data() + at, bytes);
    at += bytes;
  }
  return IBV_WC_SUCCESS;
}

ibv_wc_status do_send(FakeState& state, QpObject& qp, QpObject& peer, const SendRequest& request) {
  std::vector<std::byte> message;
  if (!gather(qp, request, message)) return IBV_WC_LOC_PROT_ERR;
  const ReceiveRequest receive = std::move(peer.receives.front());
  peer.receives.pop_front();
  ibv_wc wc{};
  wc.wr_id = receive.id;
  wc.status = scatter(peer, receive, message);
  wc.opcode = IBV_WC_RECV;
  wc.byte_len = static_cast<std::uint32_t>(message.size());
  wc.qp_num = peer.qp_num;
  wc.src_qp = qp.qp_num;
  if (request.wr.opcode == IBV_WR_SEND_WITH_IMM) {
    wc.wc_flags = IBV_WC_WITH_IMM;
    wc.imm_data = request.wr.imm_data;
  }
  const bool received = wc.status == IBV_WC_SUCCESS;
  const bool solicited = (request.wr.send_flags & IBV_SEND_SOLICITED) != 0;
  push_completion(state, peer.receive_queue(), {wc, &peer, 0, true}, solicited);
  if (received) return IBV_WC_SUCCESS;
  fail_queue_pair(state, peer);
  return wc.status == IBV_WC_LOC_LEN_ERR ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_OP_ERR;
}

Attempt attempt(FakeState& state, QpObject& qp) {
  SendRequest& request = qp.sends.front();
  switch (request.wr.opcode) {
    case IBV_WR_LOCAL_INV:
      finish(state, qp, invalidate_window(qp, request.wr.invalidate_rkey));
      return Attempt::kDone;
    case IBV_WR_BIND_MW:
      finish(state, qp, bind_window(state, qp, request.wr));
      return Attempt::kDone;
    default:
      break;
  }
  QpObject* const peer = find_peer(state, qp);
  if (peer == nullptr) return Attempt::kNoAnswer;
  if (request.wr.opcode == IBV_WR_RDMA_READ) {
    finish(state, qp, do_read(state, qp, *peer, request));
    return Attempt::kDone;
  }
  if (!peer->receives.empty()) {
    finish(state, qp, do_send(state, qp, *peer, request));
    return Attempt::kDone;
  }
  if (qp.attr.rnr_retry == kRnrForEver || request.rnr_attempts++ < qp.attr.rnr_retry) {
    return Attempt::kNoReceive;
  }
  finish(state, qp, IBV_WC_RNR_RETRY_EXC_ERR);
  return Attempt::kDone;
}

const FakePort* usable_port(const DeviceObject& device, std::uint8_t number) {
  if (device.removed || number == 0 || number > device.spec.ports.size()) return nullptr;
  const FakePort& port = device.spec.ports[number - 1u];
  return port.state == IBV_PORT_ACTIVE ? &port : nullptr;
}

bool owns_address(const FakePort& port, const ibv_ah_attr& address) {
  if (address.is_global == 0) return port.infiniband && port.lid == address.dlid;
  return std::any_of(port.gids.begin(), port.gids.end(), [&](const FakeGid& gid) {
    return std::equal(gid.bytes.begin(), gid.bytes.end(), std::begin(address.grh.dgid.raw));
  });
}

// Whether packets from `from` with this address carry the source that `to` expects.
bool comes_from(const FakePort& port, const ibv_ah_attr& from, const ibv_ah_attr& to) {
  if (!owns_address(port, to) || from.is_global != to.is_global) return false;
  if (from.is_global == 0) return true;
  return std::any_of(port.gids.begin(), port.gids.end(), [&](const FakeGid& gid) {
    return gid.index == from.grh.sgid_index &&
           std::equal(gid.bytes.begin(), gid.bytes.end(), std::begin(to.grh.dgid.raw));
  });
}

// The errors that the driver finds before the device sees the request. Nothing is posted then.
int check_post(const QpObject& qp, const ibv_send_wr& wr) {
  if (wr.num_sge < 0 || static_cast<std::uint32_t>(wr.num_sge) > qp.cap.max_send_sge) return EINVAL;
  if (qp.posted - qp.freed >= qp.cap.max_send_wr) return ENOMEM;
  const bool is_inline = (wr.send_flags & IBV_SEND_INLINE) != 0;
  switch (wr.opcode) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
      break;
    case IBV_WR_RDMA_READ:
      return is_inline ? EINVAL : 0;
    case IBV_WR_LOCAL_INV:
    case IBV_WR_BIND_MW:
      return wr.num_sge == 0 ? 0 : EINVAL;
    default:
      return EINVAL;
  }
  std::uint64_t bytes = 0;
  for (int i = 0; i < wr.num_sge; ++i) bytes += wr.sg_list[i].length;
  return is_inline && bytes > qp.cap.max_inline_data ? EINVAL : 0;
}

void enqueue(FakeState& state, QpObject& qp, const ibv_send_wr& wr) {
  SendRequest request;
  request.order = state.next_order++;
  request.position = qp.posted++;
  request.wr = wr;
  request.wr.next = nullptr;
  request.wr.sg_list = nullptr;
  request.sges.assign(wr.sg_list, wr.sg_list + wr.num_sge);
  request.is_inline = (wr.send_flags & IBV_SEND_INLINE) != 0;
  if (request.is_inline) {
    for (const ibv_sge& entry : request.sges) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr)
      const auto* const from = reinterpret_cast<const std::byte*>(entry.addr);
      request.inlined.insert(request.inlined.end(), from, from + entry.length);
    }
  }
  request.posted = SteadyClock().now();
  request.due = request.posted + state.delay;
  qp.sends.push_back(std::move(request));
}

}  // namespace

int FakeVerbs::post_send(ibv_qp* handle, ibv_send_wr* requests, ibv_send_wr** bad) {
  Lock lock(state_.mutex);
  *bad = requests;
  QpObject* qp = state_.find(state_.qps, handle, "post_send");
  if (qp == nullptr) return EINVAL;
  std::size_t left = SIZE_MAX;
  const int scripted = begin_call(state_, lock, *qp->owner, FakeCall::kPostSend, &left);
  if (scripted != 0 && left == SIZE_MAX) return scripted;
  const bool takes = qp->ibv_qp::state == IBV_QPS_RTS || qp->ibv_qp::state == IBV_QPS_ERR;
  int error = takes ? 0 : EINVAL;
  for (ibv_send_wr* wr = requests; wr != nullptr && error == 0; wr = wr->next) {
    *bad = wr;
    error = scripted != 0 && left-- == 0 ? scripted : check_post(*qp, *wr);
    if (error == 0) enqueue(state_, *qp, *wr);
  }
  if (error == 0) *bad = nullptr;
  if (qp->ibv_qp::state == IBV_QPS_ERR) {
    if (qp->owner->spec.flushes) flush(state_, *qp);
    return error;
  }
  update_head(state_, *qp);
  if (state_.delivery == Delivery::kAtPost) run_queue_pair(state_, *qp, SIZE_MAX);
  state_.changed.notify_all();
  return error;
}

int FakeVerbs::post_recv(ibv_qp* handle, ibv_recv_wr* requests, ibv_recv_wr** bad) {
  Lock lock(state_.mutex);
  *bad = requests;
  QpObject* qp = state_.find(state_.qps, handle, "post_recv");
  if (qp == nullptr) return EINVAL;
  std::size_t left = SIZE_MAX;
  const int scripted = begin_call(state_, lock, *qp->owner, FakeCall::kPostRecv, &left);
  if (scripted != 0 && left == SIZE_MAX) return scripted;
  int error = qp->ibv_qp::state == IBV_QPS_RESET ? EINVAL : 0;
  for (ibv_recv_wr* wr = requests; wr != nullptr && error == 0; wr = wr->next) {
    *bad = wr;
    const bool full = qp->receives_posted - qp->receives_freed >= qp->cap.max_recv_wr;
    const bool wide =
        wr->num_sge < 0 || static_cast<std::uint32_t>(wr->num_sge) > qp->cap.max_recv_sge;
    error = scripted != 0 && left-- == 0 ? scripted : wide ? EINVAL : full ? ENOMEM : 0;
    if (error != 0) break;
    ++qp->receives_posted;
    qp->receives.push_back({wr->wr_id, {wr->sg_list, wr->sg_list + wr->num_sge}});
  }
  if (error == 0) *bad = nullptr;
  if (qp->ibv_qp::state == IBV_QPS_ERR && qp->owner->spec.flushes) flush(state_, *qp);
  if (state_.delivery == Delivery::kAtPost) run_all(state_, SIZE_MAX);
  return error;
}

// nullptr: packets get lost, or are not for it.
QpObject* find_peer(FakeState& state, const QpObject& qp) {
  const FakePort* const here = usable_port(*qp.owner, qp.attr.port_num);
  const auto found = state.by_number.find(qp.attr.dest_qp_num);
  if (here == nullptr || found == state.by_number.end()) return nullptr;
  QpObject& peer = *found->second;
  const bool answers = peer.ibv_qp::state == IBV_QPS_RTR || peer.ibv_qp::state == IBV_QPS_RTS;
  const FakePort* const there = usable_port(*peer.owner, peer.attr.port_num);
  if (!answers || there == nullptr) return nullptr;
  const FakePortId from{qp.owner->key, qp.attr.port_num};
  const FakePortId to{peer.owner->key, peer.attr.port_num};
  if (state.cuts.contains({std::min(from, to), std::max(from, to)})) return nullptr;
  const bool meant = here->infiniband == there->infiniband &&
                     comes_from(*here, qp.attr.ah_attr, peer.attr.ah_attr) &&
                     comes_from(*there, peer.attr.ah_attr, qp.attr.ah_attr) &&
                     peer.attr.dest_qp_num == qp.qp_num && peer.attr.rq_psn == qp.attr.sq_psn;
  const bool fits = qp.attr.path_mtu == peer.attr.path_mtu &&
                    qp.attr.path_mtu <= here->active_mtu && qp.attr.path_mtu <= there->active_mtu;
  return meant && fits ? &peer : nullptr;
}

std::size_t run_queue_pair(FakeState& state, QpObject& qp, std::size_t limit) {
  std::size_t done = 0;
  while (done < limit && qp.ibv_qp::state == IBV_QPS_RTS && !qp.sends.empty()) {
    const Attempt result = attempt(state, qp);
    if (result == Attempt::kDone) {
      ++done;
    } else if (result == Attempt::kNoAnswer || state.delivery != Delivery::kAtPost ||
               qp.attr.rnr_retry == kRnrForEver) {
      break;
    }
  }
  return done;
}

std::size_t run_all(FakeState& state, std::size_t limit) {
  std::size_t done = 0;
  // One at a time, the oldest first. Stuck requests wait until the others were tried.
  std::uint64_t from = 0;
  while (done < limit) {
    const auto head = state.heads.lower_bound(from);
    if (head == state.heads.end()) break;
    const std::uint64_t order = head->first;
    const std::size_t now = run_queue_pair(state, *head->second, 1);
    done += now;
    if (now == 0) from = order + 1;
  }
  return done;
}

bool expire_head(FakeState& state, QpObject& qp) {
  if (qp.ibv_qp::state != IBV_QPS_RTS || qp.sends.empty()) return false;
  const ibv_wr_opcode opcode = qp.sends.front().wr.opcode;
  if (opcode == IBV_WR_BIND_MW || opcode == IBV_WR_LOCAL_INV) return false;
  if (find_peer(state, qp) != nullptr) return false;
  finish(state, qp, IBV_WC_RETRY_EXC_ERR);
  return true;
}

void run_thread(FakeState& state) {
  Lock lock(state.mutex);
  while (!state.stopping) {
    if (state.delivery != Delivery::kByThread || state.heads.empty()) {
      state.changed.wait(lock);
      continue;
    }
    const TimePoint now = SteadyClock().now();
    std::vector<QpObject*> due;
    TimePoint next = now + std::chrono::seconds(1);
    for (const auto& [order, qp] : state.heads) {
      SendRequest& request = qp->sends.front();
      if (request.due <= now) due.push_back(qp);
      next = std::min(next, request.due);
    }
    if (due.empty()) {
      state.changed.wait_until(lock, next);
      continue;
    }
    for (QpObject* const qp : due) {
      if (qp->ibv_qp::state != IBV_QPS_RTS || qp->sends.empty()) continue;
      if (run_queue_pair(state, *qp, 1) > 0 || qp->sends.empty()) continue;
      SendRequest& stuck = qp->sends.front();
      stuck.due = now + std::max(state.delay, kRetryEvery);
      if (state.expire_after && now - stuck.posted >= *state.expire_after) expire_head(state, *qp);
    }
  }
}

}  // namespace rekindle::transport::verbs
