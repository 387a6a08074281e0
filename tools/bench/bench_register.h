#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/base/result.h"
#include "transport/verbs/device/fabric.h"

// `rekindle bench register`: memory of a fresh tmpfs file, registered with all RDMA devices, next
// to what the host does with as many fresh pages without them: touching, and mlock(). Rounds are
// interleaved and the figures are medians.
namespace rekindle::bench {

struct RegisterOptions {
  std::uint64_t bytes = std::uint64_t{1} << 30;
  bool huge = false;  // hugetlbfs pages
  std::size_t rounds = 5;
};

struct RegisterRow {
  std::string name;
  double gb_per_second = 0;        // decimal, median of the rounds
  double lowest = 0, highest = 0;  // of the rounds
};

struct RegisterReport {
  RegisterOptions options;
  unsigned cpus = 0;
  std::vector<std::string> devices;
  std::vector<RegisterRow> rows;  // touching, mlock, each device, all devices, …
  double touch_share = 0;         // of the time that registering fresh memory takes
  double ratio_touch = 0;         // fresh memory, ready on all devices, over touching it
  std::optional<double> ratio_mlock;
};

// kInvalid: bad options; kExhausted, …: what the registrar says when not all of it is registered.
Result<RegisterReport> run_bench_register(transport::verbs::Fabric& fabric,
                                          const RegisterOptions& options);

std::string to_text(const RegisterReport& report);
std::string to_json(const RegisterReport& report);

}  // namespace rekindle::bench
