#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "src/base/blake3_core.h"
#include "src/bucket/device.h"
#include "src/cuda/handles.h"

// Private to src/cuda.
namespace rekindle::cuda {

// BLAKE3-256 of many tiles in a GPU's memory, in two launches: one thread hashes a chunk of 1 KiB,
// then one block builds the tree of a tile. The result equals blake3_of_box() (src/base). The
// driver compiles the kernels when they are loaded, which takes some 100 ms unless its cache has
// them.
class DigestKernel {
 public:
  // The longest box: 1024 chunks.
  static constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 20;

  // All addresses are in this GPU's memory. They are multiples of 16, but `mismatches` of 4. The
  // memory does not change until the work is done.
  struct Work {
    // `count` BoxBytes (40 bytes each). Each box has at most `longest_bytes`, which is at most
    // kMostBytes. Boxes are read fastest (16 bytes at once) where address, run_bytes and strides
    // are multiples of 16, slower where they are multiples of 4, and slowest elsewhere. With only
    // one run, run_bytes does not matter.
    CUdeviceptr boxes = 0;
    std::uint32_t count = 0;
    std::uint64_t longest_bytes = kMostBytes;
    // scratch_bytes(count, longest_bytes) bytes for this work alone.
    CUdeviceptr scratch = 0;
    // The results: `count` digests of 32 bytes each; or 0.
    CUdeviceptr digests = 0;
    // The expected digests, `count` of 32 bytes each; or 0.
    CUdeviceptr expected = 0;
    // One bit for each box, in words of 32 bits (box 0 is bit 0 of word 0): 1 where its digest is
    // not the expected one. Needed with `expected`, and cleared first.
    CUdeviceptr mismatches = 0;
  };

  // `context` is current. Null: the driver cannot compile it (a container without its JIT
  // compiler).
  static std::unique_ptr<DigestKernel> load(std::shared_ptr<const Context> context);

  // 32 bytes for each chunk of the longest box, for each box: 8 MiB for 256 tiles of 1 MiB.
  static std::uint64_t scratch_bytes(std::uint32_t count, std::uint64_t longest_bytes);

  // Queues the work; the context is current. A box that is longer than `longest_bytes`, has no row
  // or no plane, or is not in this GPU's memory destroys the context.
  CUresult launch(const Work& work, CUstream stream) const;

 private:
  DigestKernel(std::shared_ptr<const Context> context, CUmodule module, CUfunction chunks,
               CUfunction roots)
      : module_(std::move(context), module), chunks_(chunks), roots_(roots) {}

  const Handle<CUmodule, &Api::module_unload> module_;
  const CUfunction chunks_;
  const CUfunction roots_;
};

// The memory of a batch of digests: boxes, scratch and results on the GPU, and
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
