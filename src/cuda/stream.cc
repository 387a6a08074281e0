#include "src/cuda/stream.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "src/cuda/digest_kernel.h"
#include "src/cuda/handles.h"
#if REKINDLE_CUDA_FAILPOINTS
#include "src/base/failpoint.h"
#endif

namespace rekindle::cuda {

namespace {

// A device that hangs must not block the destructor of a stream.
constexpr std::chrono::seconds kStreamDrainTime{10};
constexpr std::chrono::microseconds kShortestNap{5};
constexpr std::chrono::microseconds kLongestNap{500};
constexpr std::size_t kSmallestBatch = 4;
// For larger copies the driver's own time does not matter.
constexpr std::uint64_t kLargestByKernel = 4u << 20;

// Default streams have small numbers; the legacy one refuses batches.
bool is_default(CUstream stream) { return reinterpret_cast<std::uintptr_t>(stream) <= 2; }

CUdeviceptr host_address(const std::byte* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

#if REKINDLE_CUDA_FAILPOINTS
constexpr const char* kTrapName = "rekindle_trap";
constexpr const char* kTrapCode = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry rekindle_trap() {
  trap;
  ret;
}
)";

// For tests, behind a failpoint: queues a kernel that traps. The current context is unusable
// afterwards, so the module is never unloaded.
CUresult trap(const Api& api, CUstream stream) {
  CUmodule module = nullptr;
  if (const CUresult result = api.module_load(&module, kTrapCode); result != CUDA_SUCCESS) {
    return result;
  }
  CUfunction function = nullptr;
  if (const CUresult result = api.module_function(&function, module, kTrapName);
      result != CUDA_SUCCESS) {
    return result;
  }
  return api.launch(function, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr);
}
#endif

}  // namespace

CudaStream::CudaStream(std::shared_ptr<const Context> context, CUstream stream, bool owned,
                       std::uint64_t longest_pitch)
    : context_(std::move(context)),
      stream_(stream),
      owned_(owned),
      owner_(context_, owned ? stream : nullptr),
      longest_pitch_(longest_pitch),
      batches_(context_->api().copy_batch != nullptr && !is_default(stream)) {}

CudaStream::~CudaStream() {
  // The owner of a borrowed stream waits for it. After an error none of its work runs. After a
  // timeout the driver frees the stream when its work is done.
  if (owned_) (void)finish(SteadyClock().now() + kStreamDrainTime);
}

Result<void> CudaStream::upload(std::span<const bucket::Upload> copies) {
  uploads_.clear();
  context_->driver().registrations().cut(copies, uploads_);
  const auto two_dimensional = std::partition(
      uploads_.begin(), uploads_.end(), [](const bucket::Upload& copy) { return copy.rows == 1; });
  const auto runs = static_cast<std::size_t>(two_dimensional - uploads_.begin());
#if REKINDLE_CUDA_FAILPOINTS
  if (!failpoint("cuda.upload")) {
    const CUresult trapped = context_->run([&] { return trap(context_->api(), stream_); });
    if (trapped != CUDA_SUCCESS) return fail(error(trapped, "trap, as a test asks"));
  }
#endif
  const CUresult result = context_->run([&] {
    if (const CUresult failed = copy_in(std::span(uploads_).first(runs)); failed != CUDA_SUCCESS) {
      return failed;
    }
    for (const bucket::Upload& copy : std::span(uploads_).subspan(runs)) {
      if (const CUresult failed = copy_rows(copy); failed != CUDA_SUCCESS) return failed;
    }
    return CUDA_SUCCESS;
  });
  if (result != CUDA_SUCCESS) return fail(error(result, "copy to the GPU"));
  return {};
}

CUresult CudaStream::copy_in(std::span<const bucket::Upload> copies) {
  if (begin_batch(copies.size())) {
    for (const bucket::Upload& copy : copies) {
      batch_.to.push_back(copy.to);
      batch_.from.push_back(host_address(copy.from));
      batch_.bytes.push_back(copy.run_bytes);
    }
    if (copy_batch()) return CUDA_SUCCESS;
  }
  for (const bucket::Upload& copy : copies) {
    const CUresult result =
        context_->api().copy_to_device(copy.to, copy.from, copy.run_bytes, stream_);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult CudaStream::copy_rows(const bucket::Upload& copy) {
  const auto fits = [&](std::uint64_t stride) {
    return stride >= copy.run_bytes && stride <= longest_pitch_;
  };
  if (fits(copy.from_stride) && fits(copy.to_stride)) {
    CUDA_MEMCPY2D block{};
    block.srcMemoryType = CU_MEMORYTYPE_HOST;
    block.srcHost = copy.from;
    block.srcPitch = copy.from_stride;
    block.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    block.dstDevice = copy.to;
    block.dstPitch = copy.to_stride;
    block.WidthInBytes = copy.run_bytes;
    block.Height = copy.rows;
    return context_->api().copy_2d(&block, stream_);
  }
  for (std::uint64_t row = 0; row < copy.rows; ++row) {
    const CUresult result =
        context_->api().copy_to_device(copy.to + row * copy.to_stride,
                                       copy.from + row * copy.from_stride, copy.run_bytes, stream_);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

Result<void> CudaStream::move(std::span<const bucket::Move> copies) {
  const CUresult result = context_->run([&] {
    if (copies.size() < kSmallestBatch) return move_few(copies);
    small_.clear();
    large_.clear();
    Range from;
    Range to;
    for (const bucket::Move& copy : copies) {
      if (copy.bytes == 0) continue;
      const bool by_kernel = copy.bytes <= kLargestByKernel &&
                             is_here(from, copy.from, copy.bytes) &&
                             is_here(to, copy.to, copy.bytes);
      (by_kernel ? small_ : large_).push_back(copy);
    }
    const CUresult failed = move_few(large_);
    return failed == CUDA_SUCCESS ? move_small(small_) : failed;
  });
  if (result != CUDA_SUCCESS) return fail(error(result, "copy inside the GPU"));
  return {};
}

CUresult CudaStream::move_few(std::span<const bucket::Move> copies) {
  for (const bucket::Move& copy : copies) {
    if (copy.bytes == 0) continue;
    const CUresult failed = context_->api().copy_in_device(copy.to, copy.from, copy.bytes, stream_);
    if (failed != CUDA_SUCCESS) return failed;
  }
  return CUDA_SUCCESS;
}

CUresult CudaStream::move_small(std::span<const bucket::Move> copies) {
  if (copies.empty()) return CUDA_SUCCESS;
  if (!has_looked_for_kernel_) kernel_ = MoveKernel::load(context_);
  has_looked_for_kernel_ = true;
  if (kernel_ != nullptr) return kernel_->launch(copies, stream_);
  if (begin_batch(copies.size())) {
    for (const bucket::Move& copy : copies) {
      batch_.to.push_back(copy.to);
      batch_.from.push_back(copy.from);
      batch_.bytes.push_back(copy.bytes);
    }
    if (copy_batch()) return CUDA_SUCCESS;
  }
  return move_few(copies);
}

// The driver refuses a copy with a wrong address, or does it if the memory is elsewhere. A kernel
// would destroy the context.
bool CudaStream::is_here(Range& known, CUdeviceptr address, std::uint64_t bytes) const {
  const auto inside = [&] { return address >= known.begin && bytes <= known.end - address; };
  if (address < known.end && inside()) return true;
  const Api& api = context_->api();
  CUdeviceptr begin = 0;
  std::size_t size = 0;
  int device = -1;
  unsigned kind = 0;
  if (api.memory_range(&begin, &size, address) != CUDA_SUCCESS ||
      api.pointer_attribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, begin) != CUDA_SUCCESS ||
      api.pointer_attribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, begin) != CUDA_SUCCESS) {
    return false;
  }
  if (kind != CU_MEMORYTYPE_DEVICE || device != context_->device()) return false;
  known = {begin, begin + size};
  return inside();
}

bool CudaStream::begin_batch(std::size_t count) {
  if (!batches_ || count < kSmallestBatch) return false;
  batch_.to.clear();
  batch_.from.clear();
  batch_.bytes.clear();
  return true;
}

// False: the caller makes the copies one by one, as before 12.8. Some may have been made already;
// making them again in the same stream changes nothing.
bool CudaStream::copy_batch() {
  if (batch_.to.empty()) return true;
  BatchAttributes attributes;
  attributes.source_order = kSourceInStreamOrder;
  std::size_t start = 0;
  std::size_t failed = 0;
  const CUresult result =
      context_->api().copy_batch(batch_.to.data(), batch_.from.data(), batch_.bytes.data(),
                                 batch_.to.size(), &attributes, &start, 1, &failed, stream_);
  batches_ = result == CUDA_SUCCESS;
  return batches_;
}

Result<void> CudaStream::download(std::span<const bucket::Download> copies) {
  downloads_.clear();
  context_->driver().registrations().cut(copies, downloads_);
  const CUresult result = context_->run([&] {
    for (const bucket::Download& copy : downloads_) {
      if (const CUresult failed = copy_out(copy); failed != CUDA_SUCCESS) return failed;
    }
    return CUDA_SUCCESS;
  });
  if (result != CUDA_SUCCESS) return fail(error(result, "copy from the GPU"));
  return {};
}

CUresult CudaStream::copy_out(const bucket::Download& copy) {
  const auto fits = [&](std::uint64_t stride) {
    return stride >= copy.bytes && stride <= longest_pitch_;
  };
  if (copy.rows > 1 && fits(copy.from_stride) && fits(copy.to_stride)) {
    CUDA_MEMCPY2D block{};
    block.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    block.srcDevice = copy.from;
    block.srcPitch = copy.from_stride;
    block.dstMemoryType = CU_MEMORYTYPE_HOST;
    block.dstHost = copy.to;
    block.dstPitch = copy.to_stride;
    block.WidthInBytes = copy.bytes;
    block.Height = copy.rows;
    return context_->api().copy_2d(&block, stream_);
  }
  for (std::uint64_t row = 0; row < copy.rows; ++row) {
    const CUresult result = context_->api().copy_to_host(
        copy.to + row * copy.to_stride, copy.from + row * copy.from_stride, copy.bytes, stream_);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

Result<void> CudaStream::digest(std::span<const BoxBytes> boxes, bucket::Digests& into) {
  if (boxes.size() > into.capacity()) {
    return fail(ErrorCode::kInvalid, "digest {} boxes with room for {}", boxes.size(),
                into.capacity());
  }
  auto& digests = static_cast<CudaDigests&>(into);
  const CUresult result =
      context_->run([&] { return digests.queue(boxes, context_->api(), stream_); });
  if (result != CUDA_SUCCESS) return fail(error(result, "digest memory of the GPU"));
  return {};
}

Result<void> CudaStream::record(bucket::Event& event) {
  const CUevent recorded = static_cast<CudaEvent&>(event).get();
  const CUresult result =
      context_->run([&] { return context_->api().event_record(recorded, stream_); });
  if (result != CUDA_SUCCESS) return fail(error(result, "record an event"));
  return {};
}

Result<void> CudaStream::wait(bucket::Event& event) {
  const CUevent awaited = static_cast<CudaEvent&>(event).get();
  const CUresult result = context_->run(
      [&] { return context_->api().stream_wait_event(stream_, awaited, CU_EVENT_WAIT_DEFAULT); });
  if (result != CUDA_SUCCESS) return fail(error(result, "make a stream wait for an event"));
  return {};
}

Result<void> CudaStream::finish(TimePoint deadline) {
  // cuStreamSynchronize() has no deadline.
  for (std::chrono::microseconds nap = kShortestNap;; nap = std::min(2 * nap, kLongestNap)) {
    const CUresult result = context_->run([this] { return context_->api().stream_query(stream_); });
    if (result == CUDA_SUCCESS) return {};
    if (result != CUDA_ERROR_NOT_READY) return fail(error(result, "finish a stream's work"));
    if (SteadyClock().now() >= deadline) {
      return fail(ErrorCode::kTimeout, "GPU {}: a stream's work is not done yet",
                  context_->device());
    }
    std::this_thread::sleep_for(nap);
  }
}

Error CudaStream::error(CUresult result, std::string_view what) const {
  return error_of(context_->api(), result, fmt::format("GPU {}: {}", context_->device(), what));
}

}  // namespace rekindle::cuda
