// What the fakes promise to the tests that use them: queue pairs, requests, completions, events.
#include "tests/verbs/fake_verbs.h"

#include <cerrno>
#include <thread>

#include <fcntl.h>
#include <poll.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/verbs/fake_endpoint.h"

namespace rekindle::transport::verbs {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

std::vector<std::uint64_t> ids(const std::vector<ibv_wc>& completions) {
  std::vector<std::uint64_t> result;
  for (const ibv_wc& wc : completions) result.push_back(wc.wr_id);
  return result;
}

std::vector<ibv_wc_status> statuses(const std::vector<ibv_wc>& completions) {
  std::vector<ibv_wc_status> result;
  for (const ibv_wc& wc : completions) result.push_back(wc.status);
  return result;
}

bool readable(int fd) {
  pollfd ready{fd, POLLIN, 0};
  return ::poll(&ready, 1, 0) == 1;
}

void make_non_blocking(int fd) { ASSERT_EQ(::fcntl(fd, F_SETFL, O_NONBLOCK), 0); }

class FakeVerbsPair : public ::testing::Test, protected FakePair {
 protected:
  void SetUp() override { connect(); }
};

TEST_F(FakeVerbsPair, AReadMovesTheBytesAndCompletes) {
  ASSERT_EQ(a.post_read(b, 42), 0);
  const auto completions = a.poll();
  ASSERT_EQ(completions.size(), 1u);
  EXPECT_EQ(completions[0].wr_id, 42u);
  EXPECT_EQ(completions[0].status, IBV_WC_SUCCESS);
  EXPECT_EQ(completions[0].opcode, IBV_WC_RDMA_READ);
  EXPECT_EQ(completions[0].byte_len, 4096u);
  EXPECT_EQ(completions[0].qp_num, a.qp->qp_num);
  EXPECT_TRUE(arrived());
}

TEST(FakeVerbs, InfiniBandPortsFindEachOtherByLid) {
  FakePair pair({.name = "ib0", .ports = {{.infiniband = true}}});
  pair.connect();
  ASSERT_EQ(pair.a.post_read(pair.b, 1), 0);
  EXPECT_THAT(statuses(pair.a.poll()), ElementsAre(IBV_WC_SUCCESS));
  EXPECT_TRUE(pair.arrived());
}

TEST_F(FakeVerbsPair, RequestsAreDoneWhenTheTestSaysSo) {
  network.deliver_by_hand();
  for (std::uint64_t id = 0; id < 3; ++id) ASSERT_EQ(a.post_read(b, id), 0);
  EXPECT_TRUE(a.poll().empty());
  EXPECT_EQ(network.in_flight(), 3u);
  EXPECT_EQ(network.deliver(2), 2u);
  EXPECT_THAT(ids(a.poll()), ElementsAre(0u, 1u));
  EXPECT_EQ(network.deliver(), 1u);
  EXPECT_THAT(ids(a.poll()), ElementsAre(2u));
}

TEST_F(FakeVerbsPair, AThreadDoesRequestsLater) {
  network.deliver_by_thread(1ms);
  ASSERT_EQ(a.api.req_notify_cq(a.cq.get(), 0), 0);
  ASSERT_EQ(a.post_read(b, 9), 0);
  pollfd ready{a.channel->fd, POLLIN, 0};
  ASSERT_EQ(::poll(&ready, 1, 20'000), 1);
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  ASSERT_EQ(a.api.get_cq_event(a.channel.get(), &cq, &context), 0);
  EXPECT_EQ(context, &a);
  a.api.ack_cq_events(cq, 1);
  EXPECT_THAT(ids(a.poll()), ElementsAre(9u));
}

TEST_F(FakeVerbsPair, UnsignalledRequestsCompleteInSilenceAndHoldTheirSlots) {
  for (std::uint64_t id = 0; id < 16; ++id) {
    ASSERT_EQ(a.post_read(b, id, id == 14 ? IBV_SEND_SIGNALED : 0), 0);
  }
  EXPECT_EQ(a.post_read(b, 16), ENOMEM) << "done, but the slots are not known to be free";
  EXPECT_THAT(ids(a.poll()), ElementsAre(14u));
  for (std::uint64_t id = 16; id < 31; ++id) ASSERT_EQ(a.post_read(b, id, 0), 0);
  EXPECT_EQ(a.post_read(b, 31), ENOMEM);
}

TEST_F(FakeVerbsPair, AFullSendQueueTakesAPrefixAndNamesTheFirstThatIsNot) {
  network.deliver_by_hand();
  for (std::uint64_t id = 0; id < 15; ++id) ASSERT_EQ(a.post_read(b, id), 0);
  ibv_sge entry = a.sge(0, 16);
  ibv_send_wr second = a.read(b, entry, 101);
  ibv_send_wr first = a.read(b, entry, 100);
  first.next = &second;
  ibv_send_wr* bad = nullptr;
  EXPECT_EQ(a.api.post_send(a.qp.get(), &first, &bad), ENOMEM);
  EXPECT_EQ(bad, &second);
  EXPECT_EQ(network.in_flight(), 16u);
}

TEST_F(FakeVerbsPair, AScriptedPostTakesSoManyRequestsFirst) {
  network.deliver_by_hand();
  network.fail_call(FakeCall::kPostSend, {.error = EIO, .taken = 1});
  ibv_sge entry = a.sge(0, 16);
  ibv_send_wr second = a.read(b, entry, 101);
  ibv_send_wr first = a.read(b, entry, 100);
  first.next = &second;
  ibv_send_wr* bad = nullptr;
  EXPECT_EQ(a.api.post_send(a.qp.get(), &first, &bad), EIO);
  EXPECT_EQ(bad, &second);
  EXPECT_EQ(network.deliver(), 1u);
  EXPECT_THAT(ids(a.poll()), ElementsAre(100u));
}

TEST_F(FakeVerbsPair, TheFirstErrorIsItsOwnAndLaterRequestsAreFlushed) {
  network.deliver_by_hand();
  ibv_sge entry = a.sge(0, 4096);
  ibv_send_wr wrong = a.read(b, entry, 1);
  wrong.wr.rdma.rkey ^= 1;
  ASSERT_EQ(a.post_read(b, 0, 0), 0);
  ASSERT_EQ(a.post(wrong), 0);
  ASSERT_EQ(a.post_read(b, 2, 0), 0);  // unsignalled, but flushed aloud
  ASSERT_EQ(a.post_read(b, 3), 0);
  EXPECT_EQ(network.deliver(), 2u);
  const auto completions = a.poll();
  EXPECT_THAT(ids(completions), ElementsAre(1u, 2u, 3u));
  EXPECT_THAT(statuses(completions),
              ElementsAre(IBV_WC_REM_ACCESS_ERR, IBV_WC_WR_FLUSH_ERR, IBV_WC_WR_FLUSH_ERR));
  EXPECT_EQ(a.qp->state, IBV_QPS_ERR);
  EXPECT_EQ(b.qp->state, IBV_QPS_ERR) << "the responder fails, too";
  ASSERT_EQ(a.post_read(b, 4), 0);
  EXPECT_THAT(statuses(a.poll()), ElementsAre(IBV_WC_WR_FLUSH_ERR));
}

TEST_F(FakeVerbsPair, ErrFlushesWhatIsOutstanding) {
  network.deliver_by_hand();
  ASSERT_EQ(a.post_receive(7, 0, 64), 0);
  ASSERT_EQ(a.post_read(b, 1, 0), 0);
  ASSERT_EQ(a.to_error(), 0);
  const auto completions = a.poll();
  EXPECT_THAT(ids(completions), ElementsAre(1u, 7u));
  EXPECT_THAT(statuses(completions), ElementsAre(IBV_WC_WR_FLUSH_ERR, IBV_WC_WR_FLUSH_ERR));
  EXPECT_EQ(network.in_flight(), 0u);
}

TEST_F(FakeVerbsPair, ADeviceThatDoesNotFlushIsSilentUntilTheQueuePairGoes) {
  network.deliver_by_hand();
  network.change(device_a, [](FakeDevice& device) { device.flushes = false; });
  ASSERT_EQ(a.post_read(b, 1), 0);
  ASSERT_EQ(a.to_error(), 0);
  EXPECT_EQ(network.deliver(), 0u);
  EXPECT_TRUE(a.poll().empty());
  EXPECT_EQ(network.in_flight(), 1u);
  a.qp.reset();
  EXPECT_EQ(network.in_flight(), 0u);
  a.mr.reset();  // no READ is under way any more: no problem
}

TEST_F(FakeVerbsPair, LateFlushesComeWhenTheDeviceIsLetGo) {
  network.deliver_by_hand();
  network.change(device_a, [](FakeDevice& device) { device.flushes = false; });
  ASSERT_EQ(a.post_read(b, 1), 0);
  ASSERT_EQ(a.to_error(), 0);
  network.change(device_a, [](FakeDevice& device) { device.flushes = true; });
  EXPECT_THAT(statuses(a.poll()), ElementsAre(IBV_WC_WR_FLUSH_ERR));
}

TEST_F(FakeVerbsPair, WhatACutLinkSwallowsExpiresOrArrivesWhenItIsMended) {
  network.cut({device_a}, {device_b});
  ASSERT_EQ(a.post_read(b, 1), 0);
  EXPECT_TRUE(a.poll().empty());
  network.join({device_a}, {device_b});
  EXPECT_THAT(statuses(a.poll()), ElementsAre(IBV_WC_SUCCESS));
  network.set_port_state({device_b}, IBV_PORT_DOWN);
  ASSERT_EQ(a.post_read(b, 2), 0);
  EXPECT_EQ(network.expire(), 1u);
  EXPECT_THAT(statuses(a.poll()), ElementsAre(IBV_WC_RETRY_EXC_ERR));
}

TEST_F(FakeVerbsPair, TheThreadGivesUpWhatNoOneAnswers) {
  network.deliver_by_thread(0ms, 5ms);
  network.cut({device_a}, {device_b});
  ASSERT_EQ(a.api.req_notify_cq(a.cq.get(), 0), 0);
  ASSERT_EQ(a.post_read(b, 1), 0);
  pollfd ready{a.channel->fd, POLLIN, 0};
  ASSERT_EQ(::poll(&ready, 1, 20'000), 1);
  EXPECT_THAT(statuses(a.poll()), ElementsAre(IBV_WC_RETRY_EXC_ERR));
}

TEST_F(FakeVerbsPair, ADestroyedPeerAnswersNothing) {
  b.qp.reset();
  ASSERT_EQ(a.post_read(b, 1), 0);
  EXPECT_TRUE(a.poll().empty());
  EXPECT_EQ(network.expire(), 1u);
  EXPECT_THAT(statuses(a.poll()), ElementsAre(IBV_WC_RETRY_EXC_ERR));
}

TEST_F(FakeVerbsPair, SmallMessagesArrive) {
  a.bytes[0] = std::byte{0x5a};
  ASSERT_EQ(b.post_receive(1, 100, 64), 0);
  ibv_sge entry = a.sge(0, 8);
  ibv_send_wr wr{};
  wr.wr_id = 2;
  wr.sg_list = &entry;
  wr.num_sge = 1;
  wr.opcode = IBV_WR_SEND;
  wr.send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
  ASSERT_EQ(a.post(wr), 0);
  EXPECT_THAT(ids(a.poll()), ElementsAre(2u));
  const auto received = b.poll();
  ASSERT_EQ(received.size(), 1u);
  EXPECT_EQ(received[0].opcode, IBV_WC_RECV);
  EXPECT_EQ(received[0].byte_len, 8u);
  EXPECT_EQ(b.bytes[100], std::byte{0x5a});
}

TEST_F(FakeVerbsPair, AMessageThatNoReceiveWaitsForExceedsItsRetries) {
  ibv_send_wr wr{};
  wr.opcode = IBV_WR_SEND;
  network.deliver_by_hand();
  ASSERT_EQ(a.post(wr), 0);
  for (int retry = 0; retry < 3; ++retry) {
    EXPECT_EQ(network.deliver(), 0u);
    EXPECT_TRUE(a.poll().empty());
  }
  EXPECT_EQ(network.deliver(), 1u);
  EXPECT_THAT(statuses(a.poll()), ElementsAre(IBV_WC_RNR_RETRY_EXC_ERR));
}

TEST_F(FakeVerbsPair, AnArmedQueueTellsOfNewCompletionsOnly) {
  make_non_blocking(a.channel->fd);
  ASSERT_EQ(a.post_read(b, 1), 0);
  ASSERT_EQ(a.api.req_notify_cq(a.cq.get(), 0), 0);
  EXPECT_FALSE(readable(a.channel->fd)) << "that one was there before";
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  EXPECT_EQ(a.api.get_cq_event(a.channel.get(), &cq, &context), -1);
  EXPECT_EQ(errno, EAGAIN);
  ASSERT_EQ(a.post_read(b, 2), 0);
  ASSERT_EQ(a.post_read(b, 3), 0);
  ASSERT_EQ(a.api.get_cq_event(a.channel.get(), &cq, &context), 0);
  EXPECT_EQ(cq, a.cq.get());
  EXPECT_FALSE(readable(a.channel->fd)) << "once per arming";
  a.api.ack_cq_events(cq, 1);
  EXPECT_EQ(a.poll().size(), 3u);
}

TEST_F(FakeVerbsPair, EventsThatAreNotAcknowledgedAreAProblem) {
  ASSERT_EQ(a.api.req_notify_cq(a.cq.get(), 0), 0);
  ASSERT_EQ(a.post_read(b, 1), 0);
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  ASSERT_EQ(a.api.get_cq_event(a.channel.get(), &cq, &context), 0);
  a.qp.reset();
  a.cq.reset();
  EXPECT_THAT(network.take_problems(), ElementsAre(HasSubstr("not acknowledged")));
}

TEST(FakeVerbs, AnOverrunBreaksTheQueueAndItsQueuePairs) {
  FakePair pair({.name = "mlx5_0"}, {.completions = 2});
  pair.connect();
  make_non_blocking(pair.a.context->async_fd);
  ibv_async_event event{};
  EXPECT_EQ(pair.a.api.get_async_event(pair.a.context.get(), &event), -1);
  EXPECT_EQ(errno, EAGAIN);
  for (std::uint64_t id = 0; id < 3; ++id) ASSERT_EQ(pair.a.post_read(pair.b, id), 0);
  EXPECT_EQ(pair.a.qp->state, IBV_QPS_ERR);
  ASSERT_TRUE(readable(pair.a.context->async_fd));
  ASSERT_EQ(pair.a.api.get_async_event(pair.a.context.get(), &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_CQ_ERR);
  EXPECT_EQ(event.element.cq, pair.a.cq.get());
  pair.a.api.ack_async_event(&event);
  EXPECT_THAT(ids(pair.a.poll()), ElementsAre(0u, 1u));
  ASSERT_EQ(pair.a.post_read(pair.b, 3), 0);
  EXPECT_TRUE(pair.a.poll().empty()) << "nothing comes out of a broken queue";
}

TEST_F(FakeVerbsPair, PortEventsArriveInOrderAndStateChangesWithoutThemToo) {
  network.set_port_state({device_a}, IBV_PORT_DOWN);
  network.set_port_state({device_a}, IBV_PORT_ACTIVE);
  network.set_gids({device_a}, {});
  network.set_port_state({device_a}, IBV_PORT_ARMED, /*event=*/false);
  std::vector<ibv_event_type> types;
  while (readable(a.context->async_fd)) {
    ibv_async_event event{};
    ASSERT_EQ(a.api.get_async_event(a.context.get(), &event), 0);
    EXPECT_EQ(event.element.port_num, 1);
    types.push_back(event.event_type);
    a.api.ack_async_event(&event);
  }
  EXPECT_THAT(types, ElementsAre(IBV_EVENT_PORT_ERR, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_GID_CHANGE));
  ibv_port_attr attr{};
  ASSERT_EQ(a.api.query_port(a.context.get(), 1, &attr), 0);
  EXPECT_EQ(attr.state, IBV_PORT_ARMED);
  ibv_gid_entry entries[8];
  EXPECT_EQ(a.api.query_gid_table(a.context.get(), entries, 8), 0);
}

TEST_F(FakeVerbsPair, ARemovedDeviceFailsEverythingButDestroying) {
  network.deliver_by_hand();
  ASSERT_EQ(a.post_read(b, 1), 0);
  network.remove_device(device_a);
  EXPECT_THAT(statuses(a.poll()), ElementsAre(IBV_WC_WR_FLUSH_ERR));
  EXPECT_EQ(a.post_read(b, 2), EIO);
  EXPECT_EQ(a.register_memory(IBV_ACCESS_LOCAL_WRITE), nullptr);
  EXPECT_EQ(errno, EIO);
  ibv_async_event event{};
  ASSERT_EQ(a.api.get_async_event(a.context.get(), &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_DEVICE_FATAL);
  a.api.ack_async_event(&event);
  int count = -1;
  a.api.free_device_list(a.api.get_device_list(&count));
  EXPECT_EQ(count, 0);
}

TEST_F(FakeVerbsPair, HeldCallsWaitAndOthersDoNot) {
  network.hold(FakeCall::kRegMr, device_a);
  std::thread caller([&] { EXPECT_TRUE(a.register_memory(IBV_ACCESS_LOCAL_WRITE)); });
  EXPECT_TRUE(network.wait_held(FakeCall::kRegMr, 1, SteadyClock().now() + 20s));
  EXPECT_TRUE(b.register_memory(IBV_ACCESS_LOCAL_WRITE));
  EXPECT_EQ(network.registrations(device_a), 1u);
  network.let_go(FakeCall::kRegMr, device_a);
  caller.join();
}

}  // namespace
}  // namespace rekindle::transport::verbs
