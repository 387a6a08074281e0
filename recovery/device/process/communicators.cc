#include "recovery/device/process/communicators.h"

#include <algorithm>
#include <future>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "src/base/log.h"
#include "src/base/worker_pool.h"
#include "src/bucket/double_device.h"
#if REKINDLE_WITH_CUDA
#include "src/cuda/nccl.h"
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

namespace {

using bucket::Collective;
using bucket::Collectives;
using bucket::Device;
using bucket::DeviceAddress;
using bucket::Stream;

struct Bound {
  // Outlives the collectives that it has made, also on the thread of an abort.
  std::shared_ptr<Collectives> makes;
  std::chrono::milliseconds patience;
  OnStuck stuck;
};

class BoundedCollective final : public Collective {
 public:
  BoundedCollective(Bound bound, std::string device, std::unique_ptr<Collective> inner)
      : bound_(std::move(bound)),
        device_(std::move(device)),
        rank_(inner->rank()),
        ranks_(inner->ranks()),
        inner_(std::move(inner)) {}
  ~BoundedCollective() override { end(); }

  std::uint32_t rank() const override { return rank_; }
  std::uint32_t ranks() const override { return ranks_; }
  Result<void> spread(DeviceAddress at, std::uint64_t share_bytes,
                      std::span<const std::uint32_t> owners, Stream& stream) override {
    if (inner_ == nullptr) return aborted();
    return inner_->spread(at, share_bytes, owners, stream);
  }
  Result<bool> settled() override {
    if (inner_ == nullptr) return aborted();
    return inner_->settled();
  }
  void abort() override { end(); }

 private:
  Failure aborted() const {
    return fail(ErrorCode::kStale, "rank {} of {} was aborted: meet again", rank_, ranks_);
  }
  void end() {
    if (inner_ == nullptr) return;
    std::promise<void> promise;
    const std::future<void> done = promise.get_future();
    try {
      std::thread([inner = std::move(inner_), makes = bound_.makes,
                   promise = std::move(promise)]() mutable {
        set_thread_name("rk-abort");
        inner->abort();
        inner.reset();
        makes.reset();
        promise.set_value();
      }).detach();
    } catch (const std::system_error&) {
      // No thread could be started. The destructor of the collective has aborted it.
      return;
    }
    if (done.wait_for(bound_.patience) == std::future_status::ready) return;
    bound_.stuck(Error(ErrorCode::kTimeout,
                       fmt::format("{}: rank {} of {} does not end {} ms after its abort", device_,
                                   rank_, ranks_, bound_.patience.count())));
  }

  const Bound bound_;
  const std::string device_;
  const std::uint32_t rank_;
  const std::uint32_t ranks_;
  // Null: aborted.
  std::unique_ptr<Collective> inner_;
};

class BoundedCollectives final : public Collectives {
 public:
  explicit BoundedCollectives(Bound bound) : bound_(std::move(bound)) {}

  Result<std::string> make_id() override { return bound_.makes->make_id(); }
  Result<std::unique_ptr<Collective>> meet(Device& device, std::uint32_t rank, std::uint32_t ranks,
                                           std::string_view id) override {
    TRY(auto inner, bound_.makes->meet(device, rank, ranks, id));
    return std::make_unique<BoundedCollective>(bound_, device.id(), std::move(inner));
  }

 private:
  const Bound bound_;
};

}  // namespace

std::unique_ptr<Collectives> bound_aborts(std::unique_ptr<Collectives> collectives,
                                          std::chrono::milliseconds patience, OnStuck stuck) {
  return std::make_unique<BoundedCollectives>(
      Bound{std::move(collectives), patience, std::move(stuck)});
}

}  // namespace rekindle::device
