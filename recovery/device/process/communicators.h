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
#include "src/bucket/collective.h"

namespace rekindle::device {

// The communicators of this process' devices, one kept for each between rounds until it was in none
// for long: NCCL's take hundreds of megabytes of their device. Thread-safe; the devices live
// longer.
class Communicators {
 public:
  using Load = std::function<Result<std::unique_ptr<bucket::Collectives>>()>;
  // Longer than a session that has said what its device keeps waits for the order to use it.
  static constexpr std::chrono::minutes kIdle{15};

  // `load` is called at the first use, again while it fails.
  explicit Communicators(Load load) : load_(std::move(load)) {}
  // Of doubles, or of GPUs by NCCL.
  static Load loader(bool doubles);

  Result<std::string> make_id();
  // For a session of a round: they stay for its order.
  std::vector<std::string> kept(const std::string& device);
  // The one that is kept, or, with an id, a new one that begins to meet the others; what the device
  // kept is aborted then. kStale: there is none of that name, rank and size.
  Result<std::unique_ptr<bucket::Collective>> take(bucket::Device& device,
                                                   const SpreadOrder& order);
  // After a round that went well.
  void keep(const std::string& device, std::string name,
            std::unique_ptr<bucket::Collective> collective);
  // When there may be some to drop; nullopt: none is kept.
  std::optional<TimePoint> idle_at() const;
  // Ends those that are idle; NCCL may take long over it.
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
  std::unique_ptr<bucket::Collectives> collectives_;  // under loading_; set once
  mutable std::mutex mutex_;
  std::map<std::string, Kept> kept_;  // by device, under mutex_
};

}  // namespace rekindle::device
