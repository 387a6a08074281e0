#pragma once

#include "src/cuda/api.h"

namespace rekindle::cuda {

// For tests, behind a failpoint: queues a kernel that traps. The current context can do nothing
// more once it has run.
CUresult trap(const Api& api, CUstream stream);

}  // namespace rekindle::cuda
