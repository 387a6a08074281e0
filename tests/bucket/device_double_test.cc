#include <array>

#include "src/bucket/double_device.h"
#include "tests/bucket/device_conformance.h"

namespace rekindle::bucket::testing {
namespace {

constexpr std::uint64_t kMemory = 256 << 20;

Result<std::unique_ptr<Device>> make_double() { return make_double_device("double:0", kMemory); }

INSTANTIATE_TEST_SUITE_P(Double, DeviceConformance,
                         ::testing::Values(DeviceBackend{"HostMemory", make_double}),
                         [](const auto& parameter) { return parameter.param.name; });

class DoubleDeviceTest : public ::testing::Test {
 protected:
  DoubleDeviceTest() : memory_(must(device_->allocate(4096))) {}

  // Work that never ends.
  void hang(Stream& stream) {
    const Upload endless{
        .from = from_.data(), .to = memory_->address(), .run_bytes = 64, .rows = 1ull << 60};
    must(stream.upload({&endless, 1}));
  }
  static TimePoint at_once() { return SteadyClock().now() + std::chrono::milliseconds(20); }

  const std::array<std::byte, 64> from_{};
  const std::unique_ptr<Device> device_ = make_double_device("double:7", kMemory);
  const std::unique_ptr<Memory> memory_;
};

TEST_F(DoubleDeviceTest, ItsIdSaysWhatItIs) {
  EXPECT_EQ(device_->id(), "double:7");
  EXPECT_TRUE(is_double("double:0") && is_double("double:12"));
  EXPECT_FALSE(is_double("double:") || is_double("double:x") || is_double("GPU-1") ||
               is_double(""));
}

TEST_F(DoubleDeviceTest, ItsMemoryIsAsLargeAsItWasMade) {
  EXPECT_EQ(must(device_->memory()).free_bytes, kMemory - 4096);
  EXPECT_EQ(device_->allocate(kMemory).error().code(), ErrorCode::kExhausted);
  EXPECT_TRUE(device_->allocate(kMemory - 4096));
  EXPECT_EQ(must(device_->memory()).free_bytes, kMemory - 4096);
}

TEST_F(DoubleDeviceTest, AnEventIsUndoneUntilItsStreamReachesIt) {
  const auto event = must(device_->make_event());
  const auto slow = must(device_->make_stream());
  const auto other = must(device_->make_stream());
  hang(*slow);
  must(slow->record(*event));
  EXPECT_FALSE(must(device_->is_done(*event)));
  must(other->wait(*event));
  EXPECT_EQ(slow->finish(at_once()).error().code(), ErrorCode::kTimeout);
  EXPECT_EQ(other->finish(at_once()).error().code(), ErrorCode::kTimeout);
}

TEST_F(DoubleDeviceTest, AStreamWaitsForWhatWasRecordedWhenItWasTold) {
  const auto event = must(device_->make_event());
  const auto quick = must(device_->make_stream());
  must(quick->record(*event));
  must(quick->finish(soon()));
  const auto other = must(device_->make_stream());
  must(other->wait(*event));
  const auto slow = must(device_->make_stream());
  hang(*slow);
  must(slow->record(*event));
  must(other->finish(soon()));
  EXPECT_FALSE(must(device_->is_done(*event)));
}

TEST_F(DoubleDeviceTest, AnEventWhoseRecorderDiedStaysUndone) {
  DeviceChild child("hang");
  const auto event = must(device_->open_event(receive_handle(child.socket())));
  EXPECT_FALSE(must(device_->is_done(*event)));
  child.kill();
  EXPECT_FALSE(must(device_->is_done(*event)));
  const auto stream = must(device_->make_stream());
  must(stream->wait(*event));
  EXPECT_EQ(stream->finish(at_once()).error().code(), ErrorCode::kTimeout);
  // And the stream, that waits for it, can go.
}

TEST_F(DoubleDeviceTest, MemoryIsNotOpenedBeyondItsEnd) {
  const Handle handle = must(device_->share(*memory_));
  EXPECT_EQ(must(device_->open_memory(handle, 4096))->bytes(), 4096u);
  EXPECT_EQ(device_->open_memory(handle, 4097).error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(device_->open_event(handle).error().code(), ErrorCode::kInvalid);
}

TEST_F(DoubleDeviceTest, ItKnowsNoStreamsOfOthers) {
  int something = 0;
  EXPECT_EQ(device_->borrow_stream(&something).error().code(), ErrorCode::kInvalid);
}

}  // namespace
}  // namespace rekindle::bucket::testing

int main(int argc, char** argv) {
  namespace testing = rekindle::bucket::testing;
  if (const std::string script = testing::child_script(argc, argv); !script.empty()) {
    return testing::run_child(script, *must(testing::make_double()));
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
