#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/scale/scale_host.h"

namespace rekindle::scale {

struct FleetOptions {
  std::uint32_t hosts = 1000;
  std::uint32_t hosts_per_rack = 20;
  std::uint32_t hosts_per_instance = 2;
  std::uint64_t model_bytes = 1'000'000'000'000;
  std::uint64_t chunk_bytes = 256 << 20;
  double nic_bytes_per_second = 50e9;
  std::uint64_t seed = 1;
  coordinator::Limits limits{};
  Duration step = std::chrono::milliseconds(10);
  // Print a line to stderr for each second.
  bool follow = false;
};

// Taken every tenth of a second, from the fault or join of the scenario on.
struct Sample {
  double seconds = 0;
  std::size_t ready = 0;
  std::size_t pulling = 0;
  // Bytes per second, of all pulls.
  double goodput = 0;
};

class Fleet {
 public:
  explicit Fleet(const FleetOptions& options);

  // The host holds `id`, serves it if `serves`, and has run for long when the scenario begins.
  void add_holder(HostId host, const ModelVersion& id, bool serves);
  Assignment assignment(HostId host, const ModelVersion& id, std::uint64_t generation) const;
  // Starts the host at a random time within `within`.
  void start_later(HostId host, std::optional<Assignment> work, Duration within);
  void lose_power(HostId host) { hosts_[host]->lose_power(); }

  void run(Duration length);
  // Samples from now on.
  void begin_watch(std::vector<HostId> awaited);
  // Runs until all awaited hosts are ready. False: they were not within `at_most`.
  bool run_until_ready(Duration at_most);

  const Host& host(HostId id) const { return *hosts_[id]; }
  std::size_t size() const { return hosts_.size(); }
  const MeteredCore& control() const { return *control_; }
  const Chunks& chunks() const { return site_->chunks; }
  const std::vector<Sample>& samples() const { return samples_; }
  double virtual_seconds() const { return seconds(events_.now() - began_); }
  double sent_by(HostId host) const { return sent_[host]; }
  std::vector<double> ready_times() const;
  std::vector<std::string> failures() const;

 private:
  void one_step();
  void sample();
  void follow() const;
  static HostId host_of(const coordinator::NodeInfo& info);

  const FleetOptions options_;
  std::mt19937_64 random_;
  Events events_;
  const TimePoint began_ = events_.now();
  std::unique_ptr<MeteredCore> control_;
  std::unique_ptr<FluidNetwork> network_;
  std::unique_ptr<PullSite> site_;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::vector<double> sent_;
  std::vector<HostId> awaited_;
  TimePoint watch_began_{};
  TimePoint next_sample_{};
  // Bytes since the last sample.
  double moved_ = 0;
  std::vector<Sample> samples_;
};

}  // namespace rekindle::scale
