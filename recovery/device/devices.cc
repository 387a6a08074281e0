#include "recovery/device/devices.h"

#include <algorithm>

#include "src/bucket/double_device.h"
#if REKINDLE_WITH_CUDA
#include "src/cuda/device.h"
#include "src/cuda/driver.h"
#endif

namespace rekindle::device {

namespace {

using Opener = std::function<Result<std::unique_ptr<bucket::Device>>(const Devices::One&)>;

#if REKINDLE_WITH_CUDA
Result<Opener> find_cuda(std::vector<Devices::One>& all) {
  TRY(const auto driver, cuda::Driver::load());
  TRY(const auto listed, cuda::list_devices(*driver));
  if (listed.empty()) return fail(ErrorCode::kNotFound, "the CUDA driver shows no GPU");
  for (const auto& info : listed) all.push_back({info.id, info.name, info.total_bytes});
  return [driver](const Devices::One& one) { return cuda::open_device_by_id(driver, one.id); };
}
#else
Result<Opener> find_cuda(std::vector<Devices::One>&) {
  return fail(ErrorCode::kUnavailable, "this build has no CUDA support");
}
#endif

}  // namespace

bool built_with_cuda() {
#if REKINDLE_WITH_CUDA
  return true;
#else
  return false;
#endif
}

Devices Devices::find(const Doubles& doubles) {
  Devices devices;
  for (std::uint32_t i = 0; i < doubles.count; ++i) {
    const std::string id = fmt::format("double:{}", i);
    devices.all_.push_back({id, id, doubles.bytes});
  }
  if (doubles.count > 0) {
    devices.opener_ = [](const One& one) -> Result<std::unique_ptr<bucket::Device>> {
      return bucket::make_double_device(one.id, one.total_bytes);
    };
    return devices;
  }
  auto opener = find_cuda(devices.all_);
  if (opener) {
    devices.opener_ = std::move(*opener);
  } else {
    devices.problem_ = opener.error().message();
  }
  return devices;
}

Result<bucket::Device*> Devices::open(const std::string& id) {
  for (const auto& device : open_) {
    if (device->id() == id) return device.get();
  }
  const auto found = std::ranges::find(all_, id, &One::id);
  if (found == all_.end()) return fail(ErrorCode::kNotFound, "there is no device {}", id);
  TRY(auto device, opener_(*found));
  open_.push_back(std::move(device));
  return open_.back().get();
}

bucket::Device* Devices::open_first() {
  while (!all_.empty()) {
    auto device = open(all_.front().id);
    if (device) return *device;
    problem_ = std::move(device).error().with_context(all_.front().id).message();
    all_.erase(all_.begin());
  }
  return nullptr;
}

}  // namespace rekindle::device
