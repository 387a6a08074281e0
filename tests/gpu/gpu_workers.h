#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/gpu/checkpoint.h"
#include "tests/gpu/gpu.h"
#include "tests/support/fleet.h"

namespace rekindle::testing {

// device_client.cc, one order after the other.
class DeviceClient {
 public:
  DeviceClient(const std::filesystem::path& fifo, const std::filesystem::path& store,
               std::vector<std::pair<std::string, std::string>> env);
  void tell(const std::string& order);
  // Of the oldest order that was told and not answered yet; {} when the worker has ended.
  nlohmann::json answer();
  nlohmann::json ask(const std::string& order) {
    tell(order);
    return answer();
  }
  Process& process() { return *process_; }

 private:
  UniqueFd orders_;
  std::unique_ptr<Process> process_;
  std::size_t answers_ = 0;
};

using Sums = std::map<std::string, std::string>;

class GpuWorkers : public ::testing::Test {
 protected:
  void SetUp() override;

  // Until its device process serves.
  AgentProcess& start_agent(const std::string& name = "a", std::vector<std::string> more = {});
  void publish(const std::string& version, const Checkpoint& checkpoint,
               const std::string& agent = "a");
  std::unique_ptr<DeviceClient> worker(const std::string& agent = "a",
                                       std::vector<std::pair<std::string, std::string>> env = {});

  nlohmann::json devices(const std::string& agent = "a");
  pid_t device_process(const std::string& agent = "a") {
    return devices(agent).value("pid", pid_t{0});
  }
  bool eventually_serving(int restarts, const std::string& agent = "a");
  bool eventually_no_sessions(const std::string& agent = "a");
  bool eventually_uses_at_most(std::uint64_t bytes);
  // Of the device, by others than the workers: after two have loaded at once and gone.
  std::uint64_t bytes_used_at_rest();

  // A worker that is at its second bucket of many.
  std::unique_ptr<DeviceClient> worker_in_the_middle();
  static Sums sums_of(DeviceClient& worker);
  // Attaches, takes all buckets, compares.
  static void expect_loads(DeviceClient& worker, const std::string& attach, const Sums& sums,
                           const std::string& path = "ipc");

  Fleet fleet_;

 private:
  int clients_ = 0;
};

inline bool is_ok(const nlohmann::json& answer) {
  return answer.is_object() && answer.value("code", "") == "OK";
}

}  // namespace rekindle::testing
