#include "src/cuda/digest_kernel.h"

#include <cstring>
#include <random>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "src/base/blake3.h"
#include "src/base/clock.h"
#include "src/cuda/device.h"
#include "src/cuda/stream.h"
#include "tests/cuda/gpu_test.h"
#include "tests/cuda/random_boxes.h"
#include "tests/support/must.h"

namespace rekindle::cuda::testing {
namespace {

TimePoint soon() { return SteadyClock().now() + std::chrono::seconds(20); }

class DigestKernelTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    device_ = must(open_device(driver_, 0));
    stream_ = must(device_->make_stream());
    cuda_stream_ = dynamic_cast<CudaStream*>(stream_.get());
    ASSERT_NE(cuda_stream_, nullptr);
    context_ = must(Context::retain(driver_, 0));
    context_->run([&] {
      kernel_ = DigestKernel::load(context_);
      return CUDA_SUCCESS;
    });
    ASSERT_NE(kernel_, nullptr) << "the driver does not compile the kernels";
  }

  template <typename T>
  std::unique_ptr<bucket::Memory> to_gpu(const std::vector<T>& values) {
    auto memory = must(device_->allocate(values.size() * sizeof(T)));
    const bucket::Upload upload{.from = reinterpret_cast<const std::byte*>(values.data()),
                                .to = memory->address(),
                                .run_bytes = values.size() * sizeof(T)};
    must(stream_->upload({&upload, 1}));
    must(stream_->finish(soon()));
    return memory;
  }
  template <typename T>
  std::vector<T> from_gpu(const bucket::Memory& memory, std::size_t count) {
    std::vector<T> values(count);
    const bucket::Download download{.from = memory.address(),
                                    .to = reinterpret_cast<std::byte*>(values.data()),
                                    .bytes = count * sizeof(T)};
    must(stream_->download({&download, 1}));
    must(stream_->finish(soon()));
    return values;
  }

  std::unique_ptr<bucket::Device> device_;
  std::unique_ptr<bucket::Stream> stream_;
  CudaStream* cuda_stream_ = nullptr;
  std::shared_ptr<const Context> context_;
  std::unique_ptr<DigestKernel> kernel_;
};

// Boxes in noise on the GPU, and what they should give.
struct Sample {
  std::vector<std::byte> memory;
  // Addresses are offsets.
  std::vector<BoxBytes> boxes;
  std::vector<Digest> expected;
};
Sample make_sample(std::uint64_t seed, std::size_t count) {
  std::mt19937_64 rng(seed);
  Sample sample;
  sample.memory = noise(std::size_t{16} << 20, rng);
  for (std::size_t i = 0; i < count; ++i) {
    BoxBytes box = random_box(rng, sample.memory.size());
    if (i == 0) box = {};
    if (i == 1) box = {.address = 32, .run_bytes = 1 << 20};
    sample.boxes.push_back(box);
    sample.expected.push_back(blake3(bytes_in(box, sample.memory)));
  }
  return sample;
}

TEST_F(DigestKernelTest, GivesTheBlake3OfBoxesOfEveryShape) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Sample sample = make_sample(seed, 500);
  const auto memory = to_gpu(sample.memory);
  for (BoxBytes& box : sample.boxes) box.address += memory->address();
  const auto boxes = to_gpu(sample.boxes);
  const auto count = static_cast<std::uint32_t>(sample.boxes.size());
  const auto scratch =
      must(device_->allocate(DigestKernel::scratch_bytes(count, DigestKernel::kMostBytes)));
  const auto digests = must(device_->allocate(count * sizeof(Digest)));
  const DigestKernel::Work work{.boxes = boxes->address(),
                                .count = count,
                                .scratch = scratch->address(),
                                .digests = digests->address()};
  ASSERT_EQ(context_->run([&] { return kernel_->launch(work, cuda_stream_->get()); }),
            CUDA_SUCCESS);
  const auto seen = from_gpu<Digest>(*digests, count);
  for (std::size_t i = 0; i < count; ++i) {
    const BoxBytes& box = sample.boxes[i];
    EXPECT_EQ(seen[i].hex(), sample.expected[i].hex())
        << i << ": " << box.planes << " x " << box.rows << " x " << box.run_bytes;
  }
}

TEST_F(DigestKernelTest, MarksExactlyTheBoxesThatDiffer) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Sample sample = make_sample(seed, 333);
  std::mt19937_64 rng(seed + 1);
  std::vector<bool> wrong(sample.boxes.size());
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    if (rng() % 10 != 0) continue;
    wrong[i] = true;
    sample.expected[i].bytes[rng() % 32] ^= static_cast<std::uint8_t>(1 << rng() % 8);
  }
  const auto memory = to_gpu(sample.memory);
  for (BoxBytes& box : sample.boxes) box.address += memory->address();
  const auto boxes = to_gpu(sample.boxes);
  const auto expected = to_gpu(sample.expected);
  const auto count = static_cast<std::uint32_t>(sample.boxes.size());
  const std::size_t words = (count + 31) / 32;
  // What it held before is cleared.
  const auto mismatches = to_gpu(std::vector<std::uint32_t>(words, 0xffffffff));
  const auto scratch =
      must(device_->allocate(DigestKernel::scratch_bytes(count, DigestKernel::kMostBytes)));
  const DigestKernel::Work work{.boxes = boxes->address(),
                                .count = count,
                                .scratch = scratch->address(),
                                .expected = expected->address(),
                                .mismatches = mismatches->address()};
  for (int round = 0; round < 2; ++round) {
    ASSERT_EQ(context_->run([&] { return kernel_->launch(work, cuda_stream_->get()); }),
              CUDA_SUCCESS);
    const auto bits = from_gpu<std::uint32_t>(*mismatches, words);
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_EQ((bits[i / 32] >> i % 32 & 1) != 0, wrong[i]) << i;
    }
  }
}

TEST_F(DigestKernelTest, RefusesWorkThatItCannotDo) {
  const auto launch = [&](const DigestKernel::Work& work) {
    return context_->run([&] { return kernel_->launch(work, cuda_stream_->get()); });
  };
  EXPECT_EQ(launch({}), CUDA_SUCCESS);
  EXPECT_EQ(launch({.count = 1, .longest_bytes = DigestKernel::kMostBytes + 1}),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(launch({.count = 1, .expected = 16}), CUDA_ERROR_INVALID_VALUE);
}

}  // namespace
}  // namespace rekindle::cuda::testing
