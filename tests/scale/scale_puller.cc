#include "tests/scale/scale_puller.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include "recovery/swarm/availability.h"

namespace rekindle::scale {

using coordinator::OpenedPull;
using coordinator::PullProgress;
using coordinator::PullProgressAnswer;
using coordinator::SourceOffer;
using transport::OpStatus;

namespace {

constexpr Duration kConnect = 20ms;
constexpr Duration kRetry = 300ms;  // after an answer that says: later
constexpr Duration kFirstExchanges = 500ms;
constexpr Duration kExchangeInterval = 1000ms;
constexpr int kQuickExchanges = 6;
constexpr Duration kDialAgain = 5000ms;
constexpr Duration kHear = 100ms;
constexpr Duration kTick = 20ms;
constexpr int kPostEvery = 3;
constexpr std::uint64_t kWindowChunks = 4;

}  // namespace

Puller::Puller(PullSite& site, coordinator::NodeInfo self, HostId host, ModelVersion id,
               SharedCopy& copy)
    : site_(site),
      self_(std::move(self)),
      host_(host),
      id_(std::move(id)),
      copy_(copy),
      candidates_(site.chunks.count) {}

Puller::~Puller() {
  *alive_ = false;
  for (const Path& path : paths_) {
    if (!path.closed) site_.network.close(path.flow);
  }
}

std::function<void()> Puller::mine(std::function<void()> run) const {
  return [alive = alive_, run = std::move(run)] {
    if (*alive) run();
  };
}

void Puller::open() {
  site_.control.call<Result<OpenedPull>>(
      [self = self_, id = id_](testing::DurableCore& core, TimePoint now) {
        return core.open_pull({self, id.model, id.version, ""}, now);
      },
      [this, alive = alive_](Result<OpenedPull> answer) {
        if (!*alive) return;
        if (answer && !answer->sources.empty()) return opened(std::move(*answer));
        const Duration wait = answer ? answer->retry_after : kRetry;
        site_.events.after(wait, mine([this] { open(); }));
      });
}

void Puller::opened(OpenedPull opened) {
  pull_id_ = opened.pull_id;
  begin();
  take_offers(opened.sources);
  site_.events.after(kFirstExchanges, mine([this] { exchange(); }));
}

void Puller::begin() {
  transport::BatchOptions options;
  options.order_seed = swarm::order_seed(self_.incarnation);
  options.order.resize(site_.chunks.count);
  std::iota(options.order.begin(), options.order.end(), 0u);
  std::mt19937_64 random(options.order_seed);
  std::shuffle(options.order.begin(), options.order.end(), random);
  options.window_bytes = kWindowChunks * site_.chunks.bytes;
  options.window_bytes_per_nic = options.window_bytes;
  scheduler_ = std::make_unique<transport::Scheduler>(
      site_.chunks.count,
      [this](SliceIndex slice) {
        return transport::SliceInfo{
            site_.chunks.bytes, candidates_[slice] | whole_, growing_, slice, 1, slice};
      },
      options, site_.events.now());
  next_hear_ = next_tick_ = site_.events.now();
}

void Puller::take_offers(const std::vector<SourceOffer>& offers) {
  for (const SourceOffer& offer : offers) {
    const auto known = index_of_.find(offer.grant.source);
    if (known == index_of_.end()) {
      if (sources_.size() >= transport::kMaxSources) continue;
      const auto index = static_cast<SourceIndex>(sources_.size());
      index_of_[offer.grant.source] = index;
      auto source = std::make_unique<Source>();
      source->offer = offer;
      source->host = site_.host_of(offer.node);
      source->growing = !offer.complete;
      source->told = TileSet(site_.chunks.count);
      sources_.push_back(std::move(source));
      dial(index);
    } else if (Source& source = *sources_[known->second];
               source.lost && site_.events.now() >= source.next_dial) {
      dial(known->second);
    }
  }
}

void Puller::dial(SourceIndex index) {
  sources_[index]->next_dial = site_.events.now() + kDialAgain;
  site_.events.after(kConnect, mine([this, index] { connected(index); }));
}

void Puller::connected(SourceIndex index) {
  Source& source = *sources_[index];
  const SharedCopy* copy = site_.copy_of(source.offer.node, id_);
  if (copy == nullptr) {
    source.lost = true;
    ++source.failures;
    return;
  }
  const TimePoint now = site_.events.now();
  const bool first = !source.connected && !source.lost;
  source.connected = true;
  source.lost = false;
  if (first && source.growing) {
    growing_.set(index);
    scheduler_->add_neighbour(index, swarm::order_seed(source.offer.node.incarnation));
    gain(index, source.offer.held);
  } else if (first) {
    whole_.set(index);
  }
  const FlowId flow = site_.network.open(
      source.host, host_, static_cast<double>(source.offer.grant.max_bytes_per_second));
  paths_.push_back({flow, index, source.host, {}, 0, 0, false});
  scheduler_->add_path(index, source.offer.node.node_id, now);
  news_ = true;
}

void Puller::gain(SourceIndex index, const swarm::TileRuns& runs) {
  std::vector<SliceIndex> gained;
  Source& source = *sources_[index];
  for (const auto& [begin, end] : runs) {
    for (SliceIndex slice = begin; slice < end; ++slice) {
      if (source.told.test(slice)) continue;
      source.told.set(slice);
      candidates_[slice].set(index);
      gained.push_back(slice);
    }
  }
  if (gained.empty()) return;
  scheduler_->candidates_added(index, gained, site_.events.now());
  news_ = true;
}

// The first 16 that fill up are followed, as by a real pull.
void Puller::hear() {
  std::size_t followed = 0;
  for (SourceIndex index = 0; index < sources_.size(); ++index) {
    Source& source = *sources_[index];
    if (!source.growing || !source.connected || source.lost) continue;
    if (followed++ >= swarm::kMaxNeighbours) return;
    const SharedCopy* copy = site_.copy_of(source.offer.node, id_);
    if (copy == nullptr) continue;  // silence: the scheduler's deadlines find it
    if (copy->held.count() == source.told.count()) continue;
    const auto update = source.feed.next(copy->held.snapshot(), site_.events.now());
    if (update) gain(index, update->held);
  }
}

void Puller::before_step() {
  if (scheduler_ == nullptr || complete_) return;
  const TimePoint now = site_.events.now();
  if (now >= next_hear_) {
    hear();
    next_hear_ = now + kHear;
  }
  if (std::exchange(news_, false)) post();
  for (const Path& path : paths_) {
    if (!path.closed) site_.network.set_wants(path.flow, !path.queue.empty());
  }
}

void Puller::post() {
  while (const auto post = scheduler_->next_post(site_.events.now())) {
    paths_[post->path].queue.push_back(post->slice);
  }
}

void Puller::land(PathId id) {
  Path& path = paths_[id];
  const SliceIndex slice = path.queue.front();
  path.queue.pop_front();
  path.of_front = 0;
  sources_[path.source]->bytes += site_.chunks.bytes;
  site_.moved(path.host, static_cast<double>(site_.chunks.bytes));
  scheduler_->slice_done(id, slice, OpStatus::kOk, site_.events.now());
  copy_.held.set(slice);
  ++done_;
  scheduler_->resolve(slice, transport::Verdict::kAccept, site_.events.now());
}

void Puller::step(Duration length) {
  if (scheduler_ == nullptr || complete_) return;
  for (PathId id = 0; id < paths_.size(); ++id) {
    if (paths_[id].closed) continue;
    double budget = site_.network.rate(paths_[id].flow) * seconds(length);
    if (budget <= 0) continue;
    while (budget > 0 && !paths_[id].queue.empty()) {
      Path& path = paths_[id];
      const double part = std::min(budget, static_cast<double>(site_.chunks.bytes) - path.of_front);
      path.of_front += part;
      path.landed += part;
      budget -= part;
      if (path.of_front + 0.5 < static_cast<double>(site_.chunks.bytes)) break;
      land(id);
      post();  // the engine does not wait for the end of a step
    }
    scheduler_->path_progress(id, static_cast<std::uint64_t>(paths_[id].landed),
                              site_.events.now());
  }
  obey();
}

void Puller::close_path(PathId id, const std::string& why) {
  Path& path = paths_[id];
  while (!path.queue.empty()) {
    const SliceIndex slice = path.queue.front();
    path.queue.pop_front();
    scheduler_->slice_done(id, slice, OpStatus::kAborted, site_.events.now());
  }
  path.closed = true;
  site_.network.close(path.flow);
  scheduler_->path_closed(id, why);
}

// What the scheduler asks for as time passes.
void Puller::obey() {
  const TimePoint now = site_.events.now();
  if (now < next_tick_ && done_ < site_.chunks.count) return;
  next_tick_ = now + kTick;
  scheduler_->tick(now);
  if (++ticks_ % kPostEvery == 0) news_ = true;  // rates have changed
  for (const PathId path : scheduler_->take_aborts()) close_path(path, "aborted");
  for (const auto& lost : scheduler_->take_lost()) {
    sources_[lost.source]->lost = true;
    ++sources_[lost.source]->failures;
  }
  if (scheduler_->take_starved()) report();
  if (const auto outcome = scheduler_->outcome()) {
    complete_ = outcome->has_value();
    if (!complete_) failure_ = outcome->error().message();
    site_.control.call<bool>(
        [id = pull_id_, self = self_.incarnation](testing::DurableCore& core, TimePoint at) {
          return core.close_pull(id, self, at).has_value();
        },
        [](bool) {});
  }
}

std::vector<coordinator::SourceReport> Puller::reports() const {
  std::vector<coordinator::SourceReport> reports;
  const auto progress = scheduler_->progress();
  for (SourceIndex index = 0; index < sources_.size(); ++index) {
    const Source& source = *sources_[index];
    const double goodput =
        index < progress.sources.size() ? progress.sources[index].goodput_bytes_per_second : 0;
    reports.push_back({source.offer.node.node_id, source.offer.grant.source, source.bytes, goodput,
                       source.failures, source.lost, false, ""});
  }
  return reports;
}

void Puller::exchange() {
  if (complete_ || !failure_.empty()) return;
  report();
  const Duration wait = ++exchanges_ <= kQuickExchanges ? kFirstExchanges : kExchangeInterval;
  site_.events.after(wait, mine([this] { exchange(); }));
}

void Puller::report() {
  PullProgress progress{pull_id_, self_, id_, bytes_done(), site_.chunks.total(), reports()};
  site_.control.call<Result<PullProgressAnswer>>(
      [progress = std::move(progress)](testing::DurableCore& core, TimePoint now) {
        return core.pull_progress(progress, now);
      },
      [this, alive = alive_](Result<PullProgressAnswer> answer) {
        if (*alive && answer && !complete_) take_offers(answer->sources);
      });
}

}  // namespace rekindle::scale
