#include "tools/bench/benchmarks.h"

#if REKINDLE_WITH_CUDA
#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "src/base/blake3.h"
#include "src/base/clock.h"
#include "src/cuda/device.h"
#include "src/cuda/digest_kernel.h"
#include "src/cuda/stream.h"
#include "tools/bench/bench_memory.h"
#endif

namespace rekindle::bench {

#if REKINDLE_WITH_CUDA
namespace {

constexpr int kRepeats = 20;  // of each measurement, so that starting it does not count
constexpr std::uint64_t kNoiseBytes = std::uint64_t{64} << 20;
constexpr std::chrono::minutes kGpuPatience{1};

// Tiles in the memory of the first GPU, and all that their digests need.
class GpuTiles {
 public:
  static Result<std::unique_ptr<GpuTiles>> make(std::uint64_t bytes) {
    TRY(auto driver, cuda::Driver::load());
    TRY(auto context, cuda::Context::retain(driver, 0));
    TRY(auto device, cuda::open_device(std::move(driver), 0));
    auto tiles = std::unique_ptr<GpuTiles>(new GpuTiles(std::move(context), std::move(device)));
    TRY_VOID(tiles->prepare(bytes));
    return tiles;
  }

  std::string name() const { return device_->name(); }

  Result<double> copy() {
    const std::uint64_t half = memory_->bytes() / 2;
    const bucket::Move move{
        .from = memory_->address(), .to = memory_->address() + half, .bytes = half};
    return timed([&] { return stream_->move({&move, 1}); });
  }
  Result<double> digest() {
    return timed([this]() -> Result<void> {
      return check(context_->run([this] { return kernel_->launch(work_, stream().get()); }));
    });
  }

  // The digests of the first tiles against those of the CPU.
  Result<void> compare() {
    std::vector<Digest> seen(noise_.size() / kTileBytes);
    const bucket::Download download{.from = digests_->address(),
                                    .to = reinterpret_cast<std::byte*>(seen.data()),
                                    .bytes = seen.size() * sizeof(Digest)};
    TRY_VOID(stream_->download({&download, 1}));
    TRY_VOID(finish());
    for (std::size_t i = 0; i < seen.size(); ++i) {
      if (seen[i] != blake3(std::span(noise_).subspan(i * kTileBytes, kTileBytes))) {
        return fail(ErrorCode::kCorrupt,
                    "bench digest: {} and the CPU have different digests of tile {}: one of them "
                    "computes wrongly",
                    name(), i);
      }
    }
    return {};
  }

 private:
  GpuTiles(std::shared_ptr<const cuda::Context> context, std::unique_ptr<bucket::Device> device)
      : context_(std::move(context)), device_(std::move(device)) {}

  Result<void> prepare(std::uint64_t bytes) {
    TRY(stream_, device_->make_stream());
    TRY_VOID(check(context_->run([this] {
      kernel_ = cuda::DigestKernel::load(context_);
      return kernel_ == nullptr ? CUDA_ERROR_INVALID_PTX : CUDA_SUCCESS;
    })));
    TRY(memory_, device_->allocate(bytes));
    noise_.resize(std::min(bytes, kNoiseBytes));
    fill_with_noise(noise_);
    for (std::uint64_t at = 0; at < bytes; at += noise_.size()) {
      TRY_VOID(upload(noise_, memory_->address() + at,
                      std::min<std::uint64_t>(bytes - at, noise_.size())));
    }
    std::vector<BoxBytes> boxes(bytes / kTileBytes);
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      boxes[i].address = memory_->address() + i * kTileBytes;
      boxes[i].run_bytes = kTileBytes;
    }
    const auto count = static_cast<std::uint32_t>(boxes.size());
    TRY(boxes_, device_->allocate(count * sizeof(BoxBytes)));
    TRY(digests_, device_->allocate(count * sizeof(Digest)));
    TRY(scratch_, device_->allocate(cuda::DigestKernel::scratch_bytes(count, kTileBytes)));
    TRY_VOID(upload(std::as_bytes(std::span(boxes)), boxes_->address(), boxes_->bytes()));
    work_ = {.boxes = boxes_->address(),
             .count = count,
             .longest_bytes = kTileBytes,
             .scratch = scratch_->address(),
             .digests = digests_->address()};
    return {};
  }

  Result<void> upload(std::span<const std::byte> from, bucket::DeviceAddress to,
                      std::uint64_t bytes) {
    const bucket::Upload copy{.from = from.data(), .to = to, .run_bytes = bytes};
    TRY_VOID(stream_->upload({&copy, 1}));
    return finish();
  }
  Result<void> finish() { return stream_->finish(SteadyClock().now() + kGpuPatience); }
  const cuda::CudaStream& stream() const {
    return static_cast<const cuda::CudaStream&>(*stream_);  // of a device of src/cuda
  }
  Result<void> check(CUresult result) const {
    if (result == CUDA_SUCCESS) return {};
    return fail(cuda::error_of(context_->api(), result, "bench digest"));
  }

  // Seconds of kRepeats times `queue`. Waits without sleeping.
  template <typename Queue>
  Result<double> timed(Queue&& queue) {
    TRY_VOID(finish());
    const TimePoint begin = SteadyClock().now();
    for (int i = 0; i < kRepeats; ++i) TRY_VOID(queue());
    CUresult result = CUDA_ERROR_NOT_READY;
    while (result == CUDA_ERROR_NOT_READY && SteadyClock().now() < begin + kGpuPatience) {
      result = context_->run([this] { return context_->api().stream_query(stream().get()); });
    }
    TRY_VOID(check(result));
    return seconds(SteadyClock().now() - begin);
  }

  const std::shared_ptr<const cuda::Context> context_;
  const std::unique_ptr<bucket::Device> device_;
  std::unique_ptr<cuda::DigestKernel> kernel_;
  std::unique_ptr<bucket::Memory> memory_;
  std::unique_ptr<bucket::Memory> boxes_;
  std::unique_ptr<bucket::Memory> digests_;
  std::unique_ptr<bucket::Memory> scratch_;
  // Ends first: it waits for the work that uses the memory.
  std::unique_ptr<bucket::Stream> stream_;
  std::vector<std::byte> noise_;
  cuda::DigestKernel::Work work_;
};

}  // namespace

Result<GpuDigestTimes> measure_gpu_digests(std::uint64_t bytes, std::size_t rounds) {
  TRY(const auto tiles, GpuTiles::make(bytes));
  GpuDigestTimes times{.name = tiles->name(), .bytes = bytes, .repeats = kRepeats};
  // The first of each is not counted; copying changes the second half only.
  TRY_VOID(tiles->digest());
  TRY_VOID(tiles->compare());
  TRY_VOID(tiles->copy());
  for (std::size_t round = 0; round < rounds; ++round) {
    TRY(const double copy, tiles->copy());
    TRY(const double digest, tiles->digest());
    times.copy.push_back(copy);
    times.digest.push_back(digest);
  }
  return times;
}

#else

Result<GpuDigestTimes> measure_gpu_digests(std::uint64_t, std::size_t) {
  return fail(ErrorCode::kUnavailable, "this build has no CUDA");
}

#endif

}  // namespace rekindle::bench
