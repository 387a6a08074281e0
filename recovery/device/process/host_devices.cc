#include "recovery/device/process/host_devices.h"

#include <algorithm>
#include <utility>

#include "src/base/failpoint.h"
#include "src/bucket/double_device.h"
#if REKINDLE_WITH_CUDA
#include "src/cuda/device.h"
#include "src/cuda/driver.h"
#endif

namespace rekindle::device {

namespace {

using Opener = Devices::Opener;

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

Devices::Devices(std::vector<One> all, Opener opener)
    : all_(std::move(all)), opener_(std::move(opener)) {
  for (const One& one : all_) places_[one.id] = std::make_unique<Place>();
}

Devices Devices::find(const Doubles& doubles) {
  std::vector<One> all;
  for (std::uint32_t i = 0; i < doubles.count; ++i) {
    const std::string id = fmt::format("double:{}", i);
    all.push_back({id, id, doubles.bytes});
  }
  if (doubles.count > 0) {
    return {std::move(all), [](const One& one) -> Result<std::unique_ptr<bucket::Device>> {
              return bucket::make_double_device(one.id, one.total_bytes);
            }};
  }
  auto opener = find_cuda(all);
  if (opener) return {std::move(all), std::move(*opener)};
  Devices none;
  none.problem_ = opener.error().message();
  return none;
}

bool Devices::contains(const std::string& id) const {
  return std::ranges::find(all_, id, &One::id) != all_.end();
}

Result<bucket::Device*> Devices::open(const std::string& id) const {
  const auto found = std::ranges::find(all_, id, &One::id);
  if (found == all_.end()) return fail(ErrorCode::kNotFound, "there is no device {}", id);
  Place& place = *places_.at(id);
  const std::lock_guard lock(place.opening);
  if (place.device == nullptr) {
    TRY_VOID(failpoint("device.open"));
    TRY(place.device, opener_(*found));
  }
  return place.device.get();
}

// Does not wait for a device that another thread opens.
std::vector<bucket::Device*> Devices::opened() const {
  std::vector<bucket::Device*> open;
  for (const One& one : all_) {
    Place& place = *places_.at(one.id);
    const std::unique_lock lock(place.opening, std::try_to_lock);
    if (lock && place.device != nullptr) open.push_back(place.device.get());
  }
  return open;
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
