#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/support/process.h"

// A coordinator and agents as real processes on loopback, each agent with a store of its own on
// tmpfs, and the commands that use them.
namespace rekindle::testing {

struct AgentProcess {
  std::string name;
  std::filesystem::path store;
  std::string control;  // "127.0.0.1:PORT"
  std::string data;
  std::unique_ptr<Process> process;
  std::size_t sessions_opened() const;  // by its log
};

class Fleet {
 public:
  Fleet();
  // A fresh process on the same state directory, and on the same port after the first time.
  // On `host`, an address of this machine. `under` as of start_agent().
  void start_coordinator(const std::string& host = "127.0.0.1", std::vector<std::string> more = {},
                         std::vector<std::string> under = {});
  Process& coordinator() { return *coordinator_; }
  const std::string& coordinator_address() const { return coordinator_address_; }

  // Waits until the coordinator counts it as alive (when there is one). `more` may have another way
  // to the coordinator (--coordinator). `listen` fixes the control
  // port; `under` is a command that runs its arguments (prlimit, ip netns exec, …).
  AgentProcess& start_agent(const std::string& name, std::vector<std::string> more = {},
                            const std::string& listen = "127.0.0.1:0",
                            std::vector<std::string> under = {});
  // For `under`: the agent gets no read leases on the files of its copies, as on a file system that
  // has none.
  static std::vector<std::string> without_leases() {
    return {"env", "REKINDLE_FAILPOINTS=store.lease=error:EIO"};
  }
  AgentProcess& agent(const std::string& name);

  // rekindle COMMAND… with --json and this fleet's coordinator; not --store.
  Spawn command(std::vector<std::string> arguments) const;
  // Runs it to the end; `json` is the last line of stdout that parses.
  struct Answer {
    int exit_code = -1;
    nlohmann::json json;
    std::string err;
  };
  Answer run_command(std::vector<std::string> arguments) const;
  static Answer answer_of(const Finished& finished);
  // Publishes a copy of a checkpoint on an agent and waits until the coordinator knows of it.
  void publish(const std::string& agent, const std::string& version,
               const std::filesystem::path& path);

  std::filesystem::path dir(std::string_view name) const { return tmp_ / name; }

 private:
  TempDir tmp_{true};
  std::string coordinator_address_;
  std::unique_ptr<Process> coordinator_;
  std::vector<std::unique_ptr<AgentProcess>> agents_;
};

// Writes DIR/model.safetensors with `tensors` BF16 matrices of `rows` × 1024 (random bytes by
// `seed`) and a Llama-like config.json; returns the payload bytes.
std::uint64_t make_checkpoint(const std::filesystem::path& dir, int tensors, std::uint64_t rows,
                              std::uint64_t seed);

// The first file of that name below a directory; throws when there is none. A copy's weights are
// model.safetensors, with .partial while they are filled.
std::filesystem::path find_file(const std::filesystem::path& below, const std::string& name);

// Compares every tensor of two checkpoint directories byte for byte, and the small files where `b`
// is a copy in a store; "" or the first difference.
std::string compare_checkpoints(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace rekindle::testing
