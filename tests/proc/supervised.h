#pragma once

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "src/ipc/unix_socket.h"
#include "tests/proc/cluster.h"
#include "tests/support/process.h"

// Commands `rekindle run` without an agent.
namespace rekindle::testing {

// A store in which somebody listens as an agent does: without it no failure is a worker's own.
inline std::string store_with_listener() {
  static const TempDir directory;
  static const auto listener = [] {
    std::filesystem::create_directory(directory / "agent");
    std::filesystem::permissions(directory / "agent", std::filesystem::perms::owner_all);
    return ipc::listen_unix_socket((directory / "agent/worker.sock").string());
  }();
  EXPECT_TRUE(listener) << listener.error().message();
  return directory.path().string();
}

inline Spawn supervised_program(std::vector<std::string> options, std::vector<std::string> program,
                                const std::string& model = "m") {
  Spawn spawn;
  spawn.argv = {rekindle_binary(), "run", "--model", model};
  if (std::ranges::find(options, "--store") == options.end()) {
    spawn.argv.insert(spawn.argv.end(), {"--store", store_with_listener()});
  }
  spawn.argv.insert(spawn.argv.end(), options.begin(), options.end());
  spawn.argv.emplace_back("--");
  spawn.argv.insert(spawn.argv.end(), program.begin(), program.end());
  return spawn;
}

inline Spawn supervised(std::vector<std::string> options, const std::string& script,
                        const std::string& model = "m") {
  return supervised_program(std::move(options), {"/bin/sh", "-c", script}, model);
}

inline bool alive(pid_t pid) { return ::kill(pid, 0) == 0; }

}  // namespace rekindle::testing
