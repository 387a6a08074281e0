#include "src/cuda/device.h"

#include <regex>
#include <set>
#include <thread>

#include <unistd.h>

#include "src/base/units.h"
#include "src/cuda/api.h"
#include "src/cuda/move_kernel.h"
#include "tests/bucket/device_conformance.h"
#include "tests/cuda/gpu_test.h"

namespace rekindle::cuda::testing {
namespace {

using bucket::testing::DeviceBackend;

Result<std::unique_ptr<bucket::Device>> make_first() {
  TRY(auto driver, Driver::load());
  return open_device(std::move(driver), 0);
}

class CudaDeviceTest : public GpuTest {
 protected:
  // CUDA_ERROR_INVALID_CONTEXT when the thread has no context.
  CUresult current(CUdevice& device) const { return driver_->api().context_device(&device); }
};

TEST_F(CudaDeviceTest, GpusAreNamedAsNvidiaSmiDoes) {
  ASSERT_FALSE(devices_.empty());
  const std::regex uuid("(GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}");
  std::set<std::string> ids;
  for (const DeviceSummary& device : devices_) {
    EXPECT_TRUE(std::regex_match(device.id, uuid)) << device.id;
    EXPECT_FALSE(device.name.empty());
    EXPECT_GT(device.total_bytes, 0u);
    EXPECT_EQ(device.not_shareable.empty(), device.id.starts_with("GPU-")) << device.not_shareable;
    ids.insert(device.id);
  }
  EXPECT_EQ(ids.size(), devices_.size());
}

// What a NIC would register. No NIC is here: only the export and the wait for its writes run.
TEST_F(CudaDeviceTest, MemoryIsExportedAsADmabufOfItsWholePages) {
  const auto device = must(open_device(driver_, 0));
  for (const std::uint64_t bytes : {std::uint64_t{3} << 20, (std::uint64_t{64} << 20) + 256}) {
    const auto memory = must(device->allocate(bytes));
    const auto exported = device->export_memory(*memory);
    ASSERT_TRUE(exported) << exported.error().message();
    EXPECT_EQ(::lseek(exported->get(), 0, SEEK_END), static_cast<off_t>(round_up(bytes, 4096)));
  }
  const auto seen = device->see_nic_writes();
  EXPECT_TRUE(seen) << seen.error().message();
}

TEST_F(CudaDeviceTest, EachIsFoundByItsId) {
  for (const DeviceSummary& summary : devices_) {
    const auto device = must(open_device_by_id(driver_, summary.id));
    EXPECT_EQ(device->id(), summary.id);
    EXPECT_EQ(device->name(), summary.name);
  }
  const auto none = open_device_by_id(driver_, "GPU-00000000-0000-0000-0000-000000000000");
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code(), ErrorCode::kNotFound);
  EXPECT_EQ(open_device(driver_, static_cast<int>(devices_.size())).error().code(),
            ErrorCode::kNotFound);
}

TEST_F(CudaDeviceTest, TheDriverCompilesTheKernelOfMoves) {
  const auto context = must(Context::retain(driver_, 0));
  std::unique_ptr<MoveKernel> kernel;
  context->run([&] {
    kernel = MoveKernel::load(context);
    return CUDA_SUCCESS;
  });
  EXPECT_NE(kernel, nullptr);
}

TEST_F(CudaDeviceTest, TheThreadsContextStaysAsItWas) {
  std::thread([this] {
    CUdevice device = 0;
    ASSERT_EQ(current(device), CUDA_ERROR_INVALID_CONTEXT);
    EXPECT_EQ(must(current_device_ordinal(*driver_)), 0);
    const auto gpu = must(open_device(driver_, 0));
    const auto memory = must(gpu->allocate(4096));
    const auto stream = must(gpu->make_stream());
    const std::vector<std::byte> source(4096);
    const bucket::Upload upload{
        .from = source.data(), .to = memory->address(), .run_bytes = source.size()};
    must(stream->upload({&upload, 1}));
    EXPECT_EQ(current(device), CUDA_ERROR_INVALID_CONTEXT);

    const Api& api = driver_->api();
    const int last = static_cast<int>(devices_.size()) - 1;
    CUcontext context = nullptr;
    ASSERT_EQ(api.primary_context_retain(&context, last), CUDA_SUCCESS);
    ASSERT_EQ(api.context_push(context), CUDA_SUCCESS);
    EXPECT_EQ(must(current_device_ordinal(*driver_)), last);
    must(stream->finish(bucket::testing::soon()));
    EXPECT_EQ(must(current_device_ordinal(*driver_)), last);
    api.context_pop(&context);
    api.primary_context_release(last);
  }).join();
}

TEST_F(CudaDeviceTest, OnePinServesAllGpus) {
  std::vector<std::byte> host(8 << 20, std::byte{3});
  const auto first = must(open_device(driver_, 0));
  const auto pin = must(first->pin(host));
  const auto again = first->pin(host);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code(), ErrorCode::kUnavailable) << again.error().message();
  for (const DeviceSummary& summary : devices_) {
    const auto gpu = must(open_device(driver_, summary.ordinal));
    const auto memory = must(gpu->allocate(host.size()));
    const auto stream = must(gpu->make_stream());
    const bucket::Upload upload{
        .from = host.data(), .to = memory->address(), .run_bytes = host.size()};
    must(stream->upload({&upload, 1}));
    std::vector<std::byte> seen(host.size());
    const bucket::Download download{
        .from = memory->address(), .to = seen.data(), .bytes = seen.size()};
    must(stream->download({&download, 1}));
    must(stream->finish(bucket::testing::soon()));
    EXPECT_EQ(seen, host) << summary.id;
  }
}

TEST_F(CudaDeviceTest, MemoryThatIsNotOfThisWorldCannotBeOpened) {
  const auto gpu = must(open_device(driver_, 0));
  const bucket::Handle nonsense{std::string(64, '\x5a'), UniqueFd()};
  const auto memory = gpu->open_memory(nonsense, 4096);
  ASSERT_FALSE(memory);
  EXPECT_EQ(memory.error().code(), ErrorCode::kUnavailable) << memory.error().message();
  EXPECT_TRUE(gpu->allocate(4096)) << "the context is not lost";
}

}  // namespace
}  // namespace rekindle::cuda::testing

namespace rekindle::bucket::testing {
namespace {
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceConformance,
                         ::testing::Values(DeviceBackend{"Gpu", cuda::testing::make_first}),
                         [](const auto& parameter) { return parameter.param.name; });
}  // namespace
}  // namespace rekindle::bucket::testing

int main(int argc, char** argv) {
  namespace testing = rekindle::bucket::testing;
  if (const std::string script = testing::child_script(argc, argv); !script.empty()) {
    const auto device = rekindle::cuda::testing::make_first();
    return device ? testing::run_child(script, **device) : 1;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
