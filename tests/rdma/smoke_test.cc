// That real verbs work where the tests of label `rdma` run: two reliable queue pairs of one
// process, one device each, plain libibverbs. Everything else of the suite builds on this.

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <infiniband/verbs.h>

#include "tests/rdma/rails.h"

namespace rekindle::testing {
namespace {

using std::chrono::steady_clock;

struct Delete {
  void operator()(ibv_context* object) const { ibv_close_device(object); }
  void operator()(ibv_pd* object) const { ibv_dealloc_pd(object); }
  void operator()(ibv_cq* object) const { ibv_destroy_cq(object); }
  void operator()(ibv_qp* object) const { ibv_destroy_qp(object); }
  void operator()(ibv_mr* object) const { ibv_dereg_mr(object); }
  void operator()(ibv_mw* object) const { ibv_dealloc_mw(object); }
};
template <class Object>
using Owned = std::unique_ptr<Object, Delete>;

template <class Object>
Owned<Object> made(Object* object, const char* what) {
  if (object == nullptr) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
  return Owned<Object>(object);
}
void done(int error, const char* what) {
  if (error != 0) throw std::runtime_error(std::string(what) + ": " + std::strerror(error));
}

Owned<ibv_context> open(const std::string& name) {
  ibv_device** devices = ibv_get_device_list(nullptr);
  ibv_context* context = nullptr;
  for (ibv_device** device = devices; device != nullptr && *device != nullptr; ++device)
    if (name == ibv_get_device_name(*device)) context = ibv_open_device(*device);
  if (devices != nullptr) ibv_free_device_list(devices);
  return made(context, name.c_str());
}

// One end of a connection, with 64 MiB of registered memory.
struct End {
  static constexpr std::size_t kSize = std::size_t{64} << 20;

  explicit End(const std::string& device) : memory(kSize), context(open(device)) {
    done(ibv_query_port(context.get(), 1, &port), "query port");
    pd = made(ibv_alloc_pd(context.get()), "protection domain");
    cq = made(ibv_create_cq(context.get(), 64, nullptr, nullptr, 0), "completion queue");
    ibv_qp_init_attr attributes{};
    attributes.send_cq = attributes.recv_cq = cq.get();
    attributes.cap = {.max_send_wr = 64, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1};
    attributes.qp_type = IBV_QPT_RC;
    qp = made(ibv_create_qp(pd.get(), &attributes), "queue pair");
    mr = made(ibv_reg_mr(pd.get(), memory.data(), memory.size(),
                         IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND),
              "memory region");
    find_gid();
  }

  // RoCE: the first v2 GID of an IPv4 address, else the first of any kind. InfiniBand: the first.
  void find_gid() {
    std::optional<ibv_gid_entry> best;
    for (std::uint32_t index = 0; index < static_cast<std::uint32_t>(port.gid_tbl_len); ++index) {
      ibv_gid_entry entry{};
      if (ibv_query_gid_ex(context.get(), 1, index, &entry, 0) != 0) continue;
      static constexpr std::array<std::uint8_t, 12> kIpv4{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
      const bool wanted = entry.gid_type == IBV_GID_TYPE_ROCE_V2 &&
                          std::equal(kIpv4.begin(), kIpv4.end(), entry.gid.raw);
      if (wanted || !best) best = entry;
      if (wanted) break;
    }
    if (!best) throw std::runtime_error("the port has no GID");
    gid = *best;
  }

  void connect(const End& peer) {
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_INIT;
    attributes.port_num = 1;
    attributes.qp_access_flags = IBV_ACCESS_REMOTE_READ;
    done(ibv_modify_qp(qp.get(), &attributes,
                       IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
         "to INIT");
    attributes.qp_state = IBV_QPS_RTR;
    attributes.path_mtu = std::min(port.active_mtu, peer.port.active_mtu);
    attributes.dest_qp_num = peer.qp->qp_num;
    attributes.max_dest_rd_atomic = 4;
    attributes.min_rnr_timer = 12;
    attributes.ah_attr.is_global = 1;
    attributes.ah_attr.grh.dgid = peer.gid.gid;
    attributes.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(gid.gid_index);
    attributes.ah_attr.grh.hop_limit = 64;
    attributes.ah_attr.dlid = peer.port.lid;
    attributes.ah_attr.port_num = 1;
    done(ibv_modify_qp(qp.get(), &attributes,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                           IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
         "to RTR");
    attributes.qp_state = IBV_QPS_RTS;
    attributes.timeout = 14;
    attributes.retry_cnt = 3;  // 7 is for ever on soft-RoCE
    attributes.rnr_retry = 7;
    attributes.max_rd_atomic = 4;
    done(ibv_modify_qp(qp.get(), &attributes,
                       IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                           IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
         "to RTS");
  }

  void post(ibv_send_wr request) {
    request.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    done(ibv_post_send(qp.get(), &request, &bad), "post");
  }
  void post_read(std::size_t at, std::size_t size, const End& from, std::uint32_t rkey) {
    ibv_sge sge{.addr = reinterpret_cast<std::uintptr_t>(memory.data() + at),
                .length = static_cast<std::uint32_t>(size),
                .lkey = mr->lkey};
    ibv_send_wr request{};
    request.opcode = IBV_WR_RDMA_READ;
    request.sg_list = &sge;
    request.num_sge = 1;
    request.wr.rdma.remote_addr = reinterpret_cast<std::uintptr_t>(from.memory.data() + at);
    request.wr.rdma.rkey = rkey;
    post(request);
  }
  // The next completion; what takes longer than any healthy one throws.
  ibv_wc_status complete() {
    const auto deadline = steady_clock::now() + std::chrono::seconds(30);
    for (ibv_wc completion{}; steady_clock::now() < deadline;) {
      const int count = ibv_poll_cq(cq.get(), 1, &completion);
      if (count < 0) throw std::runtime_error("the completion queue is broken");
      if (count == 1) return completion.status;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    throw std::runtime_error("no completion");
  }

  std::vector<std::uint8_t> memory;  // outlives its registration
  Owned<ibv_context> context;
  ibv_port_attr port{};
  Owned<ibv_pd> pd;
  Owned<ibv_cq> cq;
  Owned<ibv_mr> mr;
  Owned<ibv_qp> qp;
  ibv_gid_entry gid{};
};

class RdmaSmoke : public ::testing::Test {
 protected:
  void SetUp() override {
    const Rails rails = rdma_rails();
    if (rails.a.empty()) GTEST_SKIP() << "this host has no RDMA device with an active port";
    puller.emplace(rails.a[0]);
    source.emplace(rails.b[0]);
    puller->connect(*source);
    source->connect(*puller);
    std::uint32_t state = 1;
    for (std::uint8_t& byte : source->memory) {
      state = state * 1664525 + 1013904223;
      byte = static_cast<std::uint8_t>(state >> 24);
    }
  }

  std::optional<End> puller, source;
};

TEST_F(RdmaSmoke, ReadsBring64MiBExactly) {
  constexpr std::size_t kSlice = std::size_t{1} << 20;
  constexpr std::size_t kInFlight = 4 * kSlice;
  for (std::size_t at = 0; at < End::kSize + kInFlight; at += kSlice) {
    if (at >= kInFlight) {
      ASSERT_EQ(puller->complete(), IBV_WC_SUCCESS);
    }
    if (at < End::kSize) puller->post_read(at, kSlice, *source, source->mr->rkey);
  }
  EXPECT_TRUE(puller->memory == source->memory);
}

TEST_F(RdmaSmoke, AnInvalidatedMemoryWindowRefusesReads) {
  ibv_device_attr device{};
  done(ibv_query_device(source->context.get(), &device), "query device");
  if ((device.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) == 0)
    GTEST_SKIP() << "the device has no memory windows of type 2B";
  const Owned<ibv_mw> window = made(ibv_alloc_mw(source->pd.get(), IBV_MW_TYPE_2), "memory window");
  const std::uint32_t key = ibv_inc_rkey(window->rkey);
  ibv_send_wr bind{};
  bind.opcode = IBV_WR_BIND_MW;
  bind.bind_mw.mw = window.get();
  bind.bind_mw.rkey = key;
  bind.bind_mw.bind_info = {.mr = source->mr.get(),
                            .addr = reinterpret_cast<std::uintptr_t>(source->memory.data()),
                            .length = End::kSize / 2,
                            .mw_access_flags = IBV_ACCESS_REMOTE_READ};
  source->post(bind);
  ASSERT_EQ(source->complete(), IBV_WC_SUCCESS);

  puller->post_read(4096, 8192, *source, key);
  ASSERT_EQ(puller->complete(), IBV_WC_SUCCESS);
  EXPECT_TRUE(std::equal(puller->memory.begin() + 4096, puller->memory.begin() + 4096 + 8192,
                         source->memory.begin() + 4096));

  ibv_send_wr invalidate{};
  invalidate.opcode = IBV_WR_LOCAL_INV;
  invalidate.invalidate_rkey = key;
  source->post(invalidate);
  ASSERT_EQ(source->complete(), IBV_WC_SUCCESS);

  puller->post_read(16384, 8192, *source, key);
  EXPECT_EQ(puller->complete(), IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(std::all_of(puller->memory.begin() + 16384, puller->memory.begin() + 16384 + 8192,
                          [](std::uint8_t byte) { return byte == 0; }));
}

TEST_F(RdmaSmoke, AReadOverACutCableFails) {
  if (!rdma_cables_can_fail()) GTEST_SKIP() << "these are real cables";
  CableFault cut{"filter", "0", "b"};
  puller->post_read(0, 4096, *source, source->mr->rkey);
  EXPECT_EQ(puller->complete(), IBV_WC_RETRY_EXC_ERR);
}

}  // namespace
}  // namespace rekindle::testing
