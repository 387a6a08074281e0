#include "recovery/device/process/bounded_collectives.h"

#include <future>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "src/base/worker_pool.h"

namespace rekindle::device {

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
