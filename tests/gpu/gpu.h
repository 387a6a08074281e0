#pragma once

#include <cstdint>
#include <string>

#include <sys/types.h>

// What the tests run on: a double (double_gpu.cc) or the first GPU (cuda_gpu.cc).
namespace rekindle::testing {

std::string gpu_missing();    // why there is none; "" when there is one
std::string agent_gpu();      // of the agent's --gpu
std::string worker_device();  // as rk_attach_options.device
// Of several: what the agent's --gpu and each worker's device are, and why there are not so many.
std::string gpus_missing(int count);
std::string agent_gpus(int count);
std::string worker_device(int index);
// Of the double by this process, of a GPU by all together.
std::uint64_t device_bytes_used(pid_t device_process);

}  // namespace rekindle::testing
