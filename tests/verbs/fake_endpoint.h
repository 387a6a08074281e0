#pragma once

#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "tests/verbs/fake_verbs.h"

// The usual objects on a fake device, and connected queue pairs, for tests of the layers above and
// of the fakes themselves.
namespace rekindle::transport::verbs {

struct EndpointOptions {
  std::uint32_t send_requests = 16;
  std::uint32_t receive_requests = 16;
  int completions = 64;
  bool signal_all = false;
};

// One open device with one queue pair and 64 KiB of memory.
struct FakeEndpoint {
  FakeEndpoint(FakeVerbs& verbs, const std::string& device_name, EndpointOptions options = {})
      : api(verbs), bytes(64 << 10) {
    int count = 0;
    ibv_device** const list = api.get_device_list(&count);
    for (int i = 0; i < count; ++i) {
      if (api.get_device_name(list[i]) == device_name) context = {api.open_device(list[i]), {&api}};
    }
    api.free_device_list(list);
    pd = {api.alloc_pd(context.get()), {&api}};
    channel = {api.create_comp_channel(context.get()), {&api}};
    cq = {api.create_cq(context.get(), options.completions, this, channel.get(), 0), {&api}};
    mr = register_memory(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND);
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq.get();
    init.cap = {options.send_requests, options.receive_requests, 4, 4, 64};
    init.qp_type = IBV_QPT_RC;
    init.sq_sig_all = options.signal_all ? 1 : 0;
    qp = {api.create_qp(pd.get(), &init), {&api}};
  }

  MrHandle register_memory(int access) {
    return {api.reg_mr(pd.get(), bytes.data(), bytes.size(), access), {&api}};
  }
  std::uint64_t address(std::size_t offset = 0) const {
    return reinterpret_cast<std::uint64_t>(bytes.data() + offset);
  }
  ibv_sge sge(std::size_t offset, std::uint32_t length) const {
    return {address(offset), length, mr->lkey};
  }

  int to_init() {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_READ;
    return api.modify_qp(qp.get(), &attr,
                         IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  }
  static constexpr int kRtrMask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                  IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  static constexpr int kRtsMask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                  IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
  // By the last GID of each (RoCE v2, IPv4), or LIDs.
  static ibv_qp_attr rtr(const FakePort& here, const FakePort& there, std::uint32_t number) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = number;
    attr.rq_psn = 7;
    attr.max_dest_rd_atomic = 16;
    attr.min_rnr_timer = 12;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.dlid = there.lid;
    if (!here.infiniband) {
      attr.ah_attr.is_global = 1;
      attr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(here.gids.back().index);
      std::memcpy(attr.ah_attr.grh.dgid.raw, there.gids.back().bytes.data(), 16);
    }
    return attr;
  }
  static ibv_qp_attr rts() {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 14;
    attr.retry_cnt = 7;
    attr.rnr_retry = 3;
    attr.sq_psn = 7;
    attr.max_rd_atomic = 16;
    return attr;
  }
  int to_error() {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_ERR;
    return api.modify_qp(qp.get(), &attr, IBV_QP_STATE);
  }

  // READ from `peer`'s memory into ours, at the same offset.
  ibv_send_wr read(const FakeEndpoint& peer, ibv_sge& entry, std::uint64_t id,
                   unsigned flags = IBV_SEND_SIGNALED) const {
    ibv_send_wr wr{};
    wr.wr_id = id;
    wr.sg_list = &entry;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_RDMA_READ;
    wr.send_flags = flags;
    wr.wr.rdma.remote_addr = peer.address(entry.addr - address());
    wr.wr.rdma.rkey = peer.mr->rkey;
    return wr;
  }
  int post(ibv_send_wr wr) {
    ibv_send_wr* bad = nullptr;
    return api.post_send(qp.get(), &wr, &bad);
  }
  int post_read(const FakeEndpoint& peer, std::uint64_t id, unsigned flags = IBV_SEND_SIGNALED,
                std::size_t offset = 0, std::uint32_t length = 4096) {
    ibv_sge entry = sge(offset, length);
    return post(read(peer, entry, id, flags));
  }
  int post_receive(std::uint64_t id, std::size_t offset, std::uint32_t length) {
    ibv_sge entry = sge(offset, length);
    ibv_recv_wr wr{id, nullptr, &entry, 1};
    ibv_recv_wr* bad = nullptr;
    return api.post_recv(qp.get(), &wr, &bad);
  }
  std::vector<ibv_wc> poll(int most = 64) {
    std::vector<ibv_wc> completions(static_cast<std::size_t>(most));
    const int count = api.poll_cq(cq.get(), most, completions.data());
    EXPECT_GE(count, 0);
    completions.resize(static_cast<std::size_t>(count));
    return completions;
  }

  FakeVerbs& api;
  std::vector<std::byte> bytes;
  ContextHandle context;
  PdHandle pd;
  ChannelHandle channel;
  CqHandle cq;
  MrHandle mr;
  QpHandle qp;
};

// Two hosts with a device each, whose queue pairs are connected.
struct FakePair {
  explicit FakePair(FakeDevice spec = {.name = "mlx5_0"}, EndpointOptions options = {})
      : device_a(host_a.add_device(spec)),
        device_b(host_b.add_device(spec)),
        a(host_a, spec.name, options),
        b(host_b, spec.name, options) {
    for (std::size_t i = 0; i < b.bytes.size(); ++i) b.bytes[i] = std::byte(i * 7 % 251);
  }

  void connect() {
    connect_one(a, b, device_a, device_b);
    connect_one(b, a, device_b, device_a);
  }
  void connect_one(FakeEndpoint& from, FakeEndpoint& to, const std::string& from_device,
                   const std::string& to_device) {
    ibv_qp_attr rtr = FakeEndpoint::rtr(network.spec(from_device).ports[0],
                                        network.spec(to_device).ports[0], to.qp->qp_num);
    ibv_qp_attr rts = FakeEndpoint::rts();
    ASSERT_EQ(from.to_init(), 0);
    ASSERT_EQ(from.api.modify_qp(from.qp.get(), &rtr, FakeEndpoint::kRtrMask), 0);
    ASSERT_EQ(from.api.modify_qp(from.qp.get(), &rts, FakeEndpoint::kRtsMask), 0);
  }
  bool arrived(std::size_t offset = 0, std::size_t length = 4096) const {
    return std::memcmp(a.bytes.data() + offset, b.bytes.data() + offset, length) == 0;
  }

  FakeNetwork network;
  FakeVerbs host_a{network, "a"};
  FakeVerbs host_b{network, "b"};
  std::string device_a, device_b;
  FakeEndpoint a, b;
};

}  // namespace rekindle::transport::verbs
