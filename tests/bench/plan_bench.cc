// Plans the pull of one of 16 tensor-parallel ranks of Kimi-K2 (its published config: about 139,000
// tensors, 1 TB of FP8 with block scales) and prints what that takes. Run it alone on a machine:
//   plan_bench [--repeat N] [whole|sharded]
// One source mix per process, so that the peak resident size is that mix's own.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <fmt/format.h>

#include "recovery/planner/shard_spec.h"
#include "recovery/planner/slice_plan.h"
#include "recovery/pull/pull_plans.h"
#include "src/base/units.h"
#include "tests/planner/model_tensors.h"

namespace rekindle::planner {
namespace {

// CPU seconds of this thread: what one core needs, also where others use the machine.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename T>
T check(Result<T> result) {
  if (result) return std::move(*result);
  fmt::print(stderr, "plan_bench: {}\n", result.error().message());
  std::exit(1);
}

// VmRSS or VmHWM of this process, in bytes.
std::uint64_t memory(const char* key) {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.starts_with(key))
      return std::strtoull(line.c_str() + std::strlen(key) + 1, nullptr, 10) * 1024;
  }
  return 0;
}

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

struct Bench {
  std::string config = testing::kimi_k2_config();
  std::shared_ptr<const Checkpoint> checkpoint;
  std::unique_ptr<ShardSpec> spec;

  void make_checkpoint() {
    TensorSet tensors = check(TensorSet::create(testing::model_tensors(config)));
    const auto begin = cpu_seconds();
    TileMap tiles = check(TileMap::create(tensors));
    fmt::print("checkpoint   {} tensors, {}, {} tiles (tile map {:.3f} s)\n", tensors.size(),
               format_bytes(tensors.total_bytes()), tiles.tile_count(), cpu_seconds() - begin);
    checkpoint = std::make_shared<const Checkpoint>(
        Checkpoint{{"kimi-k2", 1}, std::move(tensors), std::move(tiles), {}, {}});
    spec = std::make_unique<ShardSpec>(check(ShardSpec::builtin(config)));
  }

  // Offsets as a packed file has them; headers do not matter here.
  Layout lay_out(const std::vector<TensorBox>& boxes) const {
    std::vector<LayoutEntry> entries;
    entries.reserve(boxes.size());
    std::uint64_t offset = 4096;
    for (const TensorBox& box : boxes) {
      entries.push_back({box.tensor, box.box, 0, offset});
      const std::uint64_t element = dtype_size_bytes(checkpoint->tensors[box.tensor].dtype);
      offset += round_up(box.box.elements() * element, 8);
    }
    return check(
        Layout::create(checkpoint->tensors, {{"model.safetensors", offset}}, std::move(entries)));
  }
  Layout shard(std::uint32_t rank, std::uint32_t size) const {
    return lay_out(check(spec->boxes(checkpoint->tensors, config, {{rank, size}, {}, {}})));
  }
};

// One table of the host's pulls: how long the first pull waits for it, and the next one.
template <typename Ask>
void ask_twice(const char* what, boost::asio::io_context& io, Ask ask) {
  double seconds[2] = {};
  for (double& elapsed : seconds) {
    const double begin = wall_seconds();
    boost::asio::co_spawn(
        io,
        [&]() -> async::Task<void> {
          auto asking = ask();
          (void)check(co_await std::move(asking));
        },
        boost::asio::detached);
    io.restart();
    io.run();
    elapsed = wall_seconds() - begin;
  }
  fmt::print("{:12} {:.3f} s elapsed the first time, {:.6f} s when it is kept\n", what, seconds[0],
             seconds[1]);
}

void print_kept(const Bench& bench, const std::vector<std::shared_ptr<const Layout>>& layouts) {
  boost::asio::io_context io;
  pull::PullPlans plans(io.get_executor(), {1, 2 * kGiB, 256});
  const pull::WantedSpec spec{"tp=3/16", "", ""};
  pull::PullPlans::WantedRef wanted;
  const auto ask_wanted = [&]() -> async::Task<Result<pull::PullPlans::WantedRef>> {
    CO_TRY(wanted, co_await plans.wanted(bench.checkpoint, spec, bench.config));
    co_return wanted;
  };
  ask_twice("boxes, files", io, ask_wanted);
  pull::PlanInputs inputs;
  inputs.checkpoint = bench.checkpoint;
  inputs.destination = std::shared_ptr<const Layout>(wanted, &wanted->layout);
  for (const auto& layout : layouts) inputs.sources.push_back({layout, false, layouts.size() > 1});
  ask_twice("plan", io, [&] { return plans.plan(inputs); });
  fmt::print("kept         {} for this rank\n", format_bytes(plans.kept_bytes()));
}

void run(bool sharded, int repeat) {
  Bench bench;
  bench.make_checkpoint();
  std::vector<std::shared_ptr<const Layout>> layouts;
  std::vector<SourceView> sources;
  const std::uint32_t distinct = sharded ? 8 : 1;
  for (std::uint32_t i = 0; i < distinct; ++i) {
    layouts.push_back(std::make_shared<const Layout>(
        sharded ? bench.shard(i, 8) : bench.lay_out(whole_boxes(bench.checkpoint->tensors))));
  }
  // As shards do that were pulled.
  for (std::uint32_t i = 0; i < 16; ++i) {
    sources.push_back({layouts[i % distinct].get(), nullptr, sharded});
  }

  auto begin = cpu_seconds();
  const auto boxes =
      check(bench.spec->boxes(bench.checkpoint->tensors, bench.config, {{3, 16}, {}, {}}));
  fmt::print("shard spec   tp=3/16 in {:.3f} s\n", cpu_seconds() - begin);
  const Layout destination = bench.lay_out(boxes);
  const std::uint64_t before = memory("VmRSS");

  std::vector<double> times;
  std::vector<double> walls;
  std::unique_ptr<Plan> plan;
  for (int i = 0; i < repeat; ++i) {
    plan.reset();
    begin = cpu_seconds();
    const double wall = wall_seconds();
    plan = check(plan_pull({bench.checkpoint.get(), &destination, sources, nullptr}, {}));
    times.push_back(cpu_seconds() - begin);
    walls.push_back(wall_seconds() - wall);
  }
  std::sort(times.begin(), times.end());
  std::sort(walls.begin(), walls.end());
  const std::uint64_t after = memory("VmRSS");

  begin = cpu_seconds();
  Expansion expansion;
  std::vector<TileWork> tiles;
  std::uint64_t reads = 0;
  std::uint64_t tile_count = 0;
  std::uint64_t by_kind[3] = {};
  for (SliceIndex slice = 0; slice < plan->slice_count(); ++slice) {
    plan->expand(slice, plan->candidates(slice).next(), expansion);
    plan->tiles(slice, tiles);
    reads += expansion.reads.size();
    tile_count += tiles.size();
    by_kind[static_cast<int>(plan->kind(slice))] += plan->slice_bytes(slice);
  }
  const double expanding = cpu_seconds() - begin;

  fmt::print("sources      16, {}\n", sharded ? "tp=0/8 … tp=7/8 twice" : "whole copies");
  fmt::print("plan         {:.3f} CPU s median of {} ({:.3f} to {:.3f}), {:.3f} s elapsed\n",
             times[times.size() / 2], repeat, times.front(), times.back(), walls[walls.size() / 2]);
  fmt::print("             {} slices, {} buckets, wanted {}, wire {}, missing {}\n",
             plan->slice_count(), plan->bucket_count(), format_bytes(plan->wanted_bytes()),
             format_bytes(plan->wire_bytes()), plan->missing().size());
  fmt::print("             direct {}, staged {}, range {}\n", format_bytes(by_kind[0]),
             format_bytes(by_kind[1]), format_bytes(by_kind[2]));
  fmt::print("expand all   {:.3f} s, {} reads, {} tiles\n", expanding, reads, tile_count);
  fmt::print("memory       peak {} with all inputs, of that the plan {}\n",
             format_bytes(memory("VmHWM")), format_bytes(after > before ? after - before : 0));
  plan.reset();
  print_kept(bench, layouts);
  fmt::print("conditions   {}, one thread\n", cpu_model());
}

}  // namespace
}  // namespace rekindle::planner

int main(int argc, char** argv) {
  int repeat = 5;
  std::string mix = "whole";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--repeat" && i + 1 < argc) {
      repeat = std::max(1, std::atoi(argv[++i]));
    } else if (argument == "whole" || argument == "sharded") {
      mix = argument;
    } else {
      fmt::print(stderr, "usage: plan_bench [--repeat N] [whole|sharded]\n");
      return 2;
    }
  }
  rekindle::planner::run(mix == "sharded", repeat);
  return 0;
}
