#include "tests/scale/scale_fleet.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <utility>

namespace rekindle::scale {

namespace {

constexpr Duration kSampleEvery = 100ms;
constexpr std::uint64_t kCopiesPerHost = 2;  // that a store has room for

}  // namespace

Fleet::Fleet(const FleetOptions& options)
    : options_(options),
      random_(options.seed),
      control_(std::make_unique<MeteredCore>(events_, options.limits)),
      network_(std::make_unique<FluidNetwork>(options.hosts, options.nic_bytes_per_second)),
      sent_(options.hosts) {
  const auto count = static_cast<SliceIndex>((options.model_bytes + options.chunk_bytes - 1) /
                                             options.chunk_bytes);
  site_ = std::make_unique<PullSite>(PullSite{
      events_, *control_, *network_, Chunks{count, options.chunk_bytes},
      [this](const coordinator::NodeInfo& info, const ModelVersion& id) -> const SharedCopy* {
        const Host& host = *hosts_[host_of(info)];
        return host.up() && host.info().incarnation == info.incarnation ? host.copy(id) : nullptr;
      },
      [](const coordinator::NodeInfo& info) { return host_of(info); },
      [this](HostId from, double bytes) {
        sent_[from] += bytes;
        moved_ += bytes;
      }});
  for (HostId id = 0; id < options.hosts; ++id) {
    hosts_.push_back(std::make_unique<Host>(*site_, id,
                                            fmt::format("rack{}", id / options.hosts_per_rack),
                                            kCopiesPerHost * site_->chunks.total()));
  }
}

// "h0042"
HostId Fleet::host_of(const coordinator::NodeInfo& info) {
  HostId id = 0;
  std::from_chars(info.node_id.data() + 1, info.node_id.data() + info.node_id.size(), id);
  return id;
}

Assignment Fleet::assignment(HostId host, const ModelVersion& id, std::uint64_t generation) const {
  const std::uint32_t span = options_.hosts_per_instance;
  return {id, fmt::format("i{}", host / span), generation, span, host % span};
}

void Fleet::add_holder(HostId host, const ModelVersion& id, bool serves) {
  hosts_[host]->put(id);
  start_later(host, serves ? std::optional(assignment(host, id, 1)) : std::nullopt, 250ms);
}

void Fleet::start_later(HostId host, std::optional<Assignment> work, Duration within) {
  const auto delay = std::uniform_int_distribution<Duration::rep>(0, within.count())(random_);
  events_.after(Duration(delay),
                [this, host, work = std::move(work)] { hosts_[host]->start(work); });
}

void Fleet::one_step() {
  events_.run_until(events_.now() + options_.step);
  for (const auto& host : hosts_) host->before_step();
  network_->share();
  for (const auto& host : hosts_) host->step(options_.step);
  if (watch_began_ != TimePoint{} && events_.now() >= next_sample_) sample();
}

void Fleet::run(Duration length) {
  for (const TimePoint end = events_.now() + length; events_.now() < end;) one_step();
}

void Fleet::begin_watch(std::vector<HostId> awaited) {
  awaited_ = std::move(awaited);
  watch_began_ = events_.now();
  next_sample_ = watch_began_ + kSampleEvery;
  moved_ = 0;
}

void Fleet::sample() {
  const auto ready = std::ranges::count_if(
      awaited_, [&](HostId id) { return hosts_[id]->ready_after().has_value(); });
  samples_.push_back({seconds(events_.now() - watch_began_), static_cast<std::size_t>(ready),
                      control_->core().pulls().table().all().size(),
                      moved_ / seconds(kSampleEvery)});
  moved_ = 0;
  next_sample_ += kSampleEvery;
  if (options_.follow && samples_.size() % 10 == 0) follow();
}

void Fleet::follow() const {
  const coordinator::Core& core = control_->core();
  fmt::print(stderr, "{:6.1f} s  {} ready, {} pull, {} wait, {:.2f} TB/s\n",
             samples_.back().seconds, samples_.back().ready, core.pulls().table().all().size(),
             core.pulls().waiting(), samples_.back().goodput / 1e12);
}

bool Fleet::run_until_ready(Duration at_most) {
  for (const TimePoint end = events_.now() + at_most; events_.now() < end;) {
    one_step();
    if (!samples_.empty() && samples_.back().ready == awaited_.size()) return true;
  }
  return false;
}

std::vector<double> Fleet::ready_times() const {
  std::vector<double> times;
  for (const HostId id : awaited_) {
    if (const auto after = hosts_[id]->ready_after()) times.push_back(seconds(*after));
  }
  std::ranges::sort(times);
  return times;
}

std::vector<std::string> Fleet::failures() const {
  std::vector<std::string> failures;
  for (const auto& host : hosts_) {
    if (!host->failure().empty()) failures.push_back(host->info().node_id + ": " + host->failure());
  }
  return failures;
}

}  // namespace rekindle::scale
