#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/scale/host.h"

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
  bool follow = false;  // a line on stderr for each second
};

// Every tenth of a second, from when the scenario's fault or join happens.
struct Sample {
  double seconds = 0;
  std::size_t ready = 0;
  std::size_t pulling = 0;
  double goodput = 0;  // bytes per second, of all pulls
};

class Fleet {
 public:
  explicit Fleet(const FleetOptions& options);

  // Holds `id`, serves it if `serves`, and is long there when the scenario begins.
  void add_holder(HostId host, const ModelVersion& id, bool serves);
  Assignment assignment(HostId host, const ModelVersion& id, std::uint64_t generation) const;
  // Starts at a time between 0 and `within` from now on.
  void start_later(HostId host, std::optional<Assignment> work, Duration within);
  void lose_power(HostId host) { hosts_[host]->lose_power(); }

  void run(Duration length);
  // Samples from now on.
  void begin_watch(std::vector<HostId> awaited);
  // Until all that are awaited are ready; false: not within `at_most`.
  bool run_until_ready(Duration at_most);

  const Host& host(HostId id) const { return *hosts_[id]; }
  std::size_t size() const { return hosts_.size(); }
  const Control& control() const { return *control_; }
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
  std::unique_ptr<Control> control_;
  std::unique_ptr<Nics> nics_;
  std::unique_ptr<PullSite> site_;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::vector<double> sent_;
  std::vector<HostId> awaited_;
  TimePoint watch_began_{};
  TimePoint next_sample_{};
  double moved_ = 0;  // since the last sample
  std::vector<Sample> samples_;
};

}  // namespace rekindle::scale
