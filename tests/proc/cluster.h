#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "src/tensor/tensor_set.h"
#include "tests/support/process.h"

// The real `rekindle` command: one call, or daemons on loopback ports.
namespace rekindle::testing {

using Json = nlohmann::json;

std::string rekindle_binary();
Spawn rekindle_spawn(std::vector<std::string> arguments);
Finished rekindle(std::vector<std::string> arguments, milliseconds deadline = kPatience);
// Parses stdout; a null value when it is no JSON.
Json json_of(const Finished& finished);

// A daemon that has said where it listens; SIGTERM and wait at the end.
class Daemon {
 public:
  // Throws when it does not come up.
  Daemon(std::string role, std::vector<std::string> arguments);
  const std::string& address() const { return address_; }
  Process& process() { return *process_; }
  // SIGTERM; its exit code, -1 when it did not end in time.
  int stop();

 private:
  std::unique_ptr<Process> process_;
  std::string address_;
};

std::unique_ptr<Daemon> start_coordinator(const std::filesystem::path& state,
                                          std::vector<std::string> more = {});
std::unique_ptr<Daemon> start_agent(const std::string& node, const std::filesystem::path& store,
                                    const std::string& coordinator,
                                    std::vector<std::string> more = {});

// Bytes that differ by `seed` and position.
std::string pattern_bytes(std::uint64_t size, std::uint64_t seed);
// A valid file of these tensors in this order; contents are pattern_bytes of `seed` and the name.
void write_safetensors(const std::filesystem::path& file, const std::vector<TensorInfo>& tensors,
                       std::uint64_t seed);

}  // namespace rekindle::testing
