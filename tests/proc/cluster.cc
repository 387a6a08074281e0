#include "tests/proc/cluster.h"

#include <csignal>
#include <functional>
#include <stdexcept>

#include <fmt/format.h>

#include "src/tensor/safetensors.h"

namespace rekindle::testing {

std::string rekindle_binary() { return REKINDLE_BINARY; }

Spawn rekindle_spawn(std::vector<std::string> arguments) {
  Spawn spawn;
  spawn.argv = std::move(arguments);
  spawn.argv.insert(spawn.argv.begin(), rekindle_binary());
  return spawn;
}

Finished rekindle(std::vector<std::string> arguments, milliseconds deadline) {
  return run(rekindle_spawn(std::move(arguments)), deadline);
}

Json json_of(const Finished& finished) {
  return Json::parse(finished.out, nullptr, /*allow_exceptions=*/false);
}

Daemon::Daemon(std::string role, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), role);
  process_ = std::make_unique<Process>(rekindle_spawn(std::move(arguments)));
  address_ = process_->value_after(role + " listening on ");
  if (address_.empty()) {
    throw std::runtime_error(fmt::format("{} did not come up: {}", role, process_->err()));
  }
}

int Daemon::stop() {
  process_->signal(SIGTERM);
  const auto exit = process_->wait();
  return exit ? exit->code : -1;
}

std::unique_ptr<Daemon> start_coordinator(const std::filesystem::path& state,
                                          std::vector<std::string> more) {
  std::vector<std::string> arguments = {"--listen", "127.0.0.1:0", "--state", state};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return std::make_unique<Daemon>("coordinator", std::move(arguments));
}

std::unique_ptr<Daemon> start_agent(const std::string& node, const std::filesystem::path& store,
                                    const std::string& coordinator, std::vector<std::string> more) {
  std::vector<std::string> arguments = {"--listen", "127.0.0.1:0", "--node-id",
                                        node,       "--store",     store};
  if (!coordinator.empty()) {
    arguments.insert(arguments.end(), {"--coordinator", coordinator});
  }
  arguments.insert(arguments.end(), more.begin(), more.end());
  return std::make_unique<Daemon>("agent", std::move(arguments));
}

std::string pattern_bytes(std::uint64_t size, std::uint64_t seed) {
  std::string bytes(size, '\0');
  std::uint64_t state = seed;
  for (char& byte : bytes) {  // splitmix64, its high byte
    std::uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    byte = static_cast<char>(z >> 56);
  }
  return bytes;
}

void write_safetensors(const std::filesystem::path& file, const std::vector<TensorInfo>& tensors,
                       std::uint64_t seed) {
  auto header = safetensors::make_header(tensors, {{"format", "pt"}}, 8);
  if (!header) throw std::runtime_error(header.error().message());
  std::string bytes = *header;
  for (const TensorInfo& tensor : tensors) {
    bytes += pattern_bytes(tensor.size_bytes(), seed ^ std::hash<std::string>()(tensor.name));
  }
  write_file(file, bytes);
}

}  // namespace rekindle::testing
