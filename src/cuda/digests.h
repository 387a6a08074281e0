#pragma once

#include <memory>
#include <span>
#include <utility>

#include "src/bucket/device.h"
#include "src/cuda/digest_kernel.h"

namespace rekindle::cuda {

// Private to src/cuda. What a batch of digests needs: boxes, scratch and results in the GPU's
// memory, and boxes and results in host memory. One thread at a time.
class CudaDigests final : public bucket::Digests {
 public:
  static std::uint64_t device_bytes(std::size_t capacity);

  // `memory`: device_bytes(capacity) of the GPU's.
  CudaDigests(std::shared_ptr<const DigestKernel> kernel, std::unique_ptr<bucket::Memory> memory,
              std::size_t capacity);

  std::size_t capacity() const override { return capacity_; }
  std::span<const Digest> values() const override { return {results(), count_}; }

  // For the device to pin, and the pin to keep. `is_mapped`: kernels may use the host's addresses
  // of it. Then they read the boxes and write the results there. A copy of its own would wait
  // behind every upload that the copy engine has queued.
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
  const std::unique_ptr<std::byte, Free> host_;  // boxes, then results
  std::unique_ptr<bucket::Pin> pin_;             // of host_; goes first
  bool is_mapped_ = false;
  std::size_t count_ = 0;
};

}  // namespace rekindle::cuda
