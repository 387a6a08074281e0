#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recovery/swarm/have_feed.h"
#include "recovery/swarm/held_tiles.h"
#include "tests/scale/control.h"
#include "tests/scale/nics.h"
#include "transport/scheduler.h"

namespace rekindle::scale {

using transport::PathId;
using transport::SliceIndex;
using transport::SourceIndex;
using transport::SourceMask;

// The model is read in chunks; one chunk is a slice, a bucket and a tile at once.
struct Chunks {
  SliceIndex count = 0;
  std::uint64_t bytes = 0;  // of each
  std::uint64_t total() const { return count * bytes; }
};

// What others see of a host's copy. Outlives the pull that fills it.
struct SharedCopy {
  explicit SharedCopy(const Chunks& chunks) : held(TileSet(chunks.count)) {}
  swarm::HeldTiles held;
  bool complete = false;
};

// What a pull needs of the fleet around it.
struct PullSite {
  Events& events;
  Control& control;
  Nics& nics;
  const Chunks chunks;
  // nullptr: that life of the host is over.
  std::function<const SharedCopy*(const coordinator::NodeInfo&, const ModelVersion&)> copy_of;
  std::function<HostId(const coordinator::NodeInfo&)> host_of;
  std::function<void(HostId from, double bytes)> moved;
};

// A pull as recovery/pull does it, with the engine's real scheduler, real have-feeds, and the real
// coordinator: it opens, connects, trades with those that fill up beside it, reports, takes in
// whom the answers name, closes.
class Puller {
 public:
  Puller(PullSite& site, coordinator::NodeInfo self, HostId host, ModelVersion id,
         SharedCopy& copy);
  ~Puller();
  Puller(const Puller&) = delete;
  Puller& operator=(const Puller&) = delete;

  void open();
  // Bitmaps of neighbours that are due, then what the scheduler wants to be read.
  void before_step();
  // The bytes of one step, at the rates that the network now gives.
  void step(Duration length);
  bool complete() const { return complete_; }
  const std::string& failure() const { return failure_; }
  std::uint64_t bytes_done() const { return done_ * site_.chunks.bytes; }

 private:
  struct Path {
    FlowId flow = 0;
    SourceIndex source = 0;
    HostId host = 0;
    std::deque<SliceIndex> queue;
    double of_front = 0;
    double landed = 0;
    bool closed = false;
  };
  struct Source {
    coordinator::SourceOffer offer;
    HostId host = 0;
    bool connected = false;  // it has a path
    bool lost = false;
    bool growing = false;
    swarm::HaveFeed feed;
    TileSet told;
    TimePoint next_dial{};
    std::uint64_t bytes = 0;
    std::uint32_t failures = 0;
  };

  void opened(coordinator::OpenedPull opened);
  void begin();
  void take_offers(const std::vector<coordinator::SourceOffer>& offers);
  void dial(SourceIndex index);
  void connected(SourceIndex index);
  void gain(SourceIndex index, const swarm::TileRuns& runs);
  void hear();
  void post();
  void exchange();  // now and again
  void report();
  void obey();
  void land(PathId path);
  void close_path(PathId path, const std::string& why);
  std::vector<coordinator::SourceReport> reports() const;
  // Calls `run` in this pull only: it may have ended when the time comes.
  std::function<void()> mine(std::function<void()> run) const;

  PullSite& site_;
  const coordinator::NodeInfo self_;
  const HostId host_;
  const ModelVersion id_;
  SharedCopy& copy_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  PullId pull_id_;
  int exchanges_ = 0;
  std::vector<std::unique_ptr<Source>> sources_;
  std::map<Incarnation, SourceIndex> index_of_;
  std::vector<std::uint64_t> candidates_;  // by slice, of those that fill up
  SourceMask whole_;                       // they hold everything
  SourceMask growing_;
  std::unique_ptr<transport::Scheduler> scheduler_;
  std::vector<Path> paths_;
  TimePoint next_hear_{};
  TimePoint next_tick_{};
  int ticks_ = 0;
  bool news_ = false;  // the scheduler may want to read more than before
  SliceIndex done_ = 0;
  bool complete_ = false;
  std::string failure_;
};

}  // namespace rekindle::scale
