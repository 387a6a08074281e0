#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <thread>

#include <sys/mman.h>

#include <nlohmann/json.hpp>

#include "src/base/median.h"
#include "src/base/units.h"
#include "tools/bench/bench_memory.h"
#include "tools/bench/benchmarks.h"
#include "transport/verbs/device/fabric.h"
#include "transport/verbs/memory/memory_registrar.h"

namespace rekindle::bench {
namespace {

namespace verbs = transport::verbs;

constexpr std::uint64_t kHugePageBytes = 2 * kMiB;
constexpr const char* kTouch = "touched";
constexpr const char* kLock = "mlock";
constexpr const char* kFresh = "fresh, all devices";
constexpr const char* kAgain = "resident, all devices";
constexpr const char* kGone = "deregistered, all devices";

// Rates of each row by round, bytes per second.
using Rates = std::map<std::string, std::vector<double>>;

double since(TimePoint begin) { return seconds(SteadyClock().now() - begin); }

Result<void> measure_touch(const RegisterOptions& options, Rates& rates) {
  TRY(const auto memory, FreshMemory::create(options.bytes, options.huge));
  const TimePoint begin = SteadyClock().now();
  touch_pages(memory->bytes());
  rates[kTouch].push_back(static_cast<double>(options.bytes) / since(begin));
  return {};
}

// Where the limit allows it: a row less is no failure.
Result<void> measure_lock(const RegisterOptions& options, Rates& rates) {
  TRY(const auto memory, FreshMemory::create(options.bytes, options.huge));
  const TimePoint begin = SteadyClock().now();
  if (::mlock(memory->bytes().data(), memory->bytes().size()) != 0) return {};
  rates[kLock].push_back(static_cast<double>(options.bytes) / since(begin));
  return {};
}

class Registering {
 public:
  Registering(verbs::Fabric& fabric, const RegisterOptions& options)
      : fabric_(fabric),
        options_(options),
        registrar_(verbs::MemoryRegistrar::create(fabric, {})) {}

  Result<void> measure(Rates& rates) {
    TRY(const auto memory, FreshMemory::create(options_.bytes, options_.huge));
    const Duration touched_before = registrar_->stats().touching;
    TRY(double fresh_seconds, add(*memory, rates, /*fresh=*/true));
    touching_seconds_ += seconds(registrar_->stats().touching - touched_before);
    seconds_ += fresh_seconds;
    TRY_VOID(add(*memory, rates, /*fresh=*/false));
    return {};
  }
  double touch_share() const { return seconds_ == 0 ? 0 : touching_seconds_ / seconds_; }

 private:
  // Seconds until all devices were ready.
  Result<double> add(const FreshMemory& memory, Rates& rates, bool fresh) {
    const auto bytes = static_cast<double>(options_.bytes);
    const auto devices = static_cast<double>(fabric_.devices().size());
    std::vector<double> ready(fabric_.devices().size(), 0);
    TimePoint begin = SteadyClock().now();
    auto region = registrar_->add(memory.bytes(), verbs::MemoryUse::kLand, memory.fd(), 0, nullptr);
    // Pieces come in order: with the last one, the device has them all.
    while (!region->settled()) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      for (std::size_t i = 0; i < ready.size(); ++i) {
        const bool last = region->find(*fabric_.devices()[i], options_.bytes - 1) != nullptr;
        if (ready[i] == 0 && last) ready[i] = since(begin);
      }
    }
    const double all = since(begin);
    if (const auto problems = region->problems(); !problems.empty()) return fail(problems.front());
    if (fresh) {
      for (std::size_t i = 0; i < ready.size(); ++i) {
        rates[fabric_.devices()[i]->name()].push_back(bytes / (ready[i] == 0 ? all : ready[i]));
      }
    }
    rates[fresh ? kFresh : kAgain].push_back(bytes * devices / all);
    begin = SteadyClock().now();
    region.reset();
    if (fresh) rates[kGone].push_back(bytes * devices / since(begin));
    return all;
  }

  verbs::Fabric& fabric_;
  const RegisterOptions& options_;
  std::unique_ptr<verbs::MemoryRegistrar> registrar_;
  double touching_seconds_ = 0;
  double seconds_ = 0;
};

// Of one round to the same round: what disturbed one has disturbed the other. `over` counts each
// device's bytes.
double paired(const std::vector<double>& over, const std::vector<double>& under, double devices) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(over.size(), under.size()); ++i) {
    ratios.push_back(over[i] / devices / under[i]);
  }
  return median(std::move(ratios));
}

RegisterReport summarize(const verbs::Fabric& fabric, const RegisterOptions& options,
                         const Rates& rates, double touch_share) {
  RegisterReport report{.options = options, .cpus = std::thread::hardware_concurrency()};
  std::vector<std::string> names{kTouch, kLock};
  for (const auto& device : fabric.devices()) report.devices.push_back(device->name());
  names.insert(names.end(), report.devices.begin(), report.devices.end());
  names.insert(names.end(), {kFresh, kAgain, kGone});
  for (const std::string& name : names) {
    const auto found = rates.find(name);
    if (found == rates.end()) continue;
    const auto [low, high] = std::minmax_element(found->second.begin(), found->second.end());
    report.rows.push_back({name, median(found->second) / 1e9, *low / 1e9, *high / 1e9});
  }
  const auto devices = static_cast<double>(fabric.devices().size());
  report.touch_share = touch_share;
  report.ratio_touch = paired(rates.at(kFresh), rates.at(kTouch), devices);
  if (const auto lock = rates.find(kLock); lock != rates.end()) {
    report.ratio_mlock = paired(rates.at(kFresh), lock->second, devices);
  }
  return report;
}

}  // namespace

Result<RegisterReport> run_bench_register(verbs::Fabric& fabric, const RegisterOptions& asked) {
  RegisterOptions options = asked;
  if (fabric.devices().empty()) {
    return fail(ErrorCode::kInvalid, "bench register: {}", fabric.why_empty());
  }
  if (options.bytes == 0 || options.rounds == 0 || options.rounds > 1000) {
    return fail(ErrorCode::kInvalid, "bench register: at least a byte, 1 to 1000 rounds");
  }
  options.bytes = round_up(options.bytes, options.huge ? kHugePageBytes : kPageBytes);
  Registering registering(fabric, options);
  {
    Rates warm_up;  // what devices learn by trying
    TRY_VOID(registering.measure(warm_up));
  }
  Rates rates;
  for (std::size_t round = 0; round < options.rounds; ++round) {
    TRY_VOID(measure_touch(options, rates));
    TRY_VOID(measure_lock(options, rates));
    TRY_VOID(registering.measure(rates));
  }
  return summarize(fabric, options, rates, registering.touch_share());
}

std::string to_text(const RegisterReport& report) {
  std::string text =
      fmt::format("bench register: {} of fresh {}, {} device{}, {} rounds, {} CPUs\n\n",
                  format_bytes(report.options.bytes),
                  report.options.huge ? "huge pages" : "tmpfs pages", report.devices.size(),
                  report.devices.size() == 1 ? "" : "s", report.options.rounds, report.cpus);
  text += fmt::format("{:<26} {:>8} {:>15}\n", "", "GB/s", "lowest-highest");
  for (const RegisterRow& row : report.rows) {
    text += fmt::format("{:<26} {:>8.2f} {:>15}\n", row.name, row.gb_per_second,
                        fmt::format("{:.2f}-{:.2f}", row.lowest, row.highest));
  }
  text += fmt::format(
      "\nready on all devices / touched: {:.2f}{}; faulting pages in took {:.0f} % of it\n",
      report.ratio_touch,
      report.ratio_mlock ? fmt::format(", / mlock: {:.2f}", *report.ratio_mlock) : "",
      report.touch_share * 100);
  return text;
}

std::string to_json(const RegisterReport& report) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const RegisterRow& row : report.rows) {
    rows.push_back({{"name", row.name},
                    {"gb_per_second", row.gb_per_second},
                    {"lowest", row.lowest},
                    {"highest", row.highest}});
  }
  nlohmann::ordered_json json{{"bench", "register"},
                              {"possible", true},
                              {"bytes", report.options.bytes},
                              {"huge", report.options.huge},
                              {"rounds", report.options.rounds},
                              {"cpus", report.cpus},
                              {"devices", report.devices},
                              {"rows", rows},
                              {"touch_share", report.touch_share},
                              {"ratio_touch", report.ratio_touch}};
  if (report.ratio_mlock) json["ratio_mlock"] = *report.ratio_mlock;
  return json.dump(2) + "\n";
}

}  // namespace rekindle::bench
