#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "recovery/device/device_order.h"
#include "src/base/clock.h"
#include "src/bucket/device.h"

namespace rekindle::device {

// The communicators of this process' devices. Each device keeps one between rounds, until it was in
// no round for long: a communicator of NCCL takes hundreds of megabytes of its device. Thread-safe;
// the devices live longer.
class Communicators {
 public:
  using Load = std::function<Result<std::unique_ptr<bucket::Collectives>>()>;
  // Longer than a session waits for an order, after it has reported the communicators of its
  // device.
  static constexpr std::chrono::minutes kIdle{15};

  // `load` is called at the first use, and again as long as it fails.
  explicit Communicators(Load load) : load_(std::move(load)) {}
  // Loads the collectives of doubles, or NCCL.
  static Load loader(bool doubles);

  Result<std::string> make_id();
  // Names of the communicators that the device keeps. They stay for the order of a session.
  std::vector<std::string> kept(const std::string& device);
  // Without an id: the communicator that is kept. kStale: there is none of that name, rank and
  // size. With an id: a new one, which begins to meet the other ranks. The one that was kept is
  // aborted.
  Result<std::unique_ptr<bucket::Collective>> take(bucket::Device& device,
                                                   const SpreadOrder& order);
  // After a round without errors.
  void keep(const std::string& device, std::string name,
            std::unique_ptr<bucket::Collective> collective);
  // When the first of them becomes idle; nullopt: none is kept.
  std::optional<TimePoint> idle_at() const;
  // Ends the idle ones, which may take NCCL long.
  void drop_idle(TimePoint now);

 private:
  struct Kept {
    std::string name;
    std::unique_ptr<bucket::Collective> collective;
    TimePoint used{};
  };
  Result<bucket::Collectives*> loaded();

  const Load load_;
  std::mutex loading_;
  // Guarded by loading_; set once.
  std::unique_ptr<bucket::Collectives> collectives_;
  mutable std::mutex mutex_;
  // By device. Guarded by mutex_.
  std::map<std::string, Kept> kept_;
};

// Wraps collectives so that an abort, also one by a destructor, takes at most `patience`: it runs
// on a thread of its own. An abort that takes longer is left to that thread, and `stuck` is called
// before abort() returns, on the caller's thread. A slow abort alone is no fault: NCCL waits until
// the other processes of this host have aborted, too, because its proxies share sockets. Ask the
// stream whether the queued work has ended.
using OnStuck = std::function<void(Error why)>;
std::unique_ptr<bucket::Collectives> bound_aborts(std::unique_ptr<bucket::Collectives> collectives,
                                                  std::chrono::milliseconds patience,
                                                  OnStuck stuck);

}  // namespace rekindle::device
