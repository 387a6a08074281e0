#include "tests/swarm/swarm_world.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "recovery/swarm/availability.h"
#include "tests/planner/random_plan.h"

namespace rekindle::swarm::testing {

using namespace std::chrono_literals;
using transport::BatchOptions;
using transport::Scheduler;
using transport::SliceInfo;
using transport::Verdict;

namespace {

constexpr Duration kStep = 5ms;
constexpr Duration kConnect = 20ms;
// As a pull asks the coordinator.
constexpr Duration kFirstLook = 500ms;
constexpr Duration kLook = 1000ms;
constexpr int kQuickLooks = 6;
constexpr int kPathsPerSource = 2;

}  // namespace

// One path of a joiner.
struct World::Flow {
  rekindle::testing::FlowId id = 0;
  // The sender.
  int host = 0;
  SourceIndex source = 0;
  std::deque<SliceIndex> queue;
  double landed_of_front = 0;
  double landed = 0;
  bool aborted = false;
  bool closed = false;
};

struct World::Joiner {
  Joiner(std::shared_ptr<const planner::Plan> of, TileIndex tiles)
      : plan(std::move(of)), availability(*plan, {}), held(TileSet(tiles)) {}

  int host = 0;
  Duration starts_at{0};
  std::shared_ptr<const planner::Plan> plan;
  Availability availability;
  HeldTiles held;
  std::unique_ptr<Scheduler> scheduler;
  // By PathId.
  std::vector<Flow> flows;
  // By host.
  std::map<int, SourceIndex> sources;
  // The end of the handshake, by host.
  std::map<int, Duration> connecting;
  // The feed of each host to this one.
  std::map<int, HaveFeed> feeds;
  std::map<SliceIndex, SliceIndex> landed_of_group;
  std::vector<bool> accepted;
  AnnouncePolicy announce;
  int looks = 0;
  Duration next_look{0};
  std::optional<Duration> done_at;
  std::string failure;
};

World::World(const WorldOptions& options)
    : options_(options),
      random_(options.seed),
      network_(static_cast<std::size_t>(options.joiners) + 1, options.link_bytes_per_second) {
  for (const auto& [host, part] : options.upload) {
    network_.set_upload(static_cast<rekindle::testing::HostId>(host), part);
  }
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < options.tensors; ++i) {
    tensors.push_back({"w" + std::to_string(i), DType::kBF16, {4096, 2048}});
  }
  checkpoint_ = planner::testing::make_checkpoint(std::move(tensors));
  std::vector<TensorBox> boxes;
  for (TensorIndex i = 0; i < checkpoint_->tensors.size(); ++i) {
    boxes.push_back({i, Box::whole(checkpoint_->tensors[i].shape)});
  }
  auto packed = pack_layout(checkpoint_->tensors, boxes, std::uint64_t{1} << 40);
  if (!packed) throw std::runtime_error(packed.error().message());
  layout_ = std::make_unique<Layout>(std::move(packed->layout));
  bytes_ = checkpoint_->tensors.total_bytes();
  sent_.resize(static_cast<std::size_t>(options.joiners) + 1);
  for (int host = 0; host <= options.joiners; ++host) seeds_.push_back(random_());
  announced_.insert(0);
  for (int i = 0; i < options.joiners; ++i) {
    const planner::SourceView view{layout_.get(), nullptr};
    planner::PlanRequest request;
    request.checkpoint = checkpoint_.get();
    request.destination = layout_.get();
    request.sources = std::span(&view, 1);
    auto plan = planner::plan_pull(request, {.slice_bytes = 1 << 20, .bucket_bytes = 4 << 20});
    if (!plan) throw std::runtime_error(plan.error().message());
    auto joiner = std::make_unique<Joiner>(std::shared_ptr<const planner::Plan>(std::move(*plan)),
                                           checkpoint_->tiles.tile_count());
    joiner->host = i + 1;
    joiner->starts_at = std::chrono::milliseconds(random_() % 50);
    joiners_.push_back(std::move(joiner));
  }
}

World::~World() = default;

void World::start(Joiner& joiner) {
  BatchOptions options;
  options.order_seed = seeds_[static_cast<std::size_t>(joiner.host)];
  options.order = slice_order(*joiner.plan, options.order_seed);
  joiner.accepted.resize(joiner.plan->slice_count());
  joiner.scheduler = std::make_unique<Scheduler>(
      joiner.plan->slice_count(),
      [&joiner](SliceIndex slice) {
        return SliceInfo{joiner.plan->slice_bytes(slice),
                         joiner.availability.candidates(slice),
                         joiner.availability.prospects(slice),
                         slice,
                         1,
                         joiner.availability.key(slice)};
      },
      options, now());
  if (joiner.host <= options_.source_serves) {
    joiner.connecting[0] = elapsed_ + kConnect;
  }
  joiner.next_look = elapsed_ + (joiner.host <= options_.source_serves ? kFirstLook : 0ms);
}

// Finds the hosts that the coordinator offers now.
void World::discover(Joiner& joiner) {
  if (elapsed_ < joiner.next_look) return;
  joiner.next_look = elapsed_ + (++joiner.looks < kQuickLooks ? kFirstLook : kLook);
  for (const int host : announced_) {
    if (host == 0 || host == joiner.host || joiner.sources.contains(host) || !alive(host)) continue;
    joiner.connecting.try_emplace(host, elapsed_ + kConnect);
  }
}

void World::connect(Joiner& joiner, int host) {
  SourceIndex source = 0;
  if (host != 0) {
    source = static_cast<SourceIndex>(host);
    joiner.availability.add_source(source, *layout_, false);
    joiner.scheduler->add_neighbour(source, seeds_[static_cast<std::size_t>(host)]);
    joiner.feeds.emplace(host, HaveFeed());
  }
  joiner.sources[host] = source;
  for (int i = 0; i < kPathsPerSource; ++i) {
    const PathId id = joiner.scheduler->add_path(source, "host " + std::to_string(host), now());
    if (id != joiner.flows.size()) throw std::logic_error("paths are numbered otherwise");
    const auto flow = network_.open(static_cast<rekindle::testing::HostId>(host),
                                    static_cast<rekindle::testing::HostId>(joiner.host), 0);
    joiner.flows.push_back({.id = flow, .host = host, .source = source, .queue = {}});
  }
}

// Takes in the bitmaps of the neighbours, as their feeds send them.
void World::hear(Joiner& joiner) {
  for (auto& [host, feed] : joiner.feeds) {
    if (!runs(host)) continue;
    const Joiner& neighbour = *joiners_[static_cast<std::size_t>(host - 1)];
    const auto update = feed.next(neighbour.held.snapshot(), now());
    if (!update) continue;
    const auto gained = joiner.availability.extend(joiner.sources[host], update->held);
    if (!gained.empty()) {
      joiner.scheduler->candidates_added(joiner.sources[host], gained, now());
    }
  }
}

bool World::holds(int host, const planner::Plan& plan, SliceIndex slice) const {
  if (host == 0) return true;
  std::vector<TileIndex> tiles;
  plan.tiles_read(slice, tiles);
  const HeldTiles& held = joiners_[static_cast<std::size_t>(host - 1)]->held;
  return std::all_of(tiles.begin(), tiles.end(), [&](TileIndex tile) { return held.test(tile); });
}

void World::post(Joiner& joiner) {
  while (const auto post = joiner.scheduler->next_post(now())) {
    Flow& flow = joiner.flows[post->path];
    if (joiner.accepted[post->slice]) ++double_fetches_;
    if (!holds(flow.host, *joiner.plan, post->slice)) ++unverified_reads_;
    flow.queue.push_back(post->slice);
  }
}

void World::share_links() {
  for (const auto& joiner : joiners_) {
    for (const Flow& flow : joiner->flows) {
      network_.set_wants(flow.id, runs(joiner->host) && runs(flow.host) && !flow.closed &&
                                      !flow.aborted && !flow.queue.empty());
    }
  }
  network_.share();
}

void World::land(Joiner& joiner, Flow& flow) {
  const SliceIndex slice = flow.queue.front();
  const auto path = static_cast<PathId>(&flow - joiner.flows.data());
  flow.queue.pop_front();
  flow.landed_of_front = 0;
  sent_[static_cast<std::size_t>(flow.host)] += joiner.plan->slice_bytes(slice);
  joiner.scheduler->slice_done(path, slice, OpStatus::kOk, now());
  // As PlanSliceSource does: tiles verify when all slices of their group have landed.
  const SliceIndex first = joiner.plan->group_first(slice);
  const SliceIndex size = joiner.plan->group_size(slice);
  joiner.accepted[slice] = true;
  if (++joiner.landed_of_group[first] == size) {
    std::vector<planner::TileWork> tiles;
    joiner.plan->tiles(first + size - 1, tiles);
    for (const auto& work : tiles) joiner.held.set(work.tile);
  }
  joiner.scheduler->resolve(slice, Verdict::kAccept, now());
}

void World::advance(Joiner& joiner) {
  for (std::size_t i = 0; i < joiner.flows.size(); ++i) {
    Flow& flow = joiner.flows[i];
    if (flow.closed) continue;
    if (flow.aborted || !alive(flow.host)) {
      const OpStatus status = flow.aborted ? OpStatus::kAborted : OpStatus::kPeerLost;
      while (!flow.queue.empty()) {
        const SliceIndex slice = flow.queue.front();
        flow.queue.pop_front();
        joiner.scheduler->slice_done(static_cast<PathId>(i), slice, status, now());
      }
      flow.closed = true;
      joiner.scheduler->path_closed(static_cast<PathId>(i), "the connection broke");
      continue;
    }
    double budget = network_.rate(flow.id) * seconds(kStep);
    while (budget > 0 && !flow.queue.empty()) {
      const auto size = static_cast<double>(joiner.plan->slice_bytes(flow.queue.front()));
      const double part = std::min(budget, size - flow.landed_of_front);
      flow.landed_of_front += part;
      flow.landed += part;
      budget -= part;
      if (flow.landed_of_front + 0.5 < size) break;
      land(joiner, flow);
    }
    joiner.scheduler->path_progress(static_cast<PathId>(i), static_cast<std::uint64_t>(flow.landed),
                                    now());
  }
}

void World::run(Duration at_most) {
  while (elapsed_ < at_most && !all_done()) {
    for (const int host : options_.die) {
      if (elapsed_ >= options_.dies_at) dead_.insert(host);
    }
    for (const int host : options_.freeze) {
      if (elapsed_ >= options_.freezes_at) frozen_.insert(host);
    }
    if (elapsed_ >= options_.source_dies_at) dead_.insert(0);
    for (auto& joiner : joiners_) {
      Joiner& self = *joiner;
      if (!runs(self.host) || elapsed_ < self.starts_at || !self.failure.empty()) continue;
      if (self.scheduler == nullptr) start(self);
      if (!options_.silent.contains(self.host) &&
          self.announce.due(self.held.count(), checkpoint_->tiles.tile_count(), now())) {
        announced_.insert(self.host);
      }
      if (self.done_at) continue;
      discover(self);
      for (auto it = self.connecting.begin(); it != self.connecting.end();) {
        if (elapsed_ < it->second) {
          ++it;
          continue;
        }
        if (alive(it->first)) connect(self, it->first);
        it = self.connecting.erase(it);
      }
      hear(self);
      post(self);
    }
    share_links();
    elapsed_ += kStep;
    for (auto& joiner : joiners_) {
      Joiner& self = *joiner;
      if (!runs(self.host) || self.scheduler == nullptr || self.done_at) continue;
      advance(self);
      self.scheduler->tick(now());
      for (const PathId path : self.scheduler->take_aborts()) self.flows[path].aborted = true;
      (void)self.scheduler->take_lost();
      const auto outcome = self.scheduler->outcome();
      if (!outcome) continue;
      if (*outcome) {
        self.done_at = elapsed_;
      } else if (self.failure.empty()) {
        self.failure = outcome->error().message();
      }
    }
  }
}

bool World::all_done() const {
  return std::all_of(joiners_.begin(), joiners_.end(), [&](const auto& joiner) {
    return !runs(joiner->host) || joiner->done_at || !joiner->failure.empty();
  });
}

std::string World::states() const {
  std::string text;
  for (const auto& joiner : joiners_) {
    text += fmt::format("\nhost {}: {} of {} tiles, sent {} MB", joiner->host, joiner->held.count(),
                        checkpoint_->tiles.tile_count(),
                        sent_[static_cast<std::size_t>(joiner->host)] / 1000000);
    if (!alive(joiner->host)) text += ", killed";
    if (frozen_.contains(joiner->host)) text += ", frozen";
    if (joiner->done_at) text += fmt::format(", done after {} ms", milliseconds(*joiner->done_at));
    if (!joiner->failure.empty()) text += ", failed: " + joiner->failure;
  }
  return text;
}

Duration World::last_done() const {
  Duration last{0};
  for (const auto& joiner : joiners_) {
    if (!runs(joiner->host)) continue;
    last = std::max(last, joiner->done_at.value_or(Duration::max()));
  }
  return last;
}

TileIndex World::held_by_anyone() const {
  TileSet all(checkpoint_->tiles.tile_count());
  for (const auto& joiner : joiners_) {
    if (!alive(joiner->host)) continue;
    for (const auto& [begin, end] : joiner->held.snapshot().ranges()) all.set_range(begin, end);
  }
  return all.count();
}

TileIndex World::held_by_everyone() const {
  TileSet all(checkpoint_->tiles.tile_count());
  all.set_range(0, all.size());
  for (const auto& joiner : joiners_) {
    if (!alive(joiner->host)) continue;
    for (TileIndex tile = 0; tile < all.size(); ++tile) {
      if (!joiner->held.test(tile)) all.reset(tile);
    }
  }
  return all.count();
}

}  // namespace rekindle::swarm::testing
