#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "recovery/planner/slice_plan.h"
#include "recovery/swarm/availability.h"
#include "recovery/swarm/have_feed.h"
#include "src/tensor/checkpoint.h"
#include "tests/support/fluid_network.h"
#include "transport/schedule/scheduler.h"

// Hosts that pull the same version from one source and from each other, in virtual time. The plan,
// order, scheduler, bitmaps, feeds and announcements are real; the network is a FluidNetwork.
namespace rekindle::swarm::testing {

using transport::OpStatus;
using transport::PathId;

struct WorldOptions {
  int joiners = 7;
  // Each direction of each host.
  double link_bytes_per_second = 100e6;
  // Of 16 MiB each.
  int tensors = 64;
  std::uint64_t seed = 1;
  // The number of joiners that the source serves. The others know each other only.
  int source_serves = 100;
  // Joiners that are killed, and when.
  std::set<int> die{};
  Duration dies_at{0};
  Duration source_dies_at = Duration::max();
  // Hosts that send at this part of the link's speed only.
  std::map<int, double> upload{};
  // Joiners that are never announced: they only take.
  std::set<int> silent{};
  // Joiners that stop with their connections open, and when.
  std::set<int> freeze{};
  Duration freezes_at{0};
};

class World {
 public:
  explicit World(const WorldOptions& options);
  ~World();

  // Runs until every live joiner that is not frozen has everything or has failed, or time is up.
  void run(Duration at_most);

  bool all_done() const;
  std::string states() const;
  // The time at which the last of them had everything.
  Duration last_done() const;
  std::uint64_t sent_by_source() const { return sent_[0]; }
  std::uint64_t sent_by(int host) const { return sent_[static_cast<std::size_t>(host)]; }
  std::uint64_t checkpoint_bytes() const { return bytes_; }
  int double_fetches() const { return double_fetches_; }
  // Slices that were read from a host that did not hold them.
  int unverified_reads() const { return unverified_reads_; }
  // Tiles that some live joiner holds.
  TileIndex held_by_anyone() const;
  TileIndex held_by_everyone() const;

 private:
  struct Flow;
  struct Joiner;

  TimePoint now() const { return TimePoint{} + std::chrono::seconds(1) + elapsed_; }
  void start(Joiner& joiner);
  void discover(Joiner& joiner);
  void connect(Joiner& joiner, int host);
  void hear(Joiner& joiner);
  void post(Joiner& joiner);
  void share_links();
  void advance(Joiner& joiner);
  void land(Joiner& joiner, Flow& flow);
  bool alive(int host) const { return !dead_.contains(host); }
  bool runs(int host) const { return alive(host) && !frozen_.contains(host); }
  bool holds(int host, const planner::Plan& plan, transport::SliceIndex slice) const;

  const WorldOptions options_;
  std::mt19937_64 random_;
  rekindle::testing::FluidNetwork network_;
  std::shared_ptr<const Checkpoint> checkpoint_;
  std::unique_ptr<Layout> layout_;
  std::uint64_t bytes_ = 0;
  std::vector<std::unique_ptr<Joiner>> joiners_;  // host number is the index + 1
  std::vector<std::uint64_t> sent_;               // by host
  std::vector<std::uint64_t> seeds_;              // by host
  std::set<int> announced_;                       // hosts that the coordinator offers
  std::set<int> dead_;
  std::set<int> frozen_;
  Duration elapsed_{0};
  int double_fetches_ = 0;
  int unverified_reads_ = 0;
};

}  // namespace rekindle::swarm::testing
