#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <exception>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <fmt/format.h>

#include "proto/coordinator.pb.h"
#include "proto/drill.pb.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "src/async/task_group.h"
#include "src/base/clock.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/fleet_verdict.h"
#include "tools/cli/output.h"
#include "tools/cli/remote.h"

// `rekindle bench fleet`: agents read from each other, all to all, and the figures tell which host,
// pair or rail is slow or broken.
namespace rekindle::cli {
namespace {

constexpr std::chrono::milliseconds kAgentDialDeadline{3000};
constexpr std::chrono::milliseconds kAskDeadline{5000};
// For a pair to connect and to drain, beside the read itself.
constexpr std::chrono::milliseconds kAroundRead{20'000};
// What that takes on a fleet without faults.
constexpr double kUsualAroundSeconds = 0.3;
constexpr std::chrono::milliseconds kShortestRead{100};
constexpr std::chrono::milliseconds kLongestRead{30'000};

struct FleetArgs {
  std::string time = "2s";
  std::string transport;
  double under = 0.5;
  std::vector<std::string> nodes;
  std::uint32_t parallel = 1;
  bool force = false;
  bool dry_run = false;
};

// Why the fleet is busy; "": it is not, as far as the coordinator knows.
std::string what_runs(const proto::ClusterStatusResponse& status) {
  if (status.pulls_size() > 0) {
    const auto& pull = status.pulls(0);
    return fmt::format("{} pull(s) run: {} pulls {}@{}", status.pulls_size(), pull.puller(),
                       pull.id().model(), pull.id().version());
  }
  for (const auto& round : status.rounds()) {
    if (round.phase() != "over") {
      return fmt::format("{} is being updated to {}@{}", round.group(), round.id().model(),
                         round.id().version());
    }
  }
  return "";
}

double rate_of(std::uint64_t bytes, std::uint64_t elapsed_us) {
  return elapsed_us == 0 ? 0 : static_cast<double>(bytes) * 1e6 / static_cast<double>(elapsed_us);
}

// The reader's rails in use, or its interface.
double link_of(const proto::BenchReading& reading) {
  if (reading.transport().starts_with("tcp")) {
    return static_cast<double>(reading.interface_bytes_per_second());
  }
  std::map<std::string, double> used;
  for (const auto& path : reading.paths()) {
    for (const auto& rail : reading.rails()) {
      if (rail.name() == path.rail()) {
        used[rail.name()] = static_cast<double>(rail.link_bytes_per_second());
      }
    }
  }
  double sum = 0;
  for (const auto& [name, rate] : used) sum += rate;
  return sum;
}

// Several routes over the same two rails are one.
void take_rails(const proto::BenchReading& from, PairReading& reading) {
  for (const auto& path : from.paths()) {
    if (path.rail().empty()) continue;
    const auto same = std::ranges::find_if(reading.rails, [&](const auto& rail) {
      return rail.reader_rail == path.rail() && rail.source_rail == path.source_rail();
    });
    auto& rail = same != reading.rails.end() ? *same : reading.rails.emplace_back();
    rail.reader_rail = path.rail();
    rail.source_rail = path.source_rail();
    rail.bytes_per_second += rate_of(path.bytes(), from.elapsed_us());
    rail.broken = rail.broken || path.broken();
  }
}

void take_reading(const proto::BenchReading& from, PairReading& reading) {
  reading.transport = from.transport();
  reading.bytes_per_second = rate_of(from.bytes(), from.elapsed_us());
  reading.link_bytes_per_second = link_of(from);
  reading.cap_bytes_per_second = static_cast<double>(from.max_bytes_per_second());
  reading.notes.assign(from.notes().begin(), from.notes().end());
  take_rails(from, reading);
  if (from.has_why()) {
    reading.error = fmt::format("the read broke off: {}", from.why().message());
  }
}

std::vector<FleetHost::Rail> rails_of(const proto::BenchReading& reading) {
  std::vector<FleetHost::Rail> rails;
  for (const auto& rail : reading.rails()) {
    rails.push_back(
        {rail.name(), rail.why_down(), static_cast<double>(rail.link_bytes_per_second())});
  }
  return rails;
}

// The calls to the agents, all on one thread. SIGINT and SIGTERM close the connections, and with
// its connection a read ends at its agent.
class FleetCalls {
 public:
  FleetCalls(rpc::Identity identity, std::vector<proto::NodeAddress> nodes)
      : identity_(std::move(identity)), signals_(io_, SIGINT, SIGTERM) {
    for (auto& node : nodes) members_.push_back({std::move(node), nullptr, ""});
    signals_.async_wait([this](const boost::system::error_code& error, int number) {
      if (error) return;
      interrupted_by_ = number;
      // The next signal ends the process as usual.
      signals_.clear();
      for (auto& member : members_) {
        if (member.client != nullptr) member.client->close();
      }
    });
  }

  std::size_t size() const { return members_.size(); }
  const proto::NodeAddress& node(std::size_t index) const { return members_[index].node; }
  int interrupted_by() const { return interrupted_by_; }

  // Runs the calls at once, and returns when each has ended.
  void run(std::vector<async::Task<void>> calls) {
    bool done = false;
    std::exception_ptr failure;
    boost::asio::co_spawn(io_, async::run_all(std::move(calls)), [&](std::exception_ptr thrown) {
      failure = std::move(thrown);
      done = true;
    });
    io_.restart();
    while (!done && io_.run_one() > 0) {
    }
    if (failure) std::rethrow_exception(failure);
  }

  // Whether the agent takes part: it is new enough, and drills are allowed there.
  async::Task<void> ask(std::size_t index, std::string& why_not) {
    proto::DrillRequest request;
    request.set_dry_run(true);
    request.mutable_bench_read();
    auto asking = call(index, std::move(request), kAskDeadline);
    const auto answer = co_await std::move(asking);
    if (!answer) why_not = answer.error().message();
  }

  // `rails`: of the reader.
  async::Task<void> read(HostPair hosts, std::chrono::milliseconds time, std::string transport,
                         PairReading& reading, std::vector<FleetHost::Rail>& rails) {
    reading.hosts = hosts;
    if (!members_[hosts.source].lost.empty()) {
      reading.error = members_[hosts.source].lost;
      co_return;
    }
    proto::DrillRequest request;
    auto& read = *request.mutable_bench_read();
    *read.mutable_source() = members_[hosts.source].node;
    read.set_milliseconds(static_cast<std::uint32_t>(time.count()));
    read.set_transport(std::move(transport));
    auto asking = call(hosts.reader, std::move(request), time + kAroundRead);
    const auto answer = co_await std::move(asking);
    if (!answer) {
      reading.error = answer.error().message();
      co_return;
    }
    take_reading(answer->bench_reading(), reading);
    rails = rails_of(answer->bench_reading());
  }

 private:
  struct Member {
    proto::NodeAddress node;
    std::shared_ptr<rpc::RpcClient> client;
    // Why no connection to it can be made any more.
    std::string lost;
  };

  async::Task<Result<proto::DrillResponse>> call(std::size_t index, proto::DrillRequest request,
                                                 std::chrono::milliseconds deadline) {
    Member& member = members_[index];
    if (interrupted_by_ != 0) co_return fail(ErrorCode::kUnavailable, "interrupted");
    if (!member.lost.empty()) co_return fail(ErrorCode::kPeerLost, "{}", member.lost);
    if (member.client == nullptr || !member.client->connected()) {
      auto connecting =
          rpc::RpcClient::connect(member.node.control_endpoint(), identity_, kAgentDialDeadline);
      auto client = co_await std::move(connecting);
      if (!client) {
        member.lost =
            fmt::format("the agent of {} at {} does not answer: {}", member.node.node_id(),
                        member.node.control_endpoint(), client.error().message());
        co_return fail(ErrorCode::kPeerLost, "{}", member.lost);
      }
      member.client = std::move(*client);
    }
    const auto client = member.client;
    if (interrupted_by_ != 0) co_return fail(ErrorCode::kUnavailable, "interrupted");
    auto calling = rpc::call<proto::DRILL>(client, std::move(request), deadline);
    co_return co_await std::move(calling);
  }

  boost::asio::io_context io_;
  const rpc::Identity identity_;
  boost::asio::signal_set signals_;
  std::vector<Member> members_;
  int interrupted_by_ = 0;
};

struct FleetFigures {
  std::vector<FleetHost> hosts;
  std::vector<PairReading> readings;
  // Agents that were not asked for reads, with the reason.
  std::vector<std::string> left_out;
  std::size_t pairs = 0;
  double took_s = 0;
};

Json to_json(const FleetFigures& figures, const FleetVerdict& verdict) {
  Json hosts = Json::array();
  for (const auto& host : figures.hosts) {
    Json rails = Json::array();
    for (const auto& rail : host.rails) {
      rails.push_back({{"rail", rail.name},
                       {"down", rail.why_down},
                       {"link_bytes_per_second", rail.link_bytes_per_second}});
    }
    hosts.push_back({{"host", host.name}, {"rails", rails}});
  }
  Json pairs = Json::array();
  for (const auto& reading : figures.readings) {
    Json rails = Json::array();
    for (const auto& rail : reading.rails) {
      rails.push_back({{"reader_rail", rail.reader_rail},
                       {"source_rail", rail.source_rail},
                       {"bytes_per_second", rail.bytes_per_second},
                       {"broken", rail.broken}});
    }
    pairs.push_back({{"reader", figures.hosts[reading.hosts.reader].name},
                     {"source", figures.hosts[reading.hosts.source].name},
                     {"error", reading.error},
                     {"transport", reading.transport},
                     {"bytes_per_second", reading.bytes_per_second},
                     {"link_bytes_per_second", reading.link_bytes_per_second},
                     {"max_bytes_per_second", reading.cap_bytes_per_second},
                     {"slow", std::ranges::find(verdict.slow, reading.hosts) != verdict.slow.end()},
                     {"rails", rails}});
  }
  return {{"bench", "fleet"},
          {"hosts", hosts},
          {"pairs", pairs},
          {"median_bytes_per_second", verdict.median},
          {"usual_bytes_per_second", verdict.usual},
          {"slow_or_broken", verdict.findings},
          {"not_read", verdict.unread},
          {"notes", verdict.remarks},
          {"took_s", figures.took_s}};
}

class FleetBenchmark {
 public:
  static Result<FleetBenchmark> create(const Settings& settings, const FleetArgs& args) {
    if (settings.coordinator.empty()) {
      return fail(ErrorCode::kInvalid, "give the fleet's --coordinator HOST:PORT");
    }
    FleetBenchmark bench(settings, args);
    TRY(bench.time_, parse_duration("--time", args.time));
    if (bench.time_ < kShortestRead || bench.time_ > kLongestRead) {
      return fail(ErrorCode::kInvalid, "--time: '{}' is not from 100ms to 30s", args.time);
    }
    return bench;
  }

  Result<int> run(int& interrupted_by) {
    TRY(auto nodes, find_nodes());
    TRY(auto identity, command_identity(settings_));
    std::vector<proto::NodeAddress> taking_part;
    {
      // It takes signals only while it asks.
      FleetCalls asking(identity, std::move(nodes));
      taking_part = ask_all(asking);
      interrupted_by = asking.interrupted_by();
    }
    if (interrupted_by != 0) return kExitSignal + interrupted_by;
    if (taking_part.size() < 2) {
      return fail(
          ErrorCode::kUnavailable, "a read takes two agents with --allow-drills, found {}: {}",
          taking_part.size(),
          figures_.left_out.empty() ? "the fleet has no others" : figures_.left_out.front());
    }
    for (const auto& node : taking_part) figures_.hosts.push_back({node.node_id(), {}});
    const auto rounds = all_to_all(taking_part.size(), args_.parallel);
    say_plan(rounds);
    if (args_.dry_run) return kExitOk;
    FleetCalls calls(std::move(identity), std::move(taking_part));
    read_all(calls, rounds);
    interrupted_by = calls.interrupted_by();
    const int code = report();
    return interrupted_by != 0 ? kExitSignal + interrupted_by : code;
  }

 private:
  FleetBenchmark(const Settings& settings, const FleetArgs& args)
      : settings_(settings), args_(args) {}

  Result<std::vector<proto::NodeAddress>> find_nodes() {
    TRY(const auto coordinator, Remote::create(settings_, settings_.coordinator));
    TRY(const auto status, coordinator->call<proto::COORDINATOR_STATUS>({}));
    const std::string busy = what_runs(status);
    if (!busy.empty() && !args_.force) {
      return fail(ErrorCode::kUnavailable,
                  "{}; the benchmark would slow it down: wait, or give --force", busy);
    }
    std::vector<proto::NodeAddress> nodes;
    for (const std::string& name : args_.nodes) {
      const bool known = std::ranges::any_of(
          status.nodes(), [&](const auto& node) { return node.node().node_id() == name; });
      if (!known) return fail(ErrorCode::kNotFound, "--nodes: the fleet has no agent {}", name);
    }
    for (const auto& node : status.nodes()) {
      const std::string& name = node.node().node_id();
      const bool wanted =
          args_.nodes.empty() || std::ranges::find(args_.nodes, name) != args_.nodes.end();
      if (!wanted) continue;
      if (node.state() == "dead") {
        figures_.left_out.push_back(fmt::format("{} takes no part: it is dead", name));
      } else {
        nodes.push_back(node.node());
      }
    }
    std::ranges::sort(nodes, {}, &proto::NodeAddress::node_id);
    return nodes;
  }

  std::vector<proto::NodeAddress> ask_all(FleetCalls& calls) {
    std::vector<std::string> why_not(calls.size());
    std::vector<async::Task<void>> asks;
    for (std::size_t i = 0; i < calls.size(); ++i) asks.push_back(calls.ask(i, why_not[i]));
    calls.run(std::move(asks));
    std::vector<proto::NodeAddress> taking_part;
    for (std::size_t i = 0; i < calls.size(); ++i) {
      if (why_not[i].empty()) {
        taking_part.push_back(calls.node(i));
      } else {
        figures_.left_out.push_back(
            fmt::format("{} takes no part: {}", calls.node(i).node_id(), why_not[i]));
      }
    }
    return taking_part;
  }

  void say_plan(const std::vector<std::vector<HostPair>>& rounds) {
    for (const auto& round : rounds) figures_.pairs += round.size();
    const double seconds = std::chrono::duration<double>(time_).count();
    const std::string how =
        args_.parallel == 1 ? "one at a time" : fmt::format("at most {} at once", args_.parallel);
    const std::string plan = fmt::format(
        "{} pairs of {} hosts, {}, {} each: about {:.0f} s. Each pair loads its links fully.",
        figures_.pairs, figures_.hosts.size(), how, args_.time,
        std::ceil(static_cast<double>(rounds.size()) * (seconds + kUsualAroundSeconds)));
    if (args_.dry_run) {
      std::string text;
      for (const auto& line : figures_.left_out) text += "not read: " + printable(line) + "\n";
      print_result(settings_.json,
                   {{"bench", "fleet"}, {"would", plan}, {"not_read", figures_.left_out}},
                   text + plan + "\n");
    } else if (!settings_.quiet) {
      fmt::print(stderr, "{}\n", plan);
    }
  }

  void read_all(FleetCalls& calls, const std::vector<std::vector<HostPair>>& rounds) {
    const TimePoint began = steady_now();
    for (const auto& round : rounds) {
      std::vector<PairReading> readings(round.size());
      std::vector<std::vector<FleetHost::Rail>> rails(round.size());
      std::vector<async::Task<void>> reads;
      for (std::size_t i = 0; i < round.size(); ++i) {
        reads.push_back(calls.read(round[i], time_, args_.transport, readings[i], rails[i]));
      }
      calls.run(std::move(reads));
      for (std::size_t i = 0; i < round.size(); ++i) {
        // An interrupt ends the reads that run, and no other.
        if (calls.interrupted_by() != 0 && !readings[i].error.empty()) continue;
        if (!rails[i].empty()) figures_.hosts[round[i].reader].rails = std::move(rails[i]);
        figures_.readings.push_back(std::move(readings[i]));
      }
      if (calls.interrupted_by() != 0) break;
    }
    figures_.took_s = std::chrono::duration<double>(steady_now() - began).count();
  }

  int report() const {
    FleetVerdict verdict = judge_fleet(figures_.hosts, figures_.readings, args_.under);
    verdict.unread.insert(verdict.unread.begin(), figures_.left_out.begin(),
                          figures_.left_out.end());
    if (figures_.readings.size() < figures_.pairs) {
      verdict.unread.push_back(fmt::format("{} of {} pairs, because the command was interrupted",
                                           figures_.pairs - figures_.readings.size(),
                                           figures_.pairs));
    }
    print_result(settings_.json, to_json(figures_, verdict),
                 fleet_report(figures_.hosts, figures_.readings, verdict));
    if (!verdict.findings.empty()) return kExitFailed;
    return verdict.unread.empty() ? kExitOk : kExitUnavailable;
  }

  const Settings settings_;
  const FleetArgs args_;
  std::chrono::milliseconds time_{};
  FleetFigures figures_;
};

}  // namespace

void add_bench_fleet(Command& bench, Session& session) {
  Command sub = bench.command(
      "fleet",
      "The links of a live fleet: each host reads from each other one, through the transfer "
      "engine.\n"
      "Names the slow pairs, and by elimination the slow host or rail. Only agents with\n"
      "--allow-drills take part. Exit code 1: something is slow or broken; 5: not all was read.");
  auto args = std::make_shared<FleetArgs>();
  sub.option("--time", args->time, "For each pair, 100ms to 30s [2s]").type_name("TIME");
  sub.option(
         "--parallel", args->parallel,
         "Pairs at once, at most. A host reads from one other at a time, and is read by one [1]")
      .between(std::uint32_t{1}, std::uint32_t{10'000})
      .type_name("N");
  sub.option("--under", args->under,
             "A pair or rail is slow under this fraction of the usual speed [0.5]")
      .between(0.01, 0.99)
      .type_name("FRACTION");
  sub.option("--nodes", args->nodes, "Only these agents, by their --node-id, with commas [all]")
      .delimiter(',')
      .type_name("LIST");
  sub.option("--transport", args->transport, "tcp or verbs [the best one that works]")
      .one_of({"tcp", "verbs"})
      .type_name("NAME");
  sub.flag("--force", args->force, "Also while pulls or updates run, which it slows down");
  sub.flag("-n,--dry-run", args->dry_run, "Say who takes part and how long it takes; read nothing");
  sub.runs(session, "bench", [&session, args]() -> Result<int> {
    TRY(auto benchmark, FleetBenchmark::create(session.settings, *args));
    return benchmark.run(session.interrupted_by);
  });
}

}  // namespace rekindle::cli
