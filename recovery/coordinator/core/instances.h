#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "recovery/coordinator/core/membership.h"
#include "recovery/coordinator/core/types.h"

namespace rekindle::coordinator {

enum class RankState { kAttached, kLoaded, kFailed, kGone };

// An agent's report on one rank that is attached to it: twice a second, and when it changes.
struct RankReport {
  std::string node_id;
  Incarnation incarnation;
  std::string instance;
  std::uint64_t generation = 0;
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
  std::string model;
  // The wanted one; nullopt: the newest READY version.
  std::optional<std::uint64_t> version;
  // The version that an earlier answer resolved it to.
  std::optional<ModelVersion> has;
  RankState state = RankState::kAttached;
  // Of this agent's reports. A report that is older than the last one is ignored.
  std::uint64_t sequence = 0;
  // The reason of kFailed and kGone.
  std::string why;
};

enum class InstanceState { kLoading, kCommitted, kUnfit };
// As in the answer for `rekindle status`.
std::string_view state_name(InstanceState state);
struct InstanceAnswer {
  // The same for all ranks of the generation.
  ModelVersion id;
  InstanceState state = InstanceState::kLoading;
  std::uint32_t loaded = 0;
  std::uint32_t world = 0;
  // The reason of kUnfit: "rank 3 on b: the node died".
  std::string why;
};

// One generation of an instance whose ranks live on several hosts.
struct Instance {
  struct Rank {
    std::string node_id;
    Incarnation incarnation;
    RankState state = RankState::kAttached;
    std::uint64_t sequence = 0;
    TimePoint last_heard;
    std::string why;
  };
  std::uint64_t generation = 0;
  ModelVersion id;
  std::uint32_t world = 1;
  // The only node that has reported ranks of it; "": it spans nodes.
  std::string home;
  std::map<std::uint32_t, Rank> ranks;
  InstanceState state = InstanceState::kLoading;
  std::optional<std::uint32_t> unfit_rank;
  TimePoint last_heard;
};

// Instances with ranks on several hosts. They commit in two phases: an instance is committed once
// the agents of all its ranks report that they have loaded the same version. A rank that fails,
// leaves, or loses its node makes its instance unfit until it has attached and loaded again.
// Nothing is durable: after a restart the reports of the agents bring it all back.
class Instances {
 public:
  using Resolve = std::function<Result<ModelVersion>()>;

  Instances(const Timing& timing, const Limits& limits) : timing_(timing), limits_(limits) {}

  // Calls `resolve` once in a generation. kStale: there is a newer generation. kDenied: a live node
  // has the rank, or the rank wants another version than the instance serves.
  Result<InstanceAnswer> report(const RankReport& report, const Resolve& resolve,
                                Membership& members, bool grace, TimePoint now);
  // Ranks are lost with their node, or when their agent stops reporting them.
  void advance(Membership& members, TimePoint now);
  void shift(Duration by);

  static InstanceAnswer answer(const Instance& instance);
  const std::map<std::string, Instance>& all() const { return instances_; }

 private:
  Result<Instance*> find_or_begin(const RankReport& report, const Resolve& resolve, bool grace,
                                  TimePoint now);
  Result<void> check(const RankReport& report) const;
  static Result<void> check_same(const Instance& instance, const RankReport& report);
  static void judge(Instance& instance);
  // Counts an instance for its node, or among those that span nodes. kExhausted: too many.
  Result<void> enter(const std::string& home);
  void leave(const std::string& home);

  const Timing timing_;
  const Limits limits_;
  // By name.
  std::map<std::string, Instance> instances_;
  // By home; "": the instances that span nodes.
  std::map<std::string, std::size_t> counts_;
  TimePoint next_look_{};
};

}  // namespace rekindle::coordinator
