// coordinator_join_bench [AGENTS] [SECONDS]
//
// Joins AGENTS (1000) agents at once to one coordinator process over real sockets: connect,
// register, announce a whole copy. Then all send heartbeats for SECONDS (10). Prints how long the
// join took, what the coordinator's memory and CPU were, how late the slowest heartbeat was
// answered. First without and then with TLS, from a cluster secret; at the end the ratio.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include <sys/resource.h>
#include <unistd.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "proto/coordinator.pb.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/credentials.h"
#include "recovery/rpc/methods.h"
#include "tests/support/process.h"

namespace rekindle {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr const char* kSecret = "a secret of the benchmark";

struct Run {
  std::string address;
  // nullptr: without TLS.
  std::shared_ptr<rpc::Credentials> credentials;
  Clock::time_point began;
  Clock::time_point joined_all;
  Clock::time_point end;
  std::size_t agents = 0;
  std::size_t joined = 0;
  std::size_t failed = 0;
  std::size_t ended = 0;
  std::uint64_t beats = 0;
  std::uint64_t late = 0;  // heartbeats that failed
  Clock::duration slowest{};
};

async::Task<void> sleep_until(Clock::time_point at) {
  boost::asio::steady_timer timer(co_await boost::asio::this_coro::executor, at);
  co_await timer.async_wait(boost::asio::use_awaitable);
}

async::Task<Result<void>> join(rpc::Identity identity, std::shared_ptr<rpc::RpcClient>& client,
                               Run& run) {
  CO_TRY(client, co_await rpc::RpcClient::connect(run.address, identity, 30s));
  proto::RegisterRequest enroll;
  enroll.mutable_node()->set_node_id(identity.node_id);
  enroll.mutable_node()->set_incarnation(identity.incarnation.to_bytes());
  enroll.mutable_node()->set_control_endpoint("0.0.0.0:7400");
  enroll.mutable_node()->set_host_id(identity.node_id);
  CO_TRY(const auto registered,
         co_await rpc::call<proto::COORDINATOR_REGISTER>(client, std::move(enroll), 30s));
  (void)registered;
  proto::AnnounceRequest announce;
  announce.set_node_id(identity.node_id);
  announce.set_incarnation(identity.incarnation.to_bytes());
  announce.set_full(true);
  auto& holding = *announce.add_add();
  *holding.mutable_id() = rpc::to_proto(ModelVersion{"bench", 1});
  *holding.mutable_root() = rpc::to_proto(Digest{1, 2});
  *holding.mutable_layout() = rpc::to_proto(Digest{3, 4});
  holding.set_complete(true);
  holding.set_whole(true);
  CO_TRY(const auto announced,
         co_await rpc::call<proto::COORDINATOR_ANNOUNCE>(client, std::move(announce), 30s));
  (void)announced;
  co_return Result<void>();
}

async::Task<void> agent(std::size_t index, Run& run) {
  const rpc::Identity identity =
      rpc::make_identity(proto::ROLE_AGENT, fmt::format("n{}", index), run.credentials);
  std::shared_ptr<rpc::RpcClient> client;
  const auto joined = co_await join(identity, client, run);
  if (!joined) {
    ++run.failed;
    if (run.failed == 1) fmt::print(stderr, "{}\n", joined.error().message());
  }
  if (++run.joined == run.agents) run.joined_all = Clock::now();
  while (joined && Clock::now() < run.end) {
    const auto asked = Clock::now();
    proto::HeartbeatRequest request;
    request.set_node_id(identity.node_id);
    request.set_incarnation(identity.incarnation.to_bytes());
    const auto answer =
        co_await rpc::call<proto::COORDINATOR_HEARTBEAT>(client, std::move(request), 2s);
    ++(answer ? run.beats : run.late);
    if (run.joined == run.agents) run.slowest = std::max(run.slowest, Clock::now() - asked);
    co_await sleep_until(asked + 250ms);
  }
  ++run.ended;
}

struct Cpu {
  double user = 0;
  double system = 0;
  double total() const { return user + system; }
};

Cpu cpu_seconds(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  std::getline(file, text);
  text.erase(0, text.rfind(')') + 2);
  std::istringstream fields(text);
  std::string skip;
  for (int i = 0; i < 11; ++i) fields >> skip;
  Cpu cpu;
  fields >> cpu.user >> cpu.system;
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  return {cpu.user / ticks, cpu.system / ticks};
}

std::string status_line(pid_t pid, const std::string& name) {
  std::ifstream file(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name)) return line.substr(line.find_first_not_of(" \t", name.size() + 1));
  }
  return "?";
}

// What one run has taken of the coordinator.
struct Cost {
  bool failed = false;
  double join_s = 0;
  double join_cpu_s = 0;
  // Parts of a core, for the heartbeats.
  double beat_cores = 0;
};

Cost measure(std::size_t agents, std::chrono::seconds length, bool tls) {
  fmt::print("{}\n", tls ? "with TLS" : "without TLS");
  const testing::TempDir temp;
  testing::Spawn spawn;
  spawn.argv = {COORDINATOR_MAIN, "127.0.0.1:0", (temp / "state").string()};
  if (tls) {
    const auto file = temp / "secret";
    std::ofstream(file) << kSecret;
    std::filesystem::permissions(file, std::filesystem::perms(0600));
    spawn.argv.insert(spawn.argv.end(), {"--secret", file.string()});
  }
  testing::Process coordinator(std::move(spawn));
  Run run;
  run.address = coordinator.value_after("ready ");
  if (tls) run.credentials = rpc::Credentials::of_secret(kSecret);
  run.agents = agents;
  run.began = Clock::now();
  run.end = run.began + length + 60s;
  boost::asio::io_context io(1);
  for (std::size_t i = 0; i < agents; ++i) {
    boost::asio::co_spawn(io, agent(i, run), boost::asio::detached);
  }
  while (run.joined < agents && Clock::now() < run.end) io.run_one_for(50ms);
  const Cpu cpu_join = cpu_seconds(coordinator.pid());
  fmt::print("join        {} agents, {} failed, in {:.2f} s; coordinator {:.2f} s CPU, {}\n",
             agents, run.failed, std::chrono::duration<double>(run.joined_all - run.began).count(),
             cpu_join.total(), status_line(coordinator.pid(), "VmRSS"));
  Cost cost;
  cost.join_s = std::chrono::duration<double>(run.joined_all - run.began).count();
  cost.join_cpu_s = cpu_join.total();
  run.beats = 0;
  const auto from = Clock::now();
  run.end = from + length;
  while (run.ended < agents && Clock::now() < run.end + 5s) io.run_one_for(50ms);
  const double elapsed = std::chrono::duration<double>(Clock::now() - from).count();
  const Cpu cpu = cpu_seconds(coordinator.pid());
  fmt::print(
      "heartbeats  {:.0f}/s, {} failed, slowest {:.0f} ms; coordinator {:.1f} % of a core "
      "({:.1f} % in the kernel), {}\n",
      static_cast<double>(run.beats) / elapsed, run.late,
      std::chrono::duration<double, std::milli>(run.slowest).count(),
      100 * (cpu.total() - cpu_join.total()) / elapsed,
      100 * (cpu.system - cpu_join.system) / elapsed, status_line(coordinator.pid(), "VmHWM"));
  cost.beat_cores = (cpu.total() - cpu_join.total()) / elapsed;
  cost.failed = run.failed != 0;
  return cost;
}

int run_bench(std::size_t agents, std::chrono::seconds length) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  const Cost plain = measure(agents, length, false);
  const Cost tls = measure(agents, length, true);
  fmt::print(
      "TLS takes {:.2f} times the time of joins ({:.2f} times the CPU), and {:.2f} times "
      "the CPU of heartbeats\n",
      tls.join_s / plain.join_s, tls.join_cpu_s / plain.join_cpu_s,
      tls.beat_cores / plain.beat_cores);
  return plain.failed || tls.failed ? 1 : 0;
}

}  // namespace
}  // namespace rekindle

int main(int argc, char** argv) {
  const std::size_t agents = argc > 1 ? std::stoul(argv[1]) : 1000;
  const std::chrono::seconds length(argc > 2 ? std::stol(argv[2]) : 10);
  return rekindle::run_bench(agents, length);
}
