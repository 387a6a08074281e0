// Replaces nccl.cc and nccl_collective.cc in a build without NCCL's header.
#include "src/cuda/nccl.h"

namespace rekindle::cuda {

Result<std::unique_ptr<bucket::Collectives>> make_nccl_collectives() {
  return fail(ErrorCode::kNotFound,
              "this build has no NCCL: install libnccl-dev and configure it again");
}

}  // namespace rekindle::cuda
