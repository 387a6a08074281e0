#pragma once

#include <memory>
#include <span>
#include <utility>

#include "src/bucket/device.h"
#include "src/cuda/digest_kernel.h"

namespace rekindle::cuda {

// Private to src/cuda. The memory of a batch of digests: boxes, scratch and results on the GPU, and
// boxes and results in host memory. One thread at a time.
class CudaDigests final : public bucket::Digests {
 public:
  static std::uint64_t device_bytes(std::size_t capacity);

  // `memory`: device_bytes(capacity) bytes of the GPU.
  CudaDigests(std::shared_ptr<const DigestKernel> kernel, std::unique_ptr<bucket::Memory> memory,
              std::size_t capacity);

  std::size_t capacity() const override { return capacity_; }
  std::span<const Digest> values() const override { return {results(), count_}; }

  // The device pins this memory, and the pin is kept here. `is_mapped`: kernels can use the host's
  // addresses, and read the boxes and write the results there. A separate copy would wait behind
  // every upload in the copy engine's queue.
  std::span<const std::byte> host_memory() const { return {host_.get(), host_bytes_}; }
  void keep(std::unique_ptr<bucket::Pin> pin, bool is_mapped) {
    pin_ = std::move(pin);
    is_mapped_ = is_mapped;
  }

  // With the context current.
  CUresult queue(std::span<const BoxBytes> boxes, const Api& api, CUstream stream);

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  Digest* results() const;

  const std::shared_ptr<const DigestKernel> kernel_;
  const std::unique_ptr<bucket::Memory> memory_;
  const std::size_t capacity_;
  const std::size_t host_bytes_;
  // Boxes, then results.
  const std::unique_ptr<std::byte, Free> host_;
  // Of host_; destroyed before it.
  std::unique_ptr<bucket::Pin> pin_;
  bool is_mapped_ = false;
  std::size_t count_ = 0;
};

}  // namespace rekindle::cuda
