#include "src/bucket/pinned.h"

#include <sys/mman.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "src/base/unique_fd.h"
#include "src/bucket/double_device.h"
#include "tests/bucket/forwarding_device.h"

namespace rekindle::bucket {
namespace {

// Refuses to pin what begins with an 'x'.
class Refusing final : public testing::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  Result<std::unique_ptr<Pin>> pin(std::span<const std::byte> memory) override {
    if (memory.front() == std::byte{'x'}) return fail(ErrorCode::kExhausted, "no room to pin");
    return ForwardingDevice::pin(memory);
  }
};

class PinnerTest : public ::testing::Test {
 protected:
  std::shared_ptr<const PinnedSegment> add(char first) {
    const UniqueFd file(::memfd_create("segment", MFD_CLOEXEC));
    EXPECT_EQ(::ftruncate(file.get(), kBytes), 0);
    EXPECT_EQ(::pwrite(file.get(), &first, 1, 0), 1);
    auto segment = pinner_.add(file.get(), kBytes);
    EXPECT_TRUE(segment) << segment.error().message();
    EXPECT_TRUE(pinner_.wait(**segment, SteadyClock().now() + std::chrono::minutes(1)));
    return *segment;
  }
  static constexpr std::uint64_t kBytes = 64 << 10;
  const std::unique_ptr<Device> double_ = make_double_device("double:0", 1 << 20);
  Refusing device_{*double_};
  Pinner pinner_{device_, 1};
};

TEST_F(PinnerTest, AFailureIsThatOfItsSegment) {
  const auto bad = add('x');
  ASSERT_TRUE(pinner_.failure(*bad));
  EXPECT_EQ(pinner_.failure(*bad)->code(), ErrorCode::kExhausted);
  EXPECT_FALSE(pinner_.pinned(*bad, 0, kBytes));
  const auto good = add('y');
  EXPECT_FALSE(pinner_.failure(*good));
  EXPECT_TRUE(pinner_.pinned(*good, 0, kBytes));
  EXPECT_TRUE(pinner_.failure(*bad));
  EXPECT_EQ(pinner_.pinned_bytes(), kBytes);
}

}  // namespace
}  // namespace rekindle::bucket
