#pragma once

#include <memory>
#include <span>

#include "src/bucket/device.h"
#include "src/cuda/handles.h"

// Private to src/cuda.
namespace rekindle::cuda {

// Makes many copies inside a GPU in one launch of a kernel. The driver takes 4 to 6 us of the
// caller's time for each copy; a bucket of small tensors arrives faster than that.
class MoveKernel {
 public:
  // Moves that fit the 4 KiB of a kernel's parameters.
  static constexpr std::size_t kMost = 160;

  // `context` is current. Null: the driver cannot compile it (a container without its JIT
  // compiler).
  static std::unique_ptr<MoveKernel> load(std::shared_ptr<const Context> context);

  // Queues all moves, in any order; the context is current. Both ends are memory of this GPU: any
  // other address destroys the context.
  CUresult launch(std::span<const bucket::Move> moves, CUstream stream) const;

 private:
  MoveKernel(std::shared_ptr<const Context> context, CUmodule module, CUfunction function)
      : module_(std::move(context), module), function_(function) {}

  const Handle<CUmodule, &Api::module_unload> module_;
  const CUfunction function_;
};

}  // namespace rekindle::cuda
