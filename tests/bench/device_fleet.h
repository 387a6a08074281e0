#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

#include <nlohmann/json.hpp>

#include "src/base/median.h"
#include "src/base/unique_fd.h"
#include "tests/support/process.h"

// What the benchmarks of GPU workers have in common: a model, an agent, workers that are told what
// to do.
namespace rekindle::bench {

using rekindle::median;
using Json = nlohmann::json;

inline constexpr testing::milliseconds kLong{300'000};

[[noreturn]] void give_up(const std::string& why);

// Files of at most 4 GiB with `count` tensors; word j of tensor i is i << 40 | j. Returns the bytes
// of all tensors.
std::uint64_t make_model(const std::filesystem::path& directory, std::uint64_t bytes,
                         std::uint64_t count);

// `address`: where it listens.
std::unique_ptr<testing::Process> start_coordinator(const std::string& rekindle,
                                                    const std::string& state, std::string& address);
// `rekindle agent`, listening, with these arguments beside those that it needs; `as`: what runs it,
// testing::on_host() for example.
std::unique_ptr<testing::Process> start_agent(const std::string& rekindle, const std::string& store,
                                              const std::vector<std::string>& arguments,
                                              const std::vector<std::string>& as = {});
// Until the agent's device process has pinned so much.
void wait_until_pinned(const std::string& rekindle, const std::string& store, std::uint64_t bytes);

// A device_worker and both ends of what it says. `group`: of which it is a member; all members are
// instances of their own.
class DeviceWorker {
 public:
  DeviceWorker(const std::string& program, const std::string& store, const std::string& device,
               const std::string& group = {});
  ~DeviceWorker();
  DeviceWorker(const DeviceWorker&) = delete;
  DeviceWorker& operator=(const DeviceWorker&) = delete;
  void say(const std::string& word);
  Json answer();
  void kill();  // SIGKILL; nothing more can be asked
  Json ask(const std::string& word) {
    say(word);
    return answer();
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  pid_t pid_ = -1;
  UniqueFd in_;
  std::unique_ptr<std::FILE, Close> out_;
};

using DeviceWorkers = std::vector<std::unique_ptr<DeviceWorker>>;

// Says it to all at once: the "seconds" of the slowest are what counts. `last`: of the last one.
double slowest(DeviceWorkers& workers, const std::string& word, Json* last = nullptr);
// `rekindle update m@VERSION` of their group; all are ready. What the command says.
Json update_to(const std::string& rekindle, const std::string& coordinator, int version,
               const std::string& group, DeviceWorkers& workers);
// On all devices, where they differ from what make_model() wrote.
std::uint64_t wrong_words(DeviceWorkers& workers);

// --gib, --tensors, --gpus, --runs, --device cuda|double, --bucket MIB
struct DeviceBenchOptions {
  double gib = 32;
  std::uint64_t tensors = 512;
  std::size_t gpus = 1;
  std::size_t runs = 5;
  std::string kind = "cuda";
  std::string bucket;  // "": the agent's choice
};
DeviceBenchOptions options_of(int argc, char** argv, DeviceBenchOptions defaults);

}  // namespace rekindle::bench
