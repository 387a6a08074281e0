#pragma once

#include <memory>

#include "src/bucket/collective.h"

namespace rekindle::cuda {

// By NCCL, of devices of src/cuda. kNotFound: there is no NCCL here.
Result<std::unique_ptr<bucket::Collectives>> make_nccl_collectives();

}  // namespace rekindle::cuda
