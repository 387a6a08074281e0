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

#include "recovery/planner/plan.h"
#include "recovery/swarm/availability.h"
#include "recovery/swarm/have_feed.h"
#include "recovery/swarm/held_tiles.h"
#include "src/tensor/checkpoint.h"
#include "transport/scheduler.h"

// Hosts that pull the same thing from one source and from each other, in virtual time: the real
// plan, order, scheduler, bitmaps, feeds and announcements; the network shares each link's two
// directions fairly among the flows over it.
namespace rekindle::swarm::testing {

using transport::OpStatus;
using transport::PathId;

struct WorldOptions {
  int joiners = 7;
  double link_bytes_per_second = 100e6;  // each direction of each host
  int tensors = 64;                      // of 16 MiB
  std::uint64_t seed = 1;
  int source_serves = 100;  // so many joiners; the others know each other only
  std::set<int> die{};      // joiners that are killed …
  Duration dies_at{0};      // … then
  Duration source_dies_at = Duration::max();
  std::map<int, double> upload{};  // hosts that send at this part of the link's speed only
  std::set<int> silent{};          // joiners that nobody is told of: they only take
  std::set<int> freeze{};          // joiners that stop, with their connections open, …
  Duration freezes_at{0};          // … then
};

class World {
 public:
  explicit World(const WorldOptions& options);
  ~World();

  // Until every joiner that lives and is not frozen has all or has failed, or time is up.
  void run(Duration at_most);

  bool all_done() const;
  std::string states() const;
  Duration last_done() const;  // when the last of those had everything
  std::uint64_t sent_by_source() const { return sent_[0]; }
  std::uint64_t sent_by(int host) const { return sent_[static_cast<std::size_t>(host)]; }
  std::uint64_t checkpoint_bytes() const { return bytes_; }
  int double_fetches() const { return double_fetches_; }
  // A slice was read from somebody who did not hold it.
  int unverified_reads() const { return unverified_reads_; }
  TileIndex held_by_anyone() const;  // of those that live
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
  std::shared_ptr<const Checkpoint> checkpoint_;
  std::unique_ptr<Layout> layout_;
  std::uint64_t bytes_ = 0;
  std::vector<std::unique_ptr<Joiner>> joiners_;  // host number is the index + 1
  std::vector<std::uint64_t> sent_;               // by host
  std::vector<std::uint64_t> salts_;              // by host
  std::set<int> announced_;                       // hosts that the coordinator offers
  std::set<int> dead_;
  std::set<int> frozen_;
  Duration elapsed_{0};
  int double_fetches_ = 0;
  int unverified_reads_ = 0;
};

}  // namespace rekindle::swarm::testing
