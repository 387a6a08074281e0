#include "src/cuda/trap.h"

namespace rekindle::cuda {

namespace {
constexpr const char* kTrapName = "rekindle_trap";
constexpr const char* kTrapCode = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry rekindle_trap() {
  trap;
  ret;
}
)";
}  // namespace

// The module is never unloaded, because its context is lost anyway.
CUresult trap(const Api& api, CUstream stream) {
  CUmodule module = nullptr;
  if (const CUresult result = api.module_load(&module, kTrapCode); result != CUDA_SUCCESS) {
    return result;
  }
  CUfunction function = nullptr;
  if (const CUresult result = api.module_function(&function, module, kTrapName);
      result != CUDA_SUCCESS) {
    return result;
  }
  return api.launch(function, 1, 1, 1, 1, 1, 1, 0, stream, nullptr, nullptr);
}

}  // namespace rekindle::cuda
