#pragma once

#include <memory>

#include "src/bucket/collective.h"

namespace rekindle::cuda {

// Collectives of NCCL, for devices of src/cuda. kNotFound: this host has no NCCL.
Result<std::unique_ptr<bucket::Collectives>> make_nccl_collectives();

}  // namespace rekindle::cuda
