#include "transport/verbs/link/verbs_connection.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>

namespace rekindle::transport::verbs {
namespace {

// 4.096 µs * 2^15 = 134 ms without an answer, six times over: a missing peer is reported after
// about a second. The engine's progress deadline comes first where it is shorter.
constexpr std::uint8_t kAckTimeout = 15;
constexpr std::uint8_t kRetries = 6;                  // 7 is for ever on soft-RoCE
constexpr std::uint8_t kReceiverNotReadyRetries = 6;  // 7 would be for ever
constexpr std::uint8_t kReceiverNotReadyTimer = 12;   // 0.64 ms
constexpr std::uint32_t kNumberMask = 0xff'ffff;      // queue pair and packet numbers: 24 bits
constexpr std::uint8_t kHopLimit = 64;
constexpr std::ptrdiff_t kSubnetPrefixBytes = 8;  // of an InfiniBand GID

Error verbs_error(int error, const Rail& rail, std::string_view what) {
  const ErrorCode code = error == ENOMEM || error == ENOSPC || error == EMFILE
                             ? ErrorCode::kExhausted
                             : ErrorCode::kUnavailable;
  return {code, fmt::format("{}: {}: {}", rail.name(), what, std::strerror(error))};
}

std::uint32_t random_packet_number() { return std::random_device{}() & kNumberMask; }

}  // namespace

ibv_mtu to_ibv_mtu(std::uint32_t bytes) {
  if (bytes >= 4096) return IBV_MTU_4096;
  if (bytes >= 2048) return IBV_MTU_2048;
  if (bytes >= 1024) return IBV_MTU_1024;
  return bytes >= 512 ? IBV_MTU_512 : IBV_MTU_256;
}

OpStatus to_op_status(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return OpStatus::kOk;
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_INV_RD_REQ_ERR:
      return OpStatus::kStale;
    case IBV_WC_REM_OP_ERR:
      return OpStatus::kFault;
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
      return OpStatus::kLocalFault;
    default:  // LOC_QP_OP_ERR, too: soft-RoCE lost its route, but the memory is intact
      return OpStatus::kPeerLost;
  }
}

std::string explain(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
      return "retry exceeded: the peer's NIC does not answer";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "RNR retry exceeded: the peer takes no messages";
    case IBV_WC_REM_ACCESS_ERR:
      return "remote access error: the key is not good any more";
    case IBV_WC_LOC_QP_OP_ERR:
      return "the NIC cannot send: its address or route is gone";
    default:
      return ibv_wc_status_str(status);
  }
}

Result<std::unique_ptr<Connection>> Connection::create(Rail& rail,
                                                       const ConnectionOptions& options) {
  std::unique_ptr<Connection> connection(new Connection(rail, options));
  TRY_VOID(connection->make());
  return connection;
}

Result<void> Connection::make() {
  const Rail::State state = rail_.state();
  if (!state.up) return fail(ErrorCode::kUnavailable, "{}: {}", rail_.name(), state.why_down);
  epoch_ = state.epoch;
  mtu_bytes_ = state.mtu_bytes;
  gid_index_ = state.address.gid_index;
  Device& device = rail_.device();
  const DeviceLimits& limits = device.limits();
  options_.send_depth = std::min(options_.send_depth, limits.max_qp_wr);
  options_.recv_depth = std::min(options_.recv_depth, limits.max_qp_wr);
  options_.max_sge = std::min(options_.max_sge, limits.max_sge);

  channel_ = ChannelHandle(api().create_comp_channel(device.context()), {&api()});
  if (!channel_) return fail(verbs_error(errno, rail_, "create a completion channel"));
  const int flags = ::fcntl(channel_->fd, F_GETFL);
  if (flags < 0 || ::fcntl(channel_->fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    return fail(verbs_error(errno, rail_, "make the completion channel non-blocking"));
  }
  const std::uint64_t entries = std::uint64_t{options_.send_depth + options_.recv_depth} *
                                std::max<std::size_t>(options_.queue_pairs, 1);
  if (entries > limits.max_cqe) {
    return fail(ErrorCode::kExhausted, "{}: needs a completion queue of {}, the device allows {}",
                rail_.name(), entries, limits.max_cqe);
  }
  const int vectors = std::max(device.context()->num_comp_vectors, 1);
  const int vector = static_cast<int>(std::random_device{}() % static_cast<unsigned>(vectors));
  cq_ = CqHandle(
      api().create_cq(device.context(), static_cast<int>(entries), this, channel_.get(), vector),
      {&api()});
  if (!cq_) return fail(verbs_error(errno, rail_, "create a completion queue"));
  for (std::size_t i = 0; i < options_.queue_pairs; ++i) {
    const auto made = make_queue_pair();
    if (!made && queue_pairs_.empty()) return made;
    if (!made) break;  // fewer will do
  }
  return {};
}

Result<void> Connection::make_queue_pair() {
  ibv_qp_init_attr attr{};
  attr.send_cq = attr.recv_cq = cq_.get();
  attr.qp_type = IBV_QPT_RC;
  attr.sq_sig_all = 0;
  attr.cap = {options_.send_depth, options_.recv_depth, options_.max_sge, 1, options_.inline_bytes};
  QueuePair pair;
  ibv_pd* const domain = options_.domain != nullptr ? options_.domain : rail_.device().pd();
  pair.qp = QpHandle(api().create_qp(domain, &attr), {&api()});
  if (!pair.qp) return fail(verbs_error(errno, rail_, "create a queue pair"));
  pair.end = {pair.qp->qp_num, random_packet_number()};

  ibv_qp_attr init{};
  init.qp_state = IBV_QPS_INIT;
  init.port_num = rail_.port();
  init.qp_access_flags = IBV_ACCESS_REMOTE_READ;  // the end that reads answers none: see connect()
  const int error = api().modify_qp(
      pair.qp.get(), &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (error != 0) return fail(verbs_error(error, rail_, "queue pair to INIT"));
  queue_pairs_.push_back(std::move(pair));
  return {};
}

std::vector<QueuePairEnd> Connection::ends() const {
  std::vector<QueuePairEnd> ends;
  for (const auto& pair : queue_pairs_) ends.push_back(pair.end);
  return ends;
}

Result<void> Connection::connect(const RemoteEnd& remote, ConnectionRole role) {
  if (remote.queue_pairs.empty() || remote.queue_pairs.size() > queue_pairs_.size()) {
    return fail(ErrorCode::kInvalid, "{}: the peer has {} queue pairs for {} of ours", rail_.name(),
                remote.queue_pairs.size(), queue_pairs_.size());
  }
  queue_pairs_.resize(remote.queue_pairs.size());
  for (std::size_t i = 0; i < queue_pairs_.size(); ++i) {
    TRY_VOID(to_ready_to_receive(queue_pairs_[i], remote, remote.queue_pairs[i], role));
    TRY_VOID(to_ready_to_send(queue_pairs_[i], remote, role));
  }
  return {};
}

Result<void> Connection::to_ready_to_receive(QueuePair& pair, const RemoteEnd& remote,
                                             QueuePairEnd peer, ConnectionRole role) const {
  const FabricOptions& options = rail_.device().fabric_options();
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = to_ibv_mtu(std::min(remote.mtu_bytes, mtu_bytes_));
  attr.dest_qp_num = peer.number & kNumberMask;
  attr.rq_psn = peer.packet_number & kNumberMask;
  attr.max_dest_rd_atomic = role == ConnectionRole::kServes ? remote.rd_atomic : 0;
  attr.min_rnr_timer = kReceiverNotReadyTimer;
  attr.qp_access_flags = role == ConnectionRole::kServes ? IBV_ACCESS_REMOTE_READ : 0;
  attr.ah_attr.port_num = rail_.port();
  attr.ah_attr.sl = static_cast<std::uint8_t>(options.service_level);
  attr.ah_attr.dlid = remote.address.lid;
  const auto own = rail_.state().address;
  const bool routed = !std::equal(own.gid.begin(), own.gid.begin() + kSubnetPrefixBytes,
                                  remote.address.gid.begin());
  if (remote.address.link == LinkLayer::kEthernet || routed) {
    attr.ah_attr.is_global = 1;
    std::memcpy(attr.ah_attr.grh.dgid.raw, remote.address.gid.data(), remote.address.gid.size());
    attr.ah_attr.grh.sgid_index = gid_index_;
    attr.ah_attr.grh.hop_limit = kHopLimit;
    attr.ah_attr.grh.traffic_class = static_cast<std::uint8_t>(options.traffic_class);
  }
  const int error =
      api().modify_qp(pair.qp.get(), &attr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER | IBV_QP_ACCESS_FLAGS);
  if (error == 0) return {};
  if (error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH) {
    return fail(ErrorCode::kUnavailable, "no route from {} ({}) to {}: {}", rail_.name(),
                to_string(rail_.state().address), to_string(remote.address), std::strerror(error));
  }
  return fail(verbs_error(error, rail_, "queue pair to RTR towards " + to_string(remote.address)));
}

Result<void> Connection::to_ready_to_send(QueuePair& pair, const RemoteEnd& remote,
                                          ConnectionRole role) const {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = pair.end.packet_number;
  attr.timeout = kAckTimeout;
  attr.retry_cnt = kRetries;
  attr.rnr_retry = kReceiverNotReadyRetries;
  attr.max_rd_atomic = role == ConnectionRole::kReads ? remote.rd_atomic : 0;
  const int error =
      api().modify_qp(pair.qp.get(), &attr,
                      IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                          IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
  if (error != 0) return fail(verbs_error(error, rail_, "queue pair to RTS"));
  return {};
}

std::string Connection::why_moved() const {
  const Rail::State state = rail_.state();
  return state.up ? "the port was down, or its address changed" : state.why_down;
}

void Connection::stop() {
  for (const auto& pair : queue_pairs_) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_ERR;
    // A removed device refuses this. Destroying the queue pair ends its accesses then.
    (void)api().modify_qp(pair.qp.get(), &attr, IBV_QP_STATE);
  }
}

void Connection::close() {
  destroy_queue_pairs();
  cq_.reset();
  channel_.reset();
}

bool Connection::take_event() {
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  if (api().get_cq_event(channel_.get(), &cq, &context) != 0) return false;
  api().ack_cq_events(cq, 1);  // destroying a queue waits for this
  return true;
}

std::future<void> start_thread(std::function<void()> work) {
  return std::async(std::launch::async, std::move(work));
}

void run_together(std::size_t count, const std::function<void(std::size_t)>& body,
                  const StartThread& start) {
  std::vector<std::future<void>> running;
  running.reserve(count);
  try {
    while (running.size() + 1 < count) {
      running.push_back(start([&body, i = running.size()] { body(i); }));
    }
  } catch (const std::system_error&) {
    // The caller runs the others.
  }
  for (std::size_t i = running.size(); i < count; ++i) body(i);
  for (auto& one : running) one.get();
}

}  // namespace rekindle::transport::verbs
