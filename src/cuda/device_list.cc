#include <algorithm>
#include <array>
#include <cstring>

#include "src/cuda/api.h"
#include "src/cuda/device.h"

namespace rekindle::cuda {

namespace {

std::string id_of(const CUuuid& uuid, bool slice) {
  std::string id = slice ? "MIG" : "GPU";
  for (std::size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) id += '-';
    id += fmt::format("{:02x}", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return id;
}

// The driver API does not mark a slice. A slice has a UUID of its own beside its GPU's, and "MIG"
// in its name.
bool is_slice(const Api& api, CUdevice device, const CUuuid& uuid, const std::string& name) {
  CUuuid whole{};
  if (api.whole_device_uuid != nullptr && api.whole_device_uuid(&whole, device) == CUDA_SUCCESS &&
      std::memcmp(whole.bytes, uuid.bytes, sizeof(uuid.bytes)) != 0) {
    return true;
  }
  return name.find(" MIG ") != std::string::npos;
}

CUresult summarize(const Api& api, int ordinal, DeviceSummary& out) {
  CUdevice device = 0;
  CUuuid uuid{};
  std::array<char, 256> name{};
  std::size_t total_bytes = 0;
  int events = 0;
  const auto calls = {
      api.device_get(&device, ordinal),
      api.device_name(name.data(), static_cast<int>(name.size() - 1), device),
      api.device_uuid(&uuid, device), api.device_total_memory(&total_bytes, device),
      api.device_attribute(&events, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, device)};
  const auto failed =
      std::find_if(calls.begin(), calls.end(), [](CUresult one) { return one != CUDA_SUCCESS; });
  if (failed != calls.end()) return *failed;
  out.ordinal = ordinal;
  out.name = name.data();
  out.total_bytes = total_bytes;
  const bool slice = is_slice(api, device, uuid, out.name);
  out.id = id_of(uuid, slice);
  if (slice) {
    out.not_shareable = "it is a MIG slice";
  } else if (events == 0) {
    out.not_shareable = "its driver has no events between processes";
  }
  return CUDA_SUCCESS;
}

}  // namespace

Result<std::vector<DeviceSummary>> list_devices(const Driver& driver) {
  const Api& api = driver.api();
  int count = 0;
  if (const CUresult result = api.device_count(&count); result != CUDA_SUCCESS) {
    return fail(error_of(api, result, "count the GPUs"));
  }
  std::vector<DeviceSummary> devices(static_cast<std::size_t>(count));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    const CUresult result = summarize(api, ordinal, devices[static_cast<std::size_t>(ordinal)]);
    if (result != CUDA_SUCCESS) {
      return fail(error_of(api, result, fmt::format("ask what GPU {} is", ordinal)));
    }
  }
  return devices;
}

Result<std::unique_ptr<bucket::Device>> open_device_by_id(std::shared_ptr<const Driver> driver,
                                                          std::string_view id) {
  TRY(const auto devices, list_devices(*driver));
  const auto found = std::find_if(devices.begin(), devices.end(),
                                  [&](const DeviceSummary& device) { return device.id == id; });
  if (found == devices.end()) {
    return fail(ErrorCode::kNotFound,
                "this process sees no GPU {} among {}: is it visible (CUDA_VISIBLE_DEVICES), is it "
                "of this host?",
                id, devices.size());
  }
  return open_device(std::move(driver), found->ordinal);
}

Result<int> current_device_ordinal(const Driver& driver) {
  const Api& api = driver.api();
  CUdevice current = 0;
  int count = 0;
  CUresult result = api.context_device(&current);
  if (result == CUDA_ERROR_INVALID_CONTEXT) return 0;
  if (result == CUDA_SUCCESS) result = api.device_count(&count);
  for (int ordinal = 0; result == CUDA_SUCCESS && ordinal < count; ++ordinal) {
    CUdevice device = 0;
    result = api.device_get(&device, ordinal);
    if (result == CUDA_SUCCESS && device == current) return ordinal;
  }
  if (result == CUDA_SUCCESS) result = CUDA_ERROR_INVALID_DEVICE;
  return fail(error_of(api, result, "ask for the thread's GPU"));
}

}  // namespace rekindle::cuda
