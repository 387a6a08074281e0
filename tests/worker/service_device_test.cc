// Workers that want their buckets on a GPU: what they and the device process are told.
#include "tests/worker/service_fixture.h"

namespace rekindle::worker {
namespace {

class WorkerDeviceTest : public WorkerServiceTest {
 protected:
  static proto::AgentFrame attach(Raw& raw) {
    proto::WorkerFrame frame;
    auto& attach = *frame.mutable_attach();
    attach.set_model("m");
    attach.set_version(1);
    attach.set_world(1);
    attach.set_device("double:0");
    attach.set_bucket_bytes(kBucket);
    return raw.answer(raw.send(frame));
  }
  static constexpr std::uint64_t kBucket = 1 << 20;
};

TEST_F(WorkerDeviceTest, TheWorkersEndComesLastAndTheProcessHearsWhatTheWorkerHears) {
  host_->has_device = true;
  Raw raw = greeted();
  const auto attached = attach(raw);
  ASSERT_TRUE(attached.has_attached()) << attached.ShortDebugString();
  EXPECT_TRUE(attached.attached().device_channel());
  ASSERT_EQ(raw.descriptors.size(), 2u) << "a segment and the channel";
  ASSERT_EQ(host_->device_orders.size(), 1u);
  const auto& order = host_->device_orders.front();
  EXPECT_EQ(order.session, attached.session());
  EXPECT_EQ(order.device, "double:0");
  EXPECT_EQ(order.bucket_bytes, kBucket);
  EXPECT_EQ(order.segments.size(), 1u);
  proto::AgentFrame same;
  ASSERT_TRUE(same.ParseFromString(order.attached));
  EXPECT_EQ(same.attached().layout(), attached.attached().layout());
  ASSERT_EQ(::write(host_->device_ends.front().get(), "x", 1), 1);
  char byte = 0;
  EXPECT_EQ(::read(raw.descriptors.back().get(), &byte, 1), 1);
  raw.wait_complete();
  EXPECT_TRUE(eventually([&] { return host_->device_complete.load(); }));
  const auto stored = host_->store().find({"m", 1}).front();
  EXPECT_EQ(host_->tiles_told, stored->manifest.checkpoint->tiles.tile_count());
}

TEST_F(WorkerDeviceTest, ASessionThatEndsEndsThere) {
  host_->has_device = true;
  auto raw = std::make_unique<Raw>(greeted());
  const auto first = attach(*raw).session();
  proto::WorkerFrame detach;
  detach.set_session(first);
  detach.mutable_detach();
  EXPECT_TRUE(raw->answer(raw->send(detach)).has_done());
  EXPECT_EQ(host_->device_ended, first);
  const auto second = attach(*raw).session();
  raw.reset();
  EXPECT_TRUE(eventually([&] { return host_->device_ended == second; }));
}

TEST_F(WorkerDeviceTest, WithoutADeviceTheWorkerHearsWhyAndGoesOn) {
  Raw raw = greeted();
  const auto attached = attach(raw);
  ASSERT_TRUE(attached.has_attached()) << attached.ShortDebugString();
  EXPECT_FALSE(attached.attached().device_channel());
  EXPECT_EQ(attached.attached().no_device_channel(), "this agent has no double:0");
  EXPECT_EQ(raw.descriptors.size(), 1u);
  raw.wait_complete();
}

}  // namespace
}  // namespace rekindle::worker
