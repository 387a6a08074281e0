#include "tests/chaos/world.h"

#include <csignal>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "src/tensor/safetensors.h"
#include "tests/support/fleet.h"
#include "tests/support/worker_sum.h"

namespace rekindle::testing::chaos {

namespace fs = std::filesystem;

namespace {

const std::string kRekindle = REKINDLE_BINARY;
const std::string kWorker = WORKER_MAIN;

constexpr int kTensors = 16;  // of 2 MiB
constexpr std::uint64_t kRows = 1024;

std::string at(std::uint16_t port) { return "127.0.0.1:" + std::to_string(port); }

// What a worker will say of it; small files come as tensors, too.
std::string sum_of_checkpoint(const fs::path& directory) {
  const fs::path file = directory / "model.safetensors";
  const std::string config = read_file(directory / "config.json");
  const auto header = safetensors::read_header(file);
  if (!header) throw std::runtime_error(header.error().message());
  const std::string bytes = read_file(file);
  std::map<std::string, std::string_view> tensors = {{"__rekindle_file__/config.json", config}};
  for (const auto& entry : header->entries) {
    tensors[entry.info.name] =
        std::string_view(bytes).substr(entry.offset_bytes, entry.info.size_bytes());
  }
  return worker_sum(tensors);
}

}  // namespace

World::World(int hosts, fs::path keep) : keep_(std::move(keep)), coordinator_port_(free_port()) {
  for (int i = 0; i < hosts; ++i) {
    Host& host = hosts_.emplace_back();
    host.name = std::string(1, static_cast<char>('a' + i));
    host.store = tmp_ / ("store-" + host.name);
    host.machine = std::max(i, 1);
    host.control_port = free_port();
    host.data_port = free_port();
    host.to_coordinator = std::make_unique<FaultProxy>(coordinator_port_);
    host.data = std::make_unique<FaultProxy>(host.data_port);
  }
}

World::~World() = default;

void World::start_coordinator() {
  coordinator_ = std::make_unique<Process>(
      Spawn{.argv = {kRekindle, "coordinator", "--listen", at(coordinator_port_), "--state",
                     (tmp_ / "state").string()}});
  if (coordinator_->value_after("coordinator listening on ").empty()) {
    throw std::runtime_error("the coordinator did not start: " + coordinator_->err());
  }
}

void World::start_agent(Host& host) {
  Spawn spawn{.argv = on_host(tmp_.path(), host.machine)};
  spawn.argv.insert(
      spawn.argv.end(),
      {kRekindle, "agent", "--node-id", host.name, "--listen", at(host.control_port),
       "--data-listen", at(host.data_port), "--data-advertise", host.data->address(), "--store",
       host.store.string(), "--coordinator", host.to_coordinator->address(), "--max-rate", "40MB"});
  host.agent = std::make_unique<Process>(std::move(spawn));
  if (host.agent->value_after("agent serving data on ").empty()) {
    throw std::runtime_error("agent " + host.name + " did not start: " + host.agent->err());
  }
}

void World::start_worker(Host& host) {
  host.judged_bytes = 0;
  host.serving.clear();
  host.supervisor = std::make_unique<Process>(
      Spawn{.argv = {kRekindle, "run", "--model", "m", "--instance", "serves-" + host.name,
                     "--store", host.store.string(), "--backoff", "50ms", "--max-backoff", "1s",
                     "--crash-loop", "0", "--", kWorker, "follow"}});
}

pid_t World::worker_pid(Host& host) {
  if (host.supervisor == nullptr) return 0;
  const std::string task = std::to_string(host.supervisor->pid());
  std::ifstream children("/proc/" + task + "/task/" + task + "/children");
  pid_t pid = 0;
  children >> pid;
  return pid;
}

void World::bury(const std::string& name, std::unique_ptr<Process>& process) {
  process->signal(SIGCONT);
  process->kill();
  logs_[name] += process->err();
  process.reset();
}

void World::kill_coordinator() { bury("coordinator", coordinator_); }
void World::kill_agent(Host& host) { bury("agent-" + host.name, host.agent); }

void World::kill_worker(Host& host) {
  if (const pid_t pid = worker_pid(host); pid > 0) ::kill(pid, SIGKILL);
}

void World::lose_host(Host& host) {
  if (host.agent != nullptr) kill_agent(host);
  fs::remove_all(host.store);
}

fs::path World::checkpoint(std::uint64_t version) {
  const fs::path path = tmp_ / ("model-" + std::to_string(version));
  if (!fs::exists(path)) {
    make_checkpoint(path, kTensors, kRows, version);
    sums_["m@" + std::to_string(version)] = sum_of_checkpoint(path);
  }
  return path;
}

bool World::publish(std::uint64_t version, milliseconds patience) {
  const fs::path path = checkpoint(version);
  const auto done = run({kRekindle, "publish", "m@" + std::to_string(version), path.string(),
                         "--store", hosts_.front().store.string(), "--quiet"},
                        patience);
  logs_["publish"] += done.err;
  return !done.timed_out && done.exit.code == 0;
}

void World::judge_line(Host& host, const std::string& line) {
  std::istringstream words(line);
  std::string what, version, sum;
  words >> what >> version >> sum;
  if (what != "ready") {
    if (what == "attached" || what == "lost") host.serving.clear();
    return;
  }
  const auto known = sums_.find(version);
  if (known == sums_.end() || known->second != sum) {
    throw std::runtime_error("the worker of host " + host.name + " was handed wrong bytes as " +
                             version + ": " + sum + ", published was " +
                             (known == sums_.end() ? "nothing" : known->second));
  }
  host.serving = version;
}

void World::expect_running(const std::string& name, const std::unique_ptr<Process>& process) {
  if (process == nullptr || process->running()) return;
  const auto exit = process->wait();
  throw std::runtime_error(name + " ended by itself: exit code " + std::to_string(exit->code) +
                           ", signal " + std::to_string(exit->signal));
}

void World::judge() {
  expect_running("the coordinator", coordinator_);
  for (Host& host : hosts_) {
    expect_running("agent " + host.name, host.agent);
    expect_running("rekindle run of host " + host.name, host.supervisor);
    if (host.supervisor == nullptr) continue;
    const std::string said = host.supervisor->out();
    std::size_t end;
    while ((end = said.find('\n', host.judged_bytes)) != std::string::npos) {
      judge_line(host, said.substr(host.judged_bytes, end - host.judged_bytes));
      host.judged_bytes = end + 1;
    }
  }
}

void World::keep_logs() {
  if (keep_.empty()) return;
  fs::create_directories(keep_);
  const auto keep = [&](const std::string& name, const std::unique_ptr<Process>& process) {
    std::string text = logs_[name];
    if (process != nullptr) text += process->err();
    write_file(keep_ / (name + ".log"), text);
  };
  keep("coordinator", coordinator_);
  keep("publish", nullptr);
  for (const Host& host : hosts_) {
    keep("agent-" + host.name, host.agent);
    keep("run-" + host.name, host.supervisor);
    if (host.supervisor != nullptr) {
      write_file(keep_ / ("worker-" + host.name + ".out"), host.supervisor->out());
    }
  }
}

}  // namespace rekindle::testing::chaos
