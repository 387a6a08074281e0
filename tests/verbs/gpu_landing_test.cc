// Reads that land in memory which this process does not map. A memory file stands for a GPU's
// memory: the fake device maps it as a NIC would, and so does the test, to look.
#include <sys/mman.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/base/unique_fd.h"
#include "tests/verbs/verbs_lab.h"

namespace rekindle::transport::verbs {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::uint64_t kGpuBytes = 4 * kMiB;

class FakeGpuMemory {
 public:
  FakeGpuMemory() : fd_(::memfd_create("gpu", MFD_CLOEXEC)) {
    if (::ftruncate(fd_.get(), kGpuBytes) != 0) throw std::runtime_error("ftruncate");
    void* const mapped =
        ::mmap(nullptr, kGpuBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    if (mapped == MAP_FAILED) throw std::runtime_error("mmap");
    bytes_ = static_cast<std::byte*>(mapped);
  }
  ~FakeGpuMemory() { ::munmap(bytes_, kGpuBytes); }
  FakeGpuMemory(const FakeGpuMemory&) = delete;
  FakeGpuMemory& operator=(const FakeGpuMemory&) = delete;
  int fd() const { return fd_.get(); }
  const std::byte* bytes() const { return bytes_; }

 private:
  UniqueFd fd_;
  std::byte* bytes_ = nullptr;
};

LabOptions two_rails() {
  LabOptions options;
  options.source_devices = {{.name = "mlx5_0"}, {.name = "mlx5_1"}};
  options.puller_devices = {{.name = "mlx5_0"}, {.name = "mlx5_1"}};
  return options;
}

Result<DeviceLanding> land_on(VerbsLab& lab, const FakeGpuMemory& gpu,
                              const std::vector<std::string>& homes) {
  return lab.puller().connector().use_device_memory(gpu.fd(), kGpuBytes, homes);
}

class GpuLanding : public ::testing::Test {
 protected:
  GpuLanding() : lab_(two_rails()) {}
  FakeGpuMemory gpu_;
  VerbsLab lab_;
};

TEST_F(GpuLanding, BytesLandOverTheNearRailsAlone) {
  auto landing = land_on(lab_, gpu_, {"mlx5_1:1"});
  ASSERT_TRUE(landing) << landing.error().message();
  EXPECT_THAT(landing->other_homes, ElementsAre("mlx5_0:1"));
  EXPECT_EQ(landing->addresses.size(), kGpuBytes);
  {
    auto paths = lab_.puller().connect(lab_.source(), lab_.token(), landing->other_homes);
    ASSERT_TRUE(paths) << paths.error().message();
    ASSERT_EQ(paths->size(), 1u);
    EXPECT_EQ((*paths)[0]->home()->name, "mlx5_1:1");
    // One run, and runs so short that reads into host memory would be copied from a bounce block.
    ReadOp whole = lab_.read(1, kMiB, landing->addresses.data(), kMiB);
    whole.in_device = true;
    ReadOp strided = lab_.read(2, 2 * kMiB, landing->addresses.data() + 2 * kMiB, 64);
    strided.count = 100;
    strided.remote_stride = 128;
    strided.local_stride = 256;
    strided.in_device = true;
    EXPECT_EQ(testing::read_one(*(*paths)[0], whole), OpStatus::kOk);
    EXPECT_EQ(testing::read_one(*(*paths)[0], strided), OpStatus::kOk);
  }
  const std::byte* const sent = lab_.segment().bytes().data();
  EXPECT_EQ(std::memcmp(gpu_.bytes(), sent + kMiB, kMiB), 0);
  for (std::size_t run = 0; run < 100; ++run) {
    EXPECT_EQ(std::memcmp(gpu_.bytes() + 2 * kMiB + run * 256, sent + 2 * kMiB + run * 128, 64), 0)
        << run;
    for (std::size_t gap = 64; gap < 256; ++gap) {
      ASSERT_EQ(gpu_.bytes()[2 * kMiB + run * 256 + gap], std::byte{0}) << run << " + " << gap;
    }
  }
}

TEST_F(GpuLanding, APathOverAnotherRailReadsNothingAndSaysSo) {
  const auto landing = land_on(lab_, gpu_, {"mlx5_1:1"});
  ASSERT_TRUE(landing) << landing.error().message();
  const std::vector<std::string> near{"mlx5_1:1"};
  auto far = lab_.puller().connect(lab_.source(), lab_.token(), near);
  ASSERT_TRUE(far) << far.error().message();
  ReadOp op = lab_.read(1, 0, landing->addresses.data(), kMiB);
  op.in_device = true;
  EXPECT_EQ(testing::read_one(*(*far)[0], op), OpStatus::kLocalFault);
  // The path serves host memory as before.
  std::vector<std::byte> local(kMiB);
  const ReadOp other = lab_.read(2, 0, local.data(), kMiB);
  EXPECT_EQ(testing::read_one(*(*far)[0], other), OpStatus::kOk);
  EXPECT_TRUE(lab_.landed(other));
}

TEST_F(GpuLanding, ADeviceThatRefusesLeavesNothingRegistered) {
  lab_.network().fail_call(FakeCall::kRegDmabufMr,
                           {.error = EOPNOTSUPP, .count = 1, .device = "puller/mlx5_1"});
  const auto refused = land_on(lab_, gpu_, {"mlx5_0:1", "mlx5_1:1"});
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("mlx5_1"));
  EXPECT_EQ(lab_.puller().connector().use_device_memory(gpu_.fd(), kGpuBytes, {}).error().code(),
            ErrorCode::kInvalid);
  EXPECT_TRUE(land_on(lab_, gpu_, {"mlx5_0:1", "mlx5_1:1"}));
}

}  // namespace
}  // namespace rekindle::transport::verbs
