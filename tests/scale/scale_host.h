#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/scale/scale_puller.h"

namespace rekindle::scale {

inline constexpr std::uint32_t kRanksPerHost = 8;

// The instance that the eight workers of a host are part of.
struct Assignment {
  ModelVersion serve;
  std::string instance;
  std::uint64_t generation = 1;
  // The number of hosts of the instance, and the place of this one among them.
  std::uint32_t hosts = 1;
  std::uint32_t position = 0;
};

// One host: the calls of its agent to the coordinator, its copies, and the workers that take their
// weights from it.
class Host {
 public:
  Host(PullSite& site, HostId id, std::string rack, std::uint64_t capacity);

  // Its agent starts with the copies of the host, and its workers attach. Without an assignment it
  // only holds copies.
  void start(std::optional<Assignment> work);
  void lose_power();
  // A whole copy, as if it had been pulled long ago; before start().
  void put(const ModelVersion& id);

  void before_step();
  void step(Duration length);

  bool up() const { return up_; }
  const coordinator::NodeInfo& info() const { return info_; }
  const std::string& rack() const { return rack_; }
  const SharedCopy* copy(const ModelVersion& id) const;
  bool holds(const ModelVersion& id) const;
  // The time from start() until its ranks were told to commit: the whole instance had loaded.
  std::optional<Duration> ready_after() const { return ready_after_; }
  const Puller* puller() const { return puller_.get(); }
  const std::string& failure() const { return failure_; }

 private:
  void enroll();
  void enrolled();
  void announce(const ModelVersion& id);
  void beat();
  void grow();
  void pull(const ModelVersion& id);
  void finish_pull();
  void report_ranks();
  void repeat_ranks();
  coordinator::Holding holding(const ModelVersion& id) const;
  std::uint64_t free_bytes() const;
  std::function<void()> mine(std::function<void()> run) const;

  PullSite& site_;
  const HostId id_;
  const std::string rack_;
  const std::uint64_t capacity_;
  std::map<ModelVersion, std::unique_ptr<SharedCopy>> copies_;
  std::uint64_t lives_ = 0;

  // Of this life:
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(false);
  bool up_ = false;
  coordinator::NodeInfo info_;
  std::uint64_t epoch_ = 0;
  TimePoint started_{};
  std::optional<Assignment> work_;
  std::unique_ptr<Puller> puller_;
  ModelVersion pulling_;
  swarm::AnnouncePolicy growth_;
  TimePoint next_growth_{};
  bool loaded_ = false;
  std::uint64_t rank_sequence_ = 0;
  std::optional<Duration> ready_after_;
  std::string failure_;
};

}  // namespace rekindle::scale
