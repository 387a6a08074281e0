#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "recovery/coordinator/core/membership.h"
#include "recovery/coordinator/core/types.h"

namespace rekindle::coordinator {

enum class RankState { kAttached, kLoaded, kFailed, kGone };

// What an agent says of one rank that is attached to it; again twice a second and when it changes.
struct RankReport {
  std::string node_id;
  Incarnation incarnation;
  std::string instance;
  std::uint64_t generation = 0;
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
  std::string model;
  std::optional<std::uint64_t> version;  // wanted; nullopt: the newest READY one
  std::optional<ModelVersion> has;       // what it was resolved to before, when it was
  RankState state = RankState::kAttached;
  std::uint64_t sequence = 0;  // of this agent's reports; what is older than the last is not taken
  std::string why;             // of kFailed and kGone
};

enum class InstanceState { kLoading, kCommitted, kUnfit };
struct InstanceAnswer {
  ModelVersion id;  // the same for all ranks of the generation
  InstanceState state = InstanceState::kLoading;
  std::uint32_t loaded = 0;
  std::uint32_t world = 0;
  std::string why;  // of kUnfit: "rank 3 on b: the node died"
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
  std::string home;  // the only node that has reported ranks of it; "": it spans nodes
  std::map<std::uint32_t, Rank> ranks;
  InstanceState state = InstanceState::kLoading;
  std::optional<std::uint32_t> unfit_rank;
  TimePoint last_heard;
};

// Two phases over hosts: every rank has loaded the same version (their agents' word), then commit.
// A rank that fails, leaves, or whose node dies makes its instance unfit until it has attached and
// loaded again. Soft: after a restart the agents' reports bring it all back.
class Instances {
 public:
  using Resolve = std::function<Result<ModelVersion>()>;

  Instances(const Timing& timing, const Limits& limits) : timing_(timing), limits_(limits) {}

  // `resolve` is asked once in a generation. kStale: there is a newer generation. kDenied: the rank
  // is somebody else's who lives, or wants what the instance does not serve.
  Result<InstanceAnswer> report(const RankReport& report, const Resolve& resolve,
                                Membership& members, bool grace, TimePoint now);
  // Ranks are lost with their node, or when their agent says nothing of them any more.
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
  // Counts it for its node, or among those that span nodes. kExhausted: there are too many.
  Result<void> enter(const std::string& home);
  void leave(const std::string& home);

  const Timing timing_;
  const Limits limits_;
  std::map<std::string, Instance> instances_;  // by name
  std::map<std::string, std::size_t> counts_;  // by home; "": those that span nodes
  TimePoint next_look_{};
};

}  // namespace rekindle::coordinator
