// Workers that want their buckets on a GPU: messages to them and to the device process.
#include <span>

#include "src/ipc/frame.h"
#include "tests/worker/worker_service_fixture.h"

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
  EXPECT_FALSE(order.verify_upload);
  EXPECT_FALSE(order.leaves);
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

TEST_F(WorkerDeviceTest, ANewLoadTimeoutIsThatOfTheNextWorkersBuckets) {
  host_->has_device = true;
  Raw raw = greeted();
  ASSERT_TRUE(attach(raw).has_attached());
  EXPECT_EQ(host_->device_orders.back().release, SessionTimes().load);
  boost::asio::post(context_, boost::asio::use_future([&] { service_->set_load_timeout(7s); }))
      .get();
  ASSERT_TRUE(attach(raw).has_attached());
  EXPECT_EQ(host_->device_orders.back().release, 7s);
}

TEST_F(WorkerDeviceTest, ASessionThatEndsEndsThere) {
  host_->has_device = true;
  auto raw = std::make_unique<Raw>(greeted());
  const auto first = attach(*raw).session();
  EXPECT_TRUE(raw->detach(first).has_done());
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

class VerifyingDeviceService : public WorkerDeviceTest {
 protected:
  VerifyingDeviceService() { options.verify_uploads = true; }
};

TEST_F(VerifyingDeviceService, GivesTheProcessTheLeavesToVerifyUploadsWith) {
  host_->has_device = true;
  Raw raw = greeted();
  ASSERT_TRUE(attach(raw).attached().device_channel());
  ASSERT_EQ(host_->device_orders.size(), 1u);
  const auto& order = host_->device_orders.front();
  EXPECT_TRUE(order.verify_upload);
  EXPECT_FALSE(order.in_round);
  ASSERT_TRUE(order.leaves);
  const auto leaves = ipc::read_sealed_memfd(order.leaves.get(), order.leaves_bytes);
  ASSERT_TRUE(leaves) << leaves.error().message();
  const auto stored = host_->store().find({"m", 1}).front();
  const auto expected = std::as_bytes(std::span(stored->manifest.checkpoint->tile_digests));
  EXPECT_EQ(*leaves, std::string(reinterpret_cast<const char*>(expected.data()), expected.size()));
}

TEST_F(VerifyingDeviceService, ACopyThatTheDeviceFoundWrongIsReadAgainBeforeAnybodyGetsIt) {
  host_->has_device = true;
  Raw raw = greeted();
  const auto session = attach(raw).session();
  raw.wait_complete();
  const auto stored = host_->store().find({"m", 1}).front();
  const auto before = stored->verification->record();
  ASSERT_TRUE(before);
  // Keeps the copy from being read again before the test has looked at its state.
  std::promise<void> looked;
  const auto may_read = looked.get_future().share();
  for (std::size_t i = 0; i < host_->blocking_pool().thread_count(); ++i) {
    host_->blocking_pool().submit([may_read] { may_read.wait(); });
  }
  std::promise<store::CopyState> state;
  boost::asio::post(context_, [&] {
    static_cast<device::DeviceEvents&>(*service_).device_over(
        {.session = session, .error = Error(ErrorCode::kCorrupt, "on double:0: tensor 'w'")});
    state.set_value(stored->verification->state());
  });
  EXPECT_EQ(state.get_future().get(), store::CopyState::kUnverified);
  looked.set_value();
  EXPECT_TRUE(eventually([&] {
    const auto now = stored->verification->record();
    return now && now->read > before->read;
  })) << "its bytes are right";
}

}  // namespace
}  // namespace rekindle::worker
