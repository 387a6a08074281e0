#include "src/cuda/driver.h"

#include <string>

#include <dlfcn.h>

#include "src/cuda/api.h"

namespace rekindle::cuda {

namespace {

// This code is written for this version, and asks for its ABI.
constexpr int kOldestVersion = 12'000;
constexpr int kBatchVersion = 12'080;
constexpr int kWholeUuidVersion = 9'020;

using GetProcAddress = decltype(&::cuGetProcAddress);

std::string reason_of(const char* library, const char* said) {
  const std::string text = said == nullptr ? "" : said;
  if (text.find("No such file") != std::string::npos) {
    return fmt::format(
        "no CUDA driver ({} is not here): install NVIDIA's driver, or give it to the container",
        library);
  }
  return fmt::format("no CUDA driver ({} does not load): {}", library, text);
}

class Loader {
 public:
  explicit Loader(GetProcAddress get) : get_(get) {}

  // For the legacy default stream, however this file was compiled.
  template <typename Function>
  bool find(const char* name, Function& function, int version = kOldestVersion) const {
    void* found = nullptr;
    CUdriverProcAddressQueryResult status{};
    const CUresult result = get_(name, &found, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &status);
    function = result == CUDA_SUCCESS ? reinterpret_cast<Function>(found) : nullptr;
    return function != nullptr;
  }

 private:
  const GetProcAddress get_;
};

}  // namespace

Driver::Driver(std::unique_ptr<Api> api) : api_(std::move(api)) {}
Driver::~Driver() = default;

Result<std::shared_ptr<const Driver>> Driver::load(const char* library) {
  void* const handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) return fail(ErrorCode::kNotFound, "{}", reason_of(library, ::dlerror()));
  const auto get = reinterpret_cast<GetProcAddress>(::dlsym(handle, "cuGetProcAddress_v2"));
  if (get == nullptr) {
    return fail(ErrorCode::kNotFound,
                "{} is no CUDA driver of version 12.0 or newer (it lacks cuGetProcAddress_v2): "
                "update NVIDIA's driver",
                library);
  }
  auto api = std::make_unique<Api>();
  const Loader loader(get);
  const char* missing = nullptr;
#define REKINDLE_CUDA_FIND(member, function) \
  if (!loader.find(#function, api->member)) missing = #function;
  REKINDLE_CUDA_CALLS(REKINDLE_CUDA_FIND)
#undef REKINDLE_CUDA_FIND
  if (missing != nullptr) {
    return fail(ErrorCode::kNotFound, "the CUDA driver {} lacks {}: update NVIDIA's driver",
                library, missing);
  }
  loader.find("cuDeviceGetUuid", api->whole_device_uuid, kWholeUuidVersion);
  loader.find("cuMemcpyBatchAsync", api->copy_batch, kBatchVersion);
  loader.find("cuMemGetHandleForAddressRange", api->export_range);
  loader.find("cuFlushGPUDirectRDMAWrites", api->flush_nic_writes);

  if (const CUresult result = api->init(0); result != CUDA_SUCCESS) {
    return fail(error_of(*api, result, "start the CUDA driver (cuInit)"));
  }
  std::shared_ptr<Driver> driver(new Driver(std::move(api)));
  if (const CUresult result = driver->api_->driver_version(&driver->version_);
      result != CUDA_SUCCESS) {
    return fail(error_of(*driver->api_, result, "ask for the CUDA driver's version"));
  }
  return driver;
}

bool is_fatal(CUresult result) {
  switch (result) {
    case CUDA_ERROR_DEINITIALIZED:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_EXTERNAL_DEVICE:
    case CUDA_ERROR_UNKNOWN:
      return true;
    default:
      return false;
  }
}

namespace {

ErrorCode code_of(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return ErrorCode::kExhausted;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_STUB_LIBRARY:
      return ErrorCode::kNotFound;
    case CUDA_ERROR_NOT_PERMITTED:
    case CUDA_ERROR_DEVICE_NOT_LICENSED:
      return ErrorCode::kDenied;
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
    case CUDA_ERROR_SYSTEM_NOT_READY:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
    case CUDA_ERROR_MPS_CONNECTION_FAILED:
    case CUDA_ERROR_MPS_SERVER_NOT_READY:
    case CUDA_ERROR_MPS_MAX_CLIENTS_REACHED:
    case CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED:
      return ErrorCode::kUnavailable;
    default:
      return ErrorCode::kInternal;
  }
}

std::string_view hint_of(CUresult result) {
  switch (result) {
    case CUDA_ERROR_NOT_INITIALIZED:
      return "; did this process fork after it had used CUDA?";
    case CUDA_ERROR_NO_DEVICE:
      return "; is the container given GPUs, does CUDA_VISIBLE_DEVICES name them?";
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
      return "; is the GPU in an exclusive compute mode and in use?";
    case CUDA_ERROR_SYSTEM_NOT_READY:
      return "; does nvidia-fabricmanager run?";
    default:
      return "";
  }
}

}  // namespace

Error error_of(const Api& api, CUresult result, std::string_view what) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (api.error_name(result, &name) != CUDA_SUCCESS || name == nullptr) name = "CUDA error";
  if (api.error_text(result, &text) != CUDA_SUCCESS || text == nullptr) text = "no text";
  return {code_of(result), fmt::format("{}: {} ({}): {}{}", what, name, static_cast<int>(result),
                                       text, hint_of(result))};
}

Error unavailable_of(const Api& api, CUresult result, std::string_view what) {
  Error error = error_of(api, result, what);
  if (is_fatal(result) || error.code() == ErrorCode::kExhausted) return error;
  return {ErrorCode::kUnavailable, error.message()};
}

}  // namespace rekindle::cuda
