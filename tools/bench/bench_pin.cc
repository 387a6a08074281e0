#include <algorithm>
#include <vector>

#include <nlohmann/json.hpp>

#include "src/base/clock.h"
#include "src/base/units.h"
#include "src/bucket/pinned.h"
#include "tools/bench/bench_memory.h"
#include "tools/bench/bench_run.h"
#include "tools/bench/benchmarks.h"

namespace rekindle::bench {

namespace {

constexpr std::chrono::minutes kPinPatience{5};

double since(TimePoint begin) { return seconds(SteadyClock().now() - begin); }

struct Seconds {
  std::vector<double> touched, fresh, resident, unpinned;
};

// Seconds until all of it is pinned; `gone` for letting it go again.
Result<double> pin_once(bucket::Pinner& pinner, const FreshMemory& memory, double& gone) {
  const TimePoint begin = SteadyClock().now();
  TRY(auto segment, pinner.add(memory.fd(), memory.bytes().size()));
  if (!pinner.wait(*segment, begin + kPinPatience)) {
    return fail(ErrorCode::kTimeout, "bench register: pinning takes more than {} minutes",
                kPinPatience.count());
  }
  const double took = since(begin);
  if (auto failure = pinner.failure(*segment)) return fail(std::move(*failure));
  const TimePoint end = SteadyClock().now();
  segment.reset();
  gone = since(end);
  return took;
}

Result<void> measure(bucket::Pinner& pinner, const PinOptions& options, Seconds& all) {
  {
    TRY(const auto memory, FreshMemory::create(options.bytes, options.huge));
    const TimePoint begin = SteadyClock().now();
    touch_pages(memory->bytes());
    all.touched.push_back(since(begin));
  }
  TRY(const auto memory, FreshMemory::create(options.bytes, options.huge));
  double gone = 0;
  TRY(const double fresh, pin_once(pinner, *memory, gone));
  TRY(const double resident, pin_once(pinner, *memory, gone));
  all.fresh.push_back(fresh);
  all.resident.push_back(resident);
  all.unpinned.push_back(gone);
  return {};
}

}  // namespace

Result<PinReport> run_bench_pin(bucket::Device& device, const PinOptions& options) {
  if (options.bytes == 0 || options.rounds == 0 || options.rounds > 1000) {
    return fail(ErrorCode::kInvalid, "bench register: at least a byte, 1 to 1000 rounds");
  }
  bucket::Pinner pinner(device, bucket::Pinner::kThreads);
  Seconds all;
  for (std::size_t round = 0; round < options.rounds; ++round) {
    TRY_VOID(measure(pinner, options, all));
  }
  const auto rate = [&](const std::vector<double>& took) {
    return static_cast<double>(options.bytes) / median(took) / 1e9;
  };
  return PinReport{options,         device.name(),      rate(all.touched),
                   rate(all.fresh), rate(all.resident), rate(all.unpinned)};
}

std::string to_text(const PinReport& report) {
  std::string text = fmt::format("bench register: {} of {} for {}, {} rounds\n\n{:<26} {:>8}\n",
                                 format_bytes(report.options.bytes),
                                 report.options.huge ? "huge pages" : "tmpfs pages", report.device,
                                 report.options.rounds, "", "GB/s");
  const std::pair<const char*, double> rows[] = {{"touched", report.touched},
                                                 {"pinned, fresh", report.fresh},
                                                 {"pinned, resident", report.resident},
                                                 {"let go", report.unpinned}};
  for (const auto& [name, rate] : rows) text += fmt::format("{:<26} {:>8.2f}\n", name, rate);
  text += fmt::format("\npinned fresh / touched: {:.2f}\n", report.fresh / report.touched);
  return text;
}

std::string to_json(const PinReport& report) {
  return nlohmann::ordered_json{{"bench", "register"},
                                {"possible", true},
                                {"gpu", report.device},
                                {"bytes", report.options.bytes},
                                {"huge", report.options.huge},
                                {"rounds", report.options.rounds},
                                {"touched_gb_per_second", report.touched},
                                {"fresh_gb_per_second", report.fresh},
                                {"resident_gb_per_second", report.resident},
                                {"let_go_gb_per_second", report.unpinned}}
             .dump(2) +
         "\n";
}

}  // namespace rekindle::bench
