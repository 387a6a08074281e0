#pragma once

#include <memory>
#include <span>

#include "src/bucket/device.h"
#include "src/cuda/handles.h"

// Private to src/cuda.
namespace rekindle::cuda {

// Copies inside a GPU by a kernel, many in one launch. The driver needs 4 to 6 us of the caller's
// time for each copy that it is asked for, which for buckets of small tensors is longer than they
// take to arrive.
class MoveKernel {
 public:
  static constexpr std::size_t kMost = 160;  // moves: of the 4 KiB that a kernel's parameters have

  // With `context` current. Null where the driver cannot compile it (a container without its JIT
  // compiler).
  static std::unique_ptr<MoveKernel> load(std::shared_ptr<const Context> context);

  // Queues all of them, in any order; with the context current. From and to memory of this GPU: an
  // address of anything else is the end of the context.
  CUresult launch(std::span<const bucket::Move> moves, CUstream stream) const;

 private:
  MoveKernel(std::shared_ptr<const Context> context, CUmodule module, CUfunction function)
      : module_(std::move(context), module), function_(function) {}

  const Handle<CUmodule, &Api::module_unload> module_;
  const CUfunction function_;
};

}  // namespace rekindle::cuda
