#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/fleet.h"

namespace rekindle::testing {

std::string worker_program();    // worker_main.cc
std::string rekindle_program();  // the command

// Agents and workers (worker_main.cc) that attach to them.
class WithWorkers : public ::testing::Test {
 protected:
  std::unique_ptr<Process> worker(const std::string& agent, std::vector<std::string> arguments = {},
                                  std::vector<std::pair<std::string, std::string>> env = {}) {
    Spawn spawn;
    spawn.argv = {worker_program()};
    spawn.argv.insert(spawn.argv.end(), arguments.begin(), arguments.end());
    spawn.env = std::move(env);
    spawn.env.emplace_back("REKINDLE_STORE", fleet_.agent(agent).store.string());
    return std::make_unique<Process>(std::move(spawn));
  }
  std::unique_ptr<Process> rank_on(const std::string& agent, int number, int world,
                                   std::vector<std::string> arguments = {}) {
    return worker(agent, std::move(arguments),
                  {{"REKINDLE_INSTANCE", "i"},
                   {"REKINDLE_RANK", std::to_string(number)},
                   {"REKINDLE_WORLD", std::to_string(world)}});
  }

  nlohmann::json status(const std::string& agent) {
    return fleet_.run_command({"status", "--agent", fleet_.agent(agent).control}).json;
  }
  // As that agent sees it; null when it does not know it.
  nlohmann::json instance_at(const std::string& agent, const std::string& name) {
    const auto all = status(agent);
    if (!all.is_object() || !all.contains("instances")) return {};
    for (const auto& one : all["instances"]) {
      if (one["instance"] == name) return one;
    }
    return {};
  }
  bool eventually_state(const std::string& agent, const std::string& state) {
    return eventually([&] {
      const auto now = instance_at(agent, "i");
      return now.is_object() && now["state"] == state;
    });
  }
  // What `rekindle events` says, one object a line.
  std::vector<nlohmann::json> events_of(const std::string& agent) {
    const auto done = run(
        {rekindle_program(), "events", "--json", "--store", fleet_.agent(agent).store.string()});
    EXPECT_EQ(done.exit.code, 0) << done.err;
    std::vector<nlohmann::json> events;
    std::size_t begin = 0;
    for (std::size_t end; (end = done.out.find('\n', begin)) != std::string::npos;
         begin = end + 1) {
      events.push_back(nlohmann::json::parse(done.out.substr(begin, end - begin)));
    }
    return events;
  }
  std::filesystem::path ready_file(const std::string& agent) {
    return fleet_.agent(agent).store / "agent/ready/i";
  }
  static std::string sum_of(Process& worker) { return worker.value_after("ready m@1 "); }

  Fleet fleet_;
};

}  // namespace rekindle::testing
