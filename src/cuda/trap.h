#pragma once

#include "src/cuda/api.h"

namespace rekindle::cuda {

// For tests, behind a failpoint: queues a kernel that traps. The current context is unusable
// afterwards.
CUresult trap(const Api& api, CUstream stream);

}  // namespace rekindle::cuda
