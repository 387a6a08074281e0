#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/fault_proxy.h"
#include "tests/support/process.h"

// A fleet of real processes that things are done to: a coordinator, hosts with an agent and a
// supervised worker each. Every host has a boot id of its own, so that they reach each other as
// hosts do, but for the first two, which share one. What an agent says to the coordinator and what
// others read from it passes proxies.
namespace rekindle::testing::chaos {

struct Host {
  std::string name;
  std::filesystem::path store;
  int machine = 0;  // hosts with the same one share memory
  std::uint16_t control_port = 0;
  std::uint16_t data_port = 0;
  std::unique_ptr<FaultProxy> to_coordinator;
  std::unique_ptr<FaultProxy> data;
  std::unique_ptr<Process> agent;       // nullptr while it is dead
  std::unique_ptr<Process> supervisor;  // rekindle run; the worker is its child

  std::size_t judged_bytes = 0;  // of what its workers have said
  std::string serving;           // "m@3" while the worker is ready with it
};

class World {
 public:
  World(int hosts, std::filesystem::path keep);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::vector<Host>& hosts() { return hosts_; }
  bool coordinator_runs() const { return coordinator_ != nullptr; }
  Process& coordinator() { return *coordinator_; }

  void start_coordinator();
  void start_agent(Host& host);
  void start_worker(Host& host);
  // The process that serves, not its supervisor; 0 while there is none.
  static pid_t worker_pid(Host& host);

  void kill_coordinator();
  void kill_agent(Host& host);
  void kill_worker(Host& host);
  void lose_host(Host& host);  // its agent, and everything in its store

  // m@VERSION from the first host, with bytes of its own. False: not within `patience`.
  bool publish(std::uint64_t version, milliseconds patience);

  // Reads on in what the workers say. Throws when one was ready with bytes that were not published,
  // or when a process ended that nobody killed.
  void judge();

  const std::filesystem::path& directory() const { return tmp_.path(); }
  // What every process has said, into the directory given at the start.
  void keep_logs();

 private:
  void bury(const std::string& name, std::unique_ptr<Process>& process);
  void judge_line(Host& host, const std::string& line);
  void expect_running(const std::string& name, const std::unique_ptr<Process>& process);
  std::filesystem::path checkpoint(std::uint64_t version);

  TempDir tmp_{true};
  const std::filesystem::path keep_;
  const std::uint16_t coordinator_port_;
  std::unique_ptr<Process> coordinator_;
  std::vector<Host> hosts_;
  std::map<std::string, std::string> sums_;  // of m@VERSION, as a worker computes it
  std::map<std::string, std::string> logs_;  // of those that are dead
};

}  // namespace rekindle::testing::chaos
