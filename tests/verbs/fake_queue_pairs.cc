#include <algorithm>
#include <cerrno>

#include "tests/verbs/fake_state.h"
#include "tests/verbs/fake_verbs.h"

// Queue pairs: made, moved from state to state with the checks of the kernel (ib_modify_qp_is_ok
// and the drivers'), failed and flushed.
namespace rekindle::transport::verbs {
namespace {

constexpr std::uint32_t kMaxPsn = 0xffffff;

struct Transition {
  ibv_qp_state from, to;
  int required, optional;
};

// Of RC. To RESET and ERR from anywhere, with the state alone.
constexpr Transition kTransitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
         IBV_QP_MIN_RNR_TIMER,
     IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    {IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_CUR_STATE | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER |
         IBV_QP_PATH_MIG_STATE},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE |
         IBV_QP_MIN_RNR_TIMER},
};

bool mask_allowed(ibv_qp_state from, ibv_qp_state to, int mask) {
  const int others = mask & ~IBV_QP_STATE;
  if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) return others == 0;
  for (const Transition& transition : kTransitions) {
    if (transition.from != from || transition.to != to) continue;
    return (others & transition.required) == transition.required &&
           (others & ~(transition.required | transition.optional)) == 0;
  }
  return false;
}

bool has_gid(const FakePort& port, std::uint32_t index) {
  return std::any_of(port.gids.begin(), port.gids.end(), [&](const FakeGid& gid) {
    return gid.index == index &&
           std::any_of(gid.bytes.begin(), gid.bytes.end(), [](auto byte) { return byte != 0; });
  });
}

bool address_allowed(const QpObject& qp, const ibv_ah_attr& address) {
  const FakePort& port = qp.owner->spec.ports[qp.attr.port_num - 1u];
  if (address.port_num != qp.attr.port_num) return false;
  if (address.is_global == 0) return port.infiniband && address.dlid != 0;
  return has_gid(port, address.grh.sgid_index);
}

bool values_allowed(const QpObject& qp, const ibv_qp_attr& attr, int mask) {
  const FakeDevice& spec = qp.owner->spec;
  const auto has = [&](int bit) { return (mask & bit) != 0; };
  if (has(IBV_QP_PORT) && (attr.port_num == 0 || attr.port_num > spec.ports.size())) return false;
  if (has(IBV_QP_PKEY_INDEX) && attr.pkey_index != 0) return false;
  if (has(IBV_QP_AV) && !address_allowed(qp, attr.ah_attr)) return false;
  if (has(IBV_QP_PATH_MTU)) {
    const FakePort& port = spec.ports[qp.attr.port_num - 1u];
    if (attr.path_mtu < IBV_MTU_256 || attr.path_mtu > port.max_mtu) return false;
  }
  if (has(IBV_QP_RQ_PSN) && attr.rq_psn > kMaxPsn) return false;
  if (has(IBV_QP_SQ_PSN) && attr.sq_psn > kMaxPsn) return false;
  if (has(IBV_QP_MAX_DEST_RD_ATOMIC) && attr.max_dest_rd_atomic > spec.attr.max_qp_rd_atom) {
    return false;
  }
  if (has(IBV_QP_MAX_QP_RD_ATOMIC) && attr.max_rd_atomic > spec.attr.max_qp_init_rd_atom) {
    return false;
  }
  if (has(IBV_QP_TIMEOUT) && attr.timeout > 31) return false;
  if (has(IBV_QP_RETRY_CNT) && attr.retry_cnt > 7) return false;
  if (has(IBV_QP_RNR_RETRY) && attr.rnr_retry > 7) return false;
  return !has(IBV_QP_MIN_RNR_TIMER) || attr.min_rnr_timer <= 31;
}

void assign(ibv_qp_attr& to, const ibv_qp_attr& from, int mask) {
  const auto has = [&](int bit) { return (mask & bit) != 0; };
  if (has(IBV_QP_PORT)) to.port_num = from.port_num;
  if (has(IBV_QP_PKEY_INDEX)) to.pkey_index = from.pkey_index;
  if (has(IBV_QP_ACCESS_FLAGS)) to.qp_access_flags = from.qp_access_flags;
  if (has(IBV_QP_AV)) to.ah_attr = from.ah_attr;
  if (has(IBV_QP_PATH_MTU)) to.path_mtu = from.path_mtu;
  if (has(IBV_QP_DEST_QPN)) to.dest_qp_num = from.dest_qp_num;
  if (has(IBV_QP_RQ_PSN)) to.rq_psn = from.rq_psn;
  if (has(IBV_QP_SQ_PSN)) to.sq_psn = from.sq_psn;
  if (has(IBV_QP_MAX_DEST_RD_ATOMIC)) to.max_dest_rd_atomic = from.max_dest_rd_atomic;
  if (has(IBV_QP_MAX_QP_RD_ATOMIC)) to.max_rd_atomic = from.max_rd_atomic;
  if (has(IBV_QP_TIMEOUT)) to.timeout = from.timeout;
  if (has(IBV_QP_RETRY_CNT)) to.retry_cnt = from.retry_cnt;
  if (has(IBV_QP_RNR_RETRY)) to.rnr_retry = from.rnr_retry;
  if (has(IBV_QP_MIN_RNR_TIMER)) to.min_rnr_timer = from.min_rnr_timer;
}

void forget_completions(CqObject& cq, const QpObject& qp) {
  std::erase_if(cq.entries, [&](const Completion& completion) { return completion.qp == &qp; });
}

// What every queue pair of the device needs, and what it may ask for.
int check_create(const FakeState& state, const DeviceObject& device, const ibv_qp_init_attr& attr) {
  const ibv_device_attr& limits = device.spec.attr;
  if (attr.qp_type != IBV_QPT_RC || attr.send_cq == nullptr || attr.recv_cq == nullptr ||
      attr.srq != nullptr) {
    return EINVAL;
  }
  const auto at_most = [](std::uint32_t value, int limit) {
    return value <= static_cast<std::uint32_t>(limit);
  };
  const ibv_qp_cap& cap = attr.cap;
  if (!at_most(cap.max_send_wr, limits.max_qp_wr) || !at_most(cap.max_recv_wr, limits.max_qp_wr) ||
      !at_most(cap.max_send_sge, limits.max_sge) || !at_most(cap.max_recv_sge, limits.max_sge) ||
      cap.max_inline_data > 1024) {
    return EINVAL;
  }
  const auto used = std::count_if(state.qps.begin(), state.qps.end(),
                                  [&](const auto& qp) { return qp.second->owner == &device; });
  return used >= limits.max_qp ? ENOMEM : 0;
}

void reset(QpObject& qp) {
  qp.sends.clear();
  qp.receives.clear();
  qp.posted = qp.freed = qp.receives_posted = qp.receives_freed = 0;
  qp.attr = {};
  forget_completions(qp.send_queue(), qp);
  forget_completions(qp.receive_queue(), qp);
}

ibv_wc flushed(const QpObject& qp, std::uint64_t id) {
  ibv_wc wc{};
  wc.wr_id = id;
  wc.status = IBV_WC_WR_FLUSH_ERR;
  wc.qp_num = qp.qp_num;
  return wc;
}

}  // namespace

ibv_qp* FakeVerbs::create_qp(ibv_pd* handle, ibv_qp_init_attr* attr) {
  Lock lock(state_.mutex);
  PdObject* const pd = state_.find(state_.pds, handle, "create_qp");
  int error = pd == nullptr ? EINVAL : 0;
  auto* const context = pd == nullptr ? nullptr : static_cast<ContextObject*>(pd->context);
  if (error == 0) error = begin_call(state_, lock, *context->owner, FakeCall::kCreateQp);
  if (error == 0) error = check_create(state_, *context->owner, *attr);
  if (error != 0) {
    errno = error;
    return nullptr;
  }
  auto qp = std::make_unique<QpObject>();
  qp->context = context;
  qp->qp_context = attr->qp_context;
  qp->pd = pd;
  qp->send_cq = attr->send_cq;
  qp->recv_cq = attr->recv_cq;
  qp->qp_num = state_.next_number++;
  qp->ibv_qp::state = IBV_QPS_RESET;
  qp->qp_type = attr->qp_type;
  qp->owner = context->owner;
  qp->cap = attr->cap;
  qp->signal_all = attr->sq_sig_all != 0;
  ++pd->children;
  ++qp->send_queue().users;
  ++qp->receive_queue().users;
  QpObject* const result = qp.get();
  state_.by_number[result->qp_num] = result;
  state_.qps.emplace(result, std::move(qp));
  return result;
}

int check_modify(const QpObject& qp, const ibv_qp_attr& attr, int mask) {
  const ibv_qp_state from = qp.ibv_qp::state;
  const ibv_qp_state to = (mask & IBV_QP_STATE) != 0 ? attr.qp_state : from;
  if ((mask & IBV_QP_CUR_STATE) != 0 && attr.cur_qp_state != from) return EINVAL;
  return mask_allowed(from, to, mask) && values_allowed(qp, attr, mask) ? 0 : EINVAL;
}

int FakeVerbs::modify_qp(ibv_qp* handle, ibv_qp_attr* attr, int mask) {
  Lock lock(state_.mutex);
  QpObject* qp = state_.find(state_.qps, handle, "modify_qp");
  if (qp == nullptr) return EINVAL;
  const int error = begin_call(state_, lock, *qp->owner, FakeCall::kModifyQp);
  if (error != 0) return error;
  qp = state_.find(state_.qps, handle, "modify_qp");  // it may have been held
  if (qp == nullptr) return EINVAL;
  if (const int wrong = check_modify(*qp, *attr, mask); wrong != 0) return wrong;
  assign(qp->attr, *attr, mask);
  if ((mask & IBV_QP_STATE) == 0) return 0;
  if (attr->qp_state == IBV_QPS_ERR) {
    fail_queue_pair(state_, *qp);
    return 0;
  }
  if (attr->qp_state == IBV_QPS_RESET) {
    remove_head(state_, *qp);
    reset(*qp);
  }
  qp->ibv_qp::state = attr->qp_state;
  // Who has been sending to it gets through from now on.
  if (state_.delivery == Delivery::kAtPost) run_all(state_, SIZE_MAX);
  return 0;
}

int FakeVerbs::destroy_qp(ibv_qp* handle) {
  Lock lock(state_.mutex);
  QpObject* qp = state_.find(state_.qps, handle, "destroy_qp");
  if (qp == nullptr) return EINVAL;
  const int error = begin_call(state_, lock, *qp->owner, FakeCall::kDestroyQp);
  if (error != 0 && !qp->owner->removed) return error;
  auto& context = *static_cast<ContextObject*>(qp->context);
  if (!wait_acked(state_, lock, qp->unacked)) {
    state_.problem("destroy_qp on {}: {} events are not acknowledged; a real one waits for ever",
                   context.owner->key, qp->unacked);
  }
  if (forget_queue_pair(state_, *qp) > 0) {
    state_.problem("destroy_qp on {}: windows are bound to it; soft-RoCE waits a minute then",
                   context.owner->key);
  }
  drop_events(context, static_cast<ibv_qp*>(qp));
  remove_head(state_, *qp);
  // Completions that no one polled go with it.
  forget_completions(qp->send_queue(), *qp);
  forget_completions(qp->receive_queue(), *qp);
  --qp->send_queue().users;
  --qp->receive_queue().users;
  --static_cast<PdObject*>(qp->pd)->children;
  state_.by_number.erase(qp->qp_num);
  state_.qps.erase(handle);
  return 0;
}

void fail_queue_pair(FakeState& state, QpObject& qp) {
  qp.ibv_qp::state = IBV_QPS_ERR;
  remove_head(state, qp);
  if (qp.owner->spec.flushes) flush(state, qp);
}

void flush(FakeState& state, QpObject& qp) {
  while (!qp.sends.empty()) {
    const SendRequest request = std::move(qp.sends.front());
    qp.sends.pop_front();
    push_completion(state, qp.send_queue(),
                    {flushed(qp, request.wr.wr_id), &qp, request.position + 1, false}, false);
  }
  while (!qp.receives.empty()) {
    const std::uint64_t id = qp.receives.front().id;
    qp.receives.pop_front();
    ibv_wc wc = flushed(qp, id);
    wc.opcode = IBV_WC_RECV;
    push_completion(state, qp.receive_queue(), {wc, &qp, 0, true}, false);
  }
}

void remove_head(FakeState& state, QpObject& qp) {
  if (!qp.sends.empty()) state.heads.erase(qp.sends.front().order);
}

void update_head(FakeState& state, QpObject& qp) {
  const bool runs = qp.ibv_qp::state == IBV_QPS_RTS && !qp.sends.empty();
  if (runs) state.heads[qp.sends.front().order] = &qp;
}

}  // namespace rekindle::transport::verbs
