#pragma once

#include <cstdint>
#include <memory>

#include "src/base/blake3_box.h"
#include "src/cuda/handles.h"

// Private to src/cuda.
namespace rekindle::cuda {

// BLAKE3-256 of many tiles in a GPU's memory, in two launches: one thread hashes a chunk of 1 KiB,
// then one block builds the tree of a tile. The result is that of blake3_of_box() (src/base). The
// driver compiles the kernels when they are loaded, which takes it some 100 ms unless its cache has
// them.
class DigestKernel {
 public:
  // The longest box: 1024 chunks.
  static constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 20;

  // All addresses are of this GPU's memory, and multiples of 16 but for `mismatches`, a multiple of
  // 4. The memory stays as it is until the work is done.
  struct Work {
    // `count` BoxBytes (40 bytes each). Each box has at most `longest_bytes`, which is at most
    // kMostBytes. Boxes are read fastest (16 bytes at once) where address, run_bytes and strides
    // are multiples of 16, slower where they are multiples of 4, and slowly elsewhere; address and
    // strides alone matter where there is one run.
    CUdeviceptr boxes = 0;
    std::uint32_t count = 0;
    std::uint64_t longest_bytes = kMostBytes;
    // scratch_bytes(count, longest_bytes) that nothing else uses meanwhile.
    CUdeviceptr scratch = 0;
    // The results: `count` digests of 32 bytes each; or 0.
    CUdeviceptr digests = 0;
    // What the digests should be, `count` of 32 bytes; or 0.
    CUdeviceptr expected = 0;
    // One bit for each box, in words of 32 bits (box 0 is bit 0 of word 0): 1 where its digest is
    // not the expected one. Needed with `expected`, and cleared first.
    CUdeviceptr mismatches = 0;
  };

  // With `context` current. Null where the driver cannot compile it (a container without its JIT
  // compiler).
  static std::unique_ptr<DigestKernel> load(std::shared_ptr<const Context> context);

  // 32 bytes for each chunk of the longest box, for each box: 8 MiB for 256 tiles of 1 MiB.
  static std::uint64_t scratch_bytes(std::uint32_t count, std::uint64_t longest_bytes);

  // Queues it; with the context current. A box that is longer than `longest_bytes`, has no row or
  // no plane, or lies elsewhere is the end of the context.
  CUresult launch(const Work& work, CUstream stream) const;

 private:
  DigestKernel(std::shared_ptr<const Context> context, CUmodule module, CUfunction chunks,
               CUfunction roots)
      : module_(std::move(context), module), chunks_(chunks), roots_(roots) {}

  const Handle<CUmodule, &Api::module_unload> module_;
  const CUfunction chunks_;
  const CUfunction roots_;
};

}  // namespace rekindle::cuda
