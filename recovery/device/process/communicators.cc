#include "recovery/device/process/communicators.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "src/base/log.h"
#include "src/bucket/double_collective.h"
#if REKINDLE_WITH_CUDA
#include "src/cuda/nccl_collective.h"
#endif

namespace rekindle::device {

Communicators::Load Communicators::loader(bool doubles) {
  using Loaded = Result<std::unique_ptr<bucket::Collectives>>;
  if (doubles) return []() -> Loaded { return bucket::make_double_collectives(); };
#if REKINDLE_WITH_CUDA
  return []() -> Loaded { return cuda::make_nccl_collectives(); };
#else
  return []() -> Loaded { return fail(ErrorCode::kUnavailable, "this build has no CUDA support"); };
#endif
}

Result<bucket::Collectives*> Communicators::loaded() {
  const std::lock_guard lock(loading_);
  if (collectives_ == nullptr) {
    TRY(collectives_, load_());
  }
  return collectives_.get();
}

Result<std::string> Communicators::make_id() {
  TRY(auto* const collectives, loaded());
  return collectives->make_id();
}

std::vector<std::string> Communicators::kept(const std::string& device) {
  const std::lock_guard lock(mutex_);
  const auto found = kept_.find(device);
  if (found == kept_.end()) return {};
  found->second.used = SteadyClock().now();
  return {found->second.name};
}

Result<std::unique_ptr<bucket::Collective>> Communicators::take(bucket::Device& device,
                                                                const SpreadOrder& order) {
  // It is destroyed without the lock, because an abort may take long.
  std::optional<Kept> had;
  {
    const std::lock_guard lock(mutex_);
    if (auto node = kept_.extract(device.id()); !node.empty()) had = std::move(node.mapped());
  }
  if (order.id.empty()) {
    if (!had || had->name != order.communicator || had->collective->rank() != order.rank ||
        had->collective->ranks() != order.ranks) {
      return fail(ErrorCode::kStale, "{} keeps no communicator '{}' with rank {} of {}",
                  device.id(), order.communicator, order.rank, order.ranks);
    }
    return std::move(had->collective);
  }
  had.reset();
  TRY(auto* const collectives, loaded());
  return collectives->meet(device, order.rank, order.ranks, order.id);
}

void Communicators::keep(const std::string& device, std::string name,
                         std::unique_ptr<bucket::Collective> collective) {
  Kept kept{std::move(name), std::move(collective), SteadyClock().now()};
  const std::lock_guard lock(mutex_);
  // The old one is destroyed after the lock is released.
  std::swap(kept_[device], kept);
}

std::optional<TimePoint> Communicators::idle_at() const {
  std::optional<TimePoint> first;
  const std::lock_guard lock(mutex_);
  for (const auto& [device, kept] : kept_) {
    const TimePoint idle = kept.used + kIdle;
    first = std::min(first.value_or(idle), idle);
  }
  return first;
}

void Communicators::drop_idle(TimePoint now) {
  // They are destroyed after the lock is released.
  std::vector<Kept> dropped;
  const std::lock_guard lock(mutex_);
  for (auto it = kept_.begin(); it != kept_.end();) {
    if (now - it->second.used < kIdle) {
      ++it;
      continue;
    }
    log::info("device.communicator_dropped", "device", it->first, "communicator", it->second.name);
    dropped.push_back(std::move(it->second));
    it = kept_.erase(it);
  }
}

}  // namespace rekindle::device
