// The rules that the fakes enforce: states and attributes, rights, limits, leaks.
#include <cerrno>

#include <sys/mman.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include "tests/verbs/fake_endpoint.h"

namespace rekindle::transport::verbs {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class FakeVerbsRules : public ::testing::Test, protected FakePair {
 protected:
  FakePort port(const std::string& device) { return network.spec(device).ports[0]; }
  ibv_qp_attr rtr() { return FakeEndpoint::rtr(port(device_a), port(device_b), b.qp->qp_num); }
  int modify(ibv_qp_attr attr, int mask) { return a.api.modify_qp(a.qp.get(), &attr, mask); }
  ibv_wc_status one_status() {
    const auto completions = a.poll();
    EXPECT_EQ(completions.size(), 1u);
    return completions.empty() ? IBV_WC_GENERAL_ERR : completions[0].status;
  }
  ibv_send_wr bind(ibv_mw& mw, std::uint32_t rkey, std::size_t offset, std::uint64_t length) {
    ibv_send_wr wr{};
    wr.opcode = IBV_WR_BIND_MW;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.bind_mw.mw = &mw;
    wr.bind_mw.rkey = rkey;
    wr.bind_mw.bind_info = {b.mr.get(), b.address(offset), length, IBV_ACCESS_REMOTE_READ};
    return wr;
  }
  static ibv_send_wr invalidate(std::uint32_t rkey) {
    ibv_send_wr wr{};
    wr.opcode = IBV_WR_LOCAL_INV;
    wr.invalidate_rkey = rkey;
    wr.send_flags = IBV_SEND_SIGNALED;
    return wr;
  }
  ibv_wc_status do_at_b(const ibv_send_wr& wr) {
    EXPECT_EQ(b.post(wr), 0);
    const auto completions = b.poll();
    EXPECT_EQ(completions.size(), 1u);
    return completions.empty() ? IBV_WC_GENERAL_ERR : completions[0].status;
  }
  ibv_wc_status read_with(std::uint32_t rkey, std::size_t offset = 0) {
    ibv_sge entry = a.sge(offset, 64);
    ibv_send_wr wr = a.read(b, entry, 5);
    wr.wr.rdma.rkey = rkey;
    EXPECT_EQ(a.post(wr), 0);
    return one_status();
  }
};

TEST_F(FakeVerbsRules, EveryAttributeOfAStepIsNeededAndNoOther) {
  EXPECT_EQ(modify(rtr(), FakeEndpoint::kRtrMask), EINVAL) << "RESET to RTR";
  ASSERT_EQ(a.to_init(), 0);
  for (int bit = 1; bit < 1 << 26; bit <<= 1) {
    if (bit != IBV_QP_STATE && (FakeEndpoint::kRtrMask & bit) != 0) {
      EXPECT_EQ(modify(rtr(), FakeEndpoint::kRtrMask & ~bit), EINVAL) << bit;
    }
  }
  EXPECT_EQ(modify(rtr(), FakeEndpoint::kRtrMask | IBV_QP_SQ_PSN), EINVAL);
  ASSERT_EQ(modify(rtr(), FakeEndpoint::kRtrMask), 0);
  for (int bit = 2; bit < 1 << 26; bit <<= 1) {
    if ((FakeEndpoint::kRtsMask & bit) != 0) {
      EXPECT_EQ(modify(FakeEndpoint::rts(), FakeEndpoint::kRtsMask & ~bit), EINVAL) << bit;
    }
  }
  EXPECT_EQ(modify(FakeEndpoint::rts(), FakeEndpoint::kRtsMask), 0);
}

TEST_F(FakeVerbsRules, ValuesBeyondTheDeviceAreRefused) {
  ASSERT_EQ(a.to_init(), 0);
  const auto refused = [&](auto&& change) {
    ibv_qp_attr attr = rtr();
    change(attr);
    EXPECT_EQ(modify(attr, FakeEndpoint::kRtrMask), EINVAL);
  };
  refused([](ibv_qp_attr& attr) { attr.path_mtu = static_cast<ibv_mtu>(6); });
  refused([](ibv_qp_attr& attr) { attr.max_dest_rd_atomic = 17; });
  refused([](ibv_qp_attr& attr) { attr.rq_psn = 1 << 24; });
  refused([](ibv_qp_attr& attr) { attr.ah_attr.is_global = 0; });
  refused([](ibv_qp_attr& attr) { attr.ah_attr.grh.sgid_index = 99; });
  refused([](ibv_qp_attr& attr) { attr.ah_attr.port_num = 2; });
  ASSERT_EQ(modify(rtr(), FakeEndpoint::kRtrMask), 0);
  ibv_qp_attr rts = FakeEndpoint::rts();
  rts.max_rd_atomic = 17;
  EXPECT_EQ(modify(rts, FakeEndpoint::kRtsMask), EINVAL);
}

TEST_F(FakeVerbsRules, RequestsNeedRts) {
  EXPECT_EQ(a.post_read(b, 1), EINVAL);
  ASSERT_EQ(a.to_init(), 0);
  EXPECT_EQ(a.post_read(b, 1), EINVAL);
}

// A real device loses such packets: the two ends agreed on wrong values.
TEST_F(FakeVerbsRules, WhatTheEndsDoNotAgreeOnGetsNoAnswer) {
  const auto silent = [&](auto&& change) {
    ibv_qp_attr reset{};
    ASSERT_EQ(modify(reset, IBV_QP_STATE), 0);
    ASSERT_EQ(b.api.modify_qp(b.qp.get(), &reset, IBV_QP_STATE), 0);
    connect_one(b, a, device_b, device_a);
    ibv_qp_attr to_rtr = rtr(), to_rts = FakeEndpoint::rts();
    change(to_rtr, to_rts);
    ASSERT_EQ(a.to_init(), 0);
    ASSERT_EQ(modify(to_rtr, FakeEndpoint::kRtrMask), 0);
    ASSERT_EQ(modify(to_rts, FakeEndpoint::kRtsMask), 0);
    ASSERT_EQ(a.post_read(b, 1), 0);
    EXPECT_TRUE(a.poll().empty());
    EXPECT_EQ(network.expire(), 1u);
    EXPECT_EQ(one_status(), IBV_WC_RETRY_EXC_ERR);
  };
  silent([](ibv_qp_attr& to_rtr, ibv_qp_attr&) { to_rtr.path_mtu = IBV_MTU_512; });
  silent([](ibv_qp_attr& to_rtr, ibv_qp_attr&) { to_rtr.dest_qp_num += 100; });
  silent([](ibv_qp_attr& to_rtr, ibv_qp_attr&) { to_rtr.ah_attr.grh.dgid.raw[15] ^= 0x40; });
  silent([](ibv_qp_attr& to_rtr, ibv_qp_attr&) { to_rtr.ah_attr.grh.sgid_index = 1; });
  silent([](ibv_qp_attr&, ibv_qp_attr& to_rts) { to_rts.sq_psn = 8; });
  silent([&](ibv_qp_attr&, ibv_qp_attr&) {
    network.change(device_b, [](FakeDevice& device) { device.ports[0].active_mtu = IBV_MTU_512; });
  });
}

TEST_F(FakeVerbsRules, MoreReadsAtOnceThanThePeerAnswersAreRefusedByIt) {
  ASSERT_EQ(b.to_init(), 0);
  ibv_qp_attr to_rtr = FakeEndpoint::rtr(port(device_b), port(device_a), a.qp->qp_num);
  to_rtr.max_dest_rd_atomic = 4;
  ASSERT_EQ(b.api.modify_qp(b.qp.get(), &to_rtr, FakeEndpoint::kRtrMask), 0);
  connect_one(a, b, device_a, device_b);
  ASSERT_EQ(a.post_read(b, 1), 0);
  EXPECT_EQ(one_status(), IBV_WC_REM_INV_REQ_ERR);
}

TEST_F(FakeVerbsRules, ReadsLandOnlyWhereTheLocalKeyAllows) {
  connect();
  const MrHandle read_only = a.register_memory(IBV_ACCESS_REMOTE_READ);
  ibv_sge entry{a.address(), 64, read_only->lkey};
  ASSERT_EQ(a.post(a.read(b, entry, 1)), 0);
  EXPECT_EQ(one_status(), IBV_WC_LOC_PROT_ERR);
}

TEST_F(FakeVerbsRules, ReadsPastTheEndOfTheirRegionAreRefused) {
  connect();
  ibv_sge entry = a.sge(0, 4096);
  ibv_send_wr wr = a.read(b, entry, 1);
  wr.wr.rdma.remote_addr = b.address(b.bytes.size() - 4095);
  ASSERT_EQ(a.post(wr), 0);
  EXPECT_EQ(one_status(), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(FakeVerbsRules, AWindowAllowsItsRangeUntilItIsInvalidated) {
  connect();
  MwHandle mw{b.api.alloc_mw(b.pd.get(), IBV_MW_TYPE_2), {&b.api}};
  ASSERT_TRUE(mw);
  const std::uint32_t rkey = ibv_inc_rkey(mw->rkey);
  ASSERT_EQ(do_at_b(bind(*mw, rkey, 4096, 4096)), IBV_WC_SUCCESS);
  EXPECT_EQ(read_with(rkey, 4096), IBV_WC_SUCCESS);
  ASSERT_EQ(do_at_b(invalidate(rkey)), IBV_WC_SUCCESS);
  EXPECT_EQ(read_with(rkey, 4096), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(FakeVerbsRules, AWindowAllowsNothingOutsideItsRange) {
  connect();
  MwHandle mw{b.api.alloc_mw(b.pd.get(), IBV_MW_TYPE_2), {&b.api}};
  const std::uint32_t rkey = ibv_inc_rkey(mw->rkey);
  ASSERT_EQ(do_at_b(bind(*mw, rkey, 4096, 4096)), IBV_WC_SUCCESS);
  EXPECT_EQ(read_with(rkey, 4095), IBV_WC_REM_ACCESS_ERR);
}

TEST_F(FakeVerbsRules, ARegionIsBusyWhileAWindowIsBoundToIt) {
  connect();
  MwHandle mw{b.api.alloc_mw(b.pd.get(), IBV_MW_TYPE_2), {&b.api}};
  ASSERT_EQ(do_at_b(bind(*mw, ibv_inc_rkey(mw->rkey), 0, 64)), IBV_WC_SUCCESS);
  EXPECT_EQ(b.api.dereg_mr(b.mr.get()), EBUSY);
  b.qp.reset();
  EXPECT_THAT(network.take_problems(), ElementsAre(HasSubstr("windows are bound to it")));
  EXPECT_EQ(b.api.dereg_mr(b.mr.get()), EBUSY);
  mw.reset();
  b.mr.reset();
  EXPECT_EQ(network.registrations(device_b), 0u);
}

TEST_F(FakeVerbsRules, WrongBindsFail) {
  connect();
  MwHandle mw{b.api.alloc_mw(b.pd.get(), IBV_MW_TYPE_2), {&b.api}};
  EXPECT_EQ(do_at_b(bind(*mw, mw->rkey, 0, 64)), IBV_WC_MW_BIND_ERR) << "the key is not new";
}

TEST_F(FakeVerbsRules, ABoundWindowIsNotBoundAgain) {
  connect();
  MwHandle mw{b.api.alloc_mw(b.pd.get(), IBV_MW_TYPE_2), {&b.api}};
  ASSERT_EQ(do_at_b(bind(*mw, mw->rkey + 1, 0, 64)), IBV_WC_SUCCESS);
  EXPECT_EQ(do_at_b(bind(*mw, mw->rkey + 2, 0, 64)), IBV_WC_MW_BIND_ERR);
}

TEST_F(FakeVerbsRules, RegistrationHasItsLimits) {
  network.change(device_a, [](FakeDevice& device) { device.max_registered_bytes = 160 << 10; });
  MrHandle second = a.register_memory(IBV_ACCESS_LOCAL_WRITE);
  ASSERT_TRUE(second);
  EXPECT_FALSE(a.register_memory(IBV_ACCESS_LOCAL_WRITE));
  EXPECT_EQ(errno, ENOMEM);
  EXPECT_EQ(network.registered_bytes(device_a), 128u << 10);
  second.reset();
  EXPECT_TRUE(a.register_memory(IBV_ACCESS_LOCAL_WRITE));
  network.change(device_a, [](FakeDevice& device) {
    device.attr.max_mr = 1;
    device.max_registered_bytes = 0;
  });
  EXPECT_FALSE(a.register_memory(IBV_ACCESS_LOCAL_WRITE));
  EXPECT_EQ(errno, ENOMEM);
}

TEST_F(FakeVerbsRules, TheNthCallFailsAsScripted) {
  network.fail_call(FakeCall::kRegMr, {.error = ENOMEM, .nth = 2, .device = device_a});
  EXPECT_TRUE(a.register_memory(0));
  EXPECT_TRUE(b.register_memory(0)) << "of another device";
  EXPECT_FALSE(a.register_memory(0));
  EXPECT_TRUE(a.register_memory(0));
  EXPECT_EQ(network.calls(FakeCall::kRegMr, device_a), 4u);
  EXPECT_EQ(network.calls(FakeCall::kRegMr), 6u);
}

TEST_F(FakeVerbsRules, PagesThatAreNotThereOrReadOnlyAreRefused) {
  const int fd = ::memfd_create("rekindle-fake", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(fd, 4096), 0);
  void* const memory = ::mmap(nullptr, 8192, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(memory, MAP_FAILED);
  MrHandle mr{a.api.reg_mr(a.pd.get(), memory, 4096, IBV_ACCESS_REMOTE_READ), {&a.api}};
  EXPECT_TRUE(mr);
  EXPECT_EQ(a.api.reg_mr(a.pd.get(), memory, 8192, IBV_ACCESS_REMOTE_READ), nullptr);
  EXPECT_EQ(errno, EFAULT) << "beyond the end of the file";
  EXPECT_EQ(a.api.reg_mr(a.pd.get(), memory, 4096, IBV_ACCESS_LOCAL_WRITE), nullptr);
  EXPECT_EQ(errno, EFAULT);
  network.change(device_a, [](FakeDevice& device) { device.takes_read_only = false; });
  EXPECT_EQ(a.api.reg_mr(a.pd.get(), memory, 4096, IBV_ACCESS_REMOTE_READ), nullptr);
  mr.reset();
  ::munmap(memory, 8192);
  EXPECT_EQ(a.api.reg_mr(a.pd.get(), memory, 4096, IBV_ACCESS_REMOTE_READ), nullptr);
  ::close(fd);
}

TEST_F(FakeVerbsRules, DeregisteringUnderAReadIsAProblemAtEitherEnd) {
  connect();
  network.deliver_by_hand();
  ASSERT_EQ(a.post_read(b, 1), 0);
  b.mr.reset();
  EXPECT_THAT(network.take_problems(), ElementsAre(HasSubstr("dereg_mr on b/mlx5_0: a READ")));
  a.mr.reset();
  EXPECT_THAT(network.take_problems(), ElementsAre(HasSubstr("dereg_mr on a/mlx5_0: a READ")));
}

TEST(FakeVerbsChecks, WhatIsLeftBehindFailsTheTest) {
  ::testing::TestPartResultArray failures;
  {
    ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS, &failures);
    FakeNetwork network;
    FakeVerbs api(network);
    api.add_device({.name = "mlx5_0"});
    ibv_device** const list = api.get_device_list(nullptr);
    ibv_context* const context = api.open_device(list[0]);
    api.alloc_pd(context);
    api.free_device_list(list);
  }
  ASSERT_EQ(failures.size(), 2);
  EXPECT_THAT(failures.GetTestPartResult(0).message(), HasSubstr("leak: 1 device contexts"));
  EXPECT_THAT(failures.GetTestPartResult(1).message(), HasSubstr("leak: 1 protection domains"));
}

TEST(FakeVerbsChecks, ParentsAreBusyWhileChildrenLive) {
  FakePair pair;
  EXPECT_EQ(pair.a.api.dealloc_pd(pair.a.pd.get()), EBUSY);
  EXPECT_EQ(pair.a.api.destroy_cq(pair.a.cq.get()), EBUSY);
  EXPECT_EQ(pair.a.api.destroy_comp_channel(pair.a.channel.get()), EBUSY);
}

}  // namespace
}  // namespace rekindle::transport::verbs
