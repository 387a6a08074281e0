// coordinator_join_bench [AGENTS] [SECONDS] [ROUNDS]
//
// Joins AGENTS (1000) agents at once to one coordinator process over real sockets: connect,
// register, announce a whole copy. First to one without TLS, then to one with TLS, from a cluster
// secret. Then all agents of both send heartbeats for SECONDS (10), at the same time, so that a
// busy machine slows both. Prints how long the join took, what the coordinator's memory and CPU
// were, how late the slowest heartbeat was answered; at the end the medians of ROUNDS (3), and the
// ratios beside their limits.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include <sys/resource.h>

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

async::Task<Result<void>> enroll(rpc::Identity identity, std::shared_ptr<rpc::RpcClient> client) {
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

async::Task<Result<void>> join(rpc::Identity identity, std::shared_ptr<rpc::RpcClient>& client,
                               const Run& run) {
  CO_TRY(client, co_await rpc::RpcClient::connect(run.address, identity, 30s));
  auto enrolled = enroll(identity, client);
  co_return co_await std::move(enrolled);
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
    if (!answer) {
      if (run.late == 1) fmt::print(stderr, "{}\n", answer.error().message());
      // On a busy machine the coordinator may have taken it for dead.
      auto again = enroll(identity, client);
      (void)co_await std::move(again);
    }
    if (run.joined == run.agents) run.slowest = std::max(run.slowest, Clock::now() - asked);
    co_await sleep_until(asked + 250ms);
  }
  ++run.ended;
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
  double join_s = 0;
  double join_cpu_s = 0;
  // Parts of a core, for the heartbeats.
  double beat_cores = 0;
};

class Fleet {
 public:
  Fleet(boost::asio::io_context& io, std::size_t agents, bool tls)
      : io_(io), name_(tls ? "with TLS" : "without TLS"), coordinator_(command(tls)) {
    run_.address = coordinator_.value_after("ready ");
    if (tls) run_.credentials = rpc::Credentials::of_secret(kSecret);
    run_.agents = agents;
  }

  void join() {
    run_.began = Clock::now();
    run_.end = run_.began + kPatience;
    for (std::size_t i = 0; i < run_.agents; ++i) {
      boost::asio::co_spawn(io_, agent(i, run_), boost::asio::detached);
    }
    while (run_.joined < run_.agents && Clock::now() < run_.end) io_.run_one_for(50ms);
    joined_ = testing::cpu_time(coordinator_.pid());
    cost_.join_s = std::chrono::duration<double>(run_.joined_all - run_.began).count();
    cost_.join_cpu_s = joined_.total_s();
    run_.end = Clock::now() + kPatience;
    fmt::print("{:<11}  join        {} agents, {} failed, in {:.2f} s; {:.2f} s CPU, {}\n", name_,
               run_.agents, run_.failed, cost_.join_s, cost_.join_cpu_s,
               status_line(coordinator_.pid(), "VmRSS"));
  }

  void begin_beats(std::chrono::seconds length) {
    run_.beats = 0;
    began_ = testing::cpu_time(coordinator_.pid());
    run_.end = Clock::now() + length;
  }
  bool beats_ended() const {
    return run_.ended == run_.agents || Clock::now() > run_.end + kAnswers;
  }
  void end_beats(double elapsed) {
    const testing::CpuTime cpu = testing::cpu_time(coordinator_.pid());
    cost_.beat_cores = (cpu.total_s() - began_.total_s()) / elapsed;
    fmt::print(
        "{:<11}  heartbeats  {:.0f}/s, {} failed, slowest {:.0f} ms; {:.1f} % of a core ({:.1f} % "
        "in the kernel), {}\n",
        name_, static_cast<double>(run_.beats) / elapsed, run_.late,
        std::chrono::duration<double, std::milli>(run_.slowest).count(), 100 * cost_.beat_cores,
        100 * (cpu.system_s - began_.system_s) / elapsed, status_line(coordinator_.pid(), "VmHWM"));
  }

  bool failed() const { return run_.failed != 0; }
  const Cost& cost() const { return cost_; }

 private:
  static constexpr auto kPatience = 60s;
  static constexpr auto kAnswers = 5s;

  testing::Spawn command(bool tls) const {
    testing::Spawn spawn;
    spawn.argv = {COORDINATOR_MAIN, "127.0.0.1:0", (temp_ / "state").string()};
    if (!tls) return spawn;
    const auto file = temp_ / "secret";
    std::ofstream(file) << kSecret;
    std::filesystem::permissions(file, std::filesystem::perms(0600));
    spawn.argv.insert(spawn.argv.end(), {"--secret", file.string()});
    return spawn;
  }

  boost::asio::io_context& io_;
  const std::string name_;
  const testing::TempDir temp_;
  testing::Process coordinator_;
  Run run_;
  testing::CpuTime joined_;
  testing::CpuTime began_;
  Cost cost_;
};

struct Ratios {
  double join = 0;
  double join_cpu = 0;
  double beat_cpu = 0;
};

// nullopt: an agent failed.
std::optional<Ratios> measure(std::size_t agents, std::chrono::seconds length) {
  boost::asio::io_context io(1);
  Fleet plain(io, agents, false);
  Fleet tls(io, agents, true);
  plain.join();
  tls.join();
  const auto from = Clock::now();
  plain.begin_beats(length);
  tls.begin_beats(length);
  while (!plain.beats_ended() || !tls.beats_ended()) io.run_one_for(50ms);
  const double elapsed = std::chrono::duration<double>(Clock::now() - from).count();
  plain.end_beats(elapsed);
  tls.end_beats(elapsed);
  if (plain.failed() || tls.failed()) return std::nullopt;
  return Ratios{tls.cost().join_s / plain.cost().join_s,
                tls.cost().join_cpu_s / plain.cost().join_cpu_s,
                tls.cost().beat_cores / plain.cost().beat_cores};
}

double median(std::vector<Ratios> rounds, double Ratios::*field) {
  const auto middle = rounds.begin() + static_cast<std::ptrdiff_t>(rounds.size() / 2);
  std::ranges::nth_element(rounds, middle, {}, field);
  return (*middle).*field;
}

int run_bench(std::size_t agents, std::chrono::seconds length, std::size_t rounds) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  std::vector<Ratios> ratios;
  for (std::size_t round = 0; round < rounds; ++round) {
    const auto measured = measure(agents, length);
    if (!measured) return 1;
    ratios.push_back(*measured);
  }
  fmt::print(
      "TLS takes {:.2f} times the time of joins (limit 2; {:.2f} times the CPU), and {:.2f} times "
      "the CPU of heartbeats (limit 1.3)\n",
      median(ratios, &Ratios::join), median(ratios, &Ratios::join_cpu),
      median(ratios, &Ratios::beat_cpu));
  return 0;
}

}  // namespace
}  // namespace rekindle

int main(int argc, char** argv) {
  const std::size_t agents = argc > 1 ? std::stoul(argv[1]) : 1000;
  const std::chrono::seconds length(argc > 2 ? std::stol(argv[2]) : 10);
  const std::size_t rounds = argc > 3 ? std::stoul(argv[3]) : 3;
  return rekindle::run_bench(agents, length, std::max<std::size_t>(rounds, 1));
}
