#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "recovery/swarm/have_feed.h"
#include "tests/scale/metered_core.h"
#include "tests/support/fluid_network.h"
#include "transport/schedule/scheduler.h"

namespace rekindle::scale {

using rekindle::testing::FlowId;
using rekindle::testing::FluidNetwork;
using rekindle::testing::HostId;
using transport::PathId;
using transport::SliceIndex;
using transport::SourceIndex;
using transport::SourceMask;

// The model is read in chunks; one chunk is a slice, a bucket and a tile at once.
struct Chunks {
  SliceIndex count = 0;
  // Of each.
  std::uint64_t bytes = 0;
  std::uint64_t total() const { return count * bytes; }
};

// A host's copy, as other hosts see it. It outlives the pull that fills it.
struct SharedCopy {
  explicit SharedCopy(const Chunks& chunks) : held(TileSet(chunks.count)) {}
  swarm::HeldTiles held;
  bool complete = false;
};

// The fleet around a pull.
struct PullSite {
  Events& events;
  MeteredCore& control;
  FluidNetwork& network;
  const Chunks chunks;
  // nullptr: that life of the host is over.
  std::function<const SharedCopy*(const coordinator::NodeInfo&, const ModelVersion&)> copy_of;
  std::function<HostId(const coordinator::NodeInfo&)> host_of;
  std::function<void(HostId from, double bytes)> moved;
};

// A pull with the steps of recovery/pull, the engine's real scheduler, real have-feeds, and the
// real coordinator. It opens, connects, trades with pullers that fill up at the same time, reports,
// takes in the sources of the answers, and closes.
class Puller {
 public:
  Puller(PullSite& site, coordinator::NodeInfo self, HostId host, ModelVersion id,
         SharedCopy& copy);
  ~Puller();
  Puller(const Puller&) = delete;
  Puller& operator=(const Puller&) = delete;

  void open();
  // Takes in the bitmaps that are due, then posts the reads that the scheduler wants.
  void before_step();
  // Moves the bytes of one step, at the present rates of the network.
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
    // It has a path.
    bool connected = false;
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
  // Reports to the coordinator from time to time.
  void exchange();
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
  // Growing sources, by slice.
  std::vector<SourceMask> candidates_;
  // Sources that hold everything.
  SourceMask whole_;
  SourceMask growing_;
  std::unique_ptr<transport::Scheduler> scheduler_;
  std::vector<Path> paths_;
  TimePoint next_hear_{};
  TimePoint next_tick_{};
  int ticks_ = 0;
  // The scheduler may want to read more than before.
  bool news_ = false;
  SliceIndex done_ = 0;
  bool complete_ = false;
  std::string failure_;
};

}  // namespace rekindle::scale
