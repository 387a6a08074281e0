#include "tests/gpu/gpu_workers.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <stdexcept>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace rekindle::testing {

namespace {
constexpr milliseconds kOrderPatience{180'000};  // gigabytes, under a sanitizer

// Words before the commands of those that use a GPU, of tools/gpu-check --sanitizer.
std::string gpu_wrapper() {
  const char* const words = std::getenv("REKINDLE_TEST_GPU_WRAPPER");
  return words != nullptr ? words : "";
}
}  // namespace

DeviceClient::DeviceClient(const std::filesystem::path& fifo, const std::filesystem::path& store,
                           std::vector<std::pair<std::string, std::string>> env) {
  if (::mkfifo(fifo.c_str(), 0600) != 0) throw std::runtime_error("no " + fifo.string());
  orders_ = UniqueFd(::open(fifo.c_str(), O_RDWR | O_CLOEXEC));
  Spawn spawn;
  std::istringstream wrapper(gpu_wrapper());
  spawn.argv.assign(std::istream_iterator<std::string>(wrapper), {});
  spawn.argv.insert(spawn.argv.end(), {program(DEVICE_CLIENT), fifo.string()});
  spawn.env = std::move(env);
  spawn.env.emplace_back("REKINDLE_STORE", store.string());
  const auto names_device = [](const auto& entry) { return entry.first == "REKINDLE_DEVICE"; };
  if (std::ranges::none_of(spawn.env, names_device)) {
    spawn.env.emplace_back("REKINDLE_DEVICE", worker_device());
  }
  process_ = std::make_unique<Process>(std::move(spawn));
}

void DeviceClient::tell(const std::string& order) {
  const std::string line = order + "\n";
  if (::write(orders_.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    throw std::runtime_error("a worker takes no orders");
  }
}

nlohmann::json DeviceClient::answer() {
  const std::size_t before = answers_++;
  std::string said;
  const auto answered = [&] {
    const bool alive = process_->running();
    said = process_->out();
    return static_cast<std::size_t>(std::ranges::count(said, '\n')) > before || !alive;
  };
  if (!eventually(answered, kOrderPatience)) return {};
  std::size_t begin = 0;
  for (std::size_t i = 0; i < before && begin != std::string::npos; ++i) {
    begin = said.find('\n', begin) + 1;
  }
  const std::size_t end = said.find('\n', begin);
  if (end == std::string::npos) {
    ADD_FAILURE() << "the worker has ended: " << process_->err();
    return nlohmann::json::object();
  }
  return nlohmann::json::parse(said.substr(begin, end - begin));
}

void GpuWorkers::SetUp() {
  const std::string why = gpu_missing();
  if (why.empty()) return;
  if (std::getenv("REKINDLE_REQUIRE_GPU") != nullptr) FAIL() << why;
  GTEST_SKIP() << why;
}

AgentProcess& GpuWorkers::start_agent(const std::string& name, std::vector<std::string> more) {
  if (std::ranges::find(more, "--gpu") == more.end()) {
    more.insert(more.end(), {"--gpu", agent_gpu()});
  }
  if (!gpu_wrapper().empty()) more.insert(more.end(), {"--gpu-wrapper", gpu_wrapper()});
  const bool none = std::ranges::find(more, "none") != more.end();
  auto& agent = fleet_.start_agent(name, std::move(more));
  EXPECT_TRUE(none || eventually_serving(0, name)) << devices(name);
  return agent;
}

void GpuWorkers::publish(const std::string& version, const Checkpoint& checkpoint,
                         const std::string& agent) {
  checkpoint.write(fleet_.dir(version));
  fleet_.publish(agent, version, fleet_.dir(version));
  std::filesystem::remove_all(fleet_.dir(version));
}

std::unique_ptr<DeviceClient> GpuWorkers::worker(
    const std::string& agent, std::vector<std::pair<std::string, std::string>> env) {
  return std::make_unique<DeviceClient>(fleet_.dir("orders-" + std::to_string(++clients_)),
                                        fleet_.agent(agent).store, std::move(env));
}

nlohmann::json GpuWorkers::devices(const std::string& agent) {
  const auto answer = fleet_.run_command({"status", "--agent", fleet_.agent(agent).control});
  return answer.json.is_object() ? answer.json["devices"] : nlohmann::json::object();
}

bool GpuWorkers::eventually_serving(int restarts, const std::string& agent) {
  return eventually(
      [&] {
        const auto now = devices(agent);
        return now.value("state", "") == "serving" && now.value("restarts", -1) == restarts;
      },
      3 * kPatience);  // a driver that nobody keeps loaded
}

bool GpuWorkers::eventually_no_sessions(const std::string& agent) {
  return eventually([&] { return devices(agent).value("sessions", -1) == 0; });
}

bool GpuWorkers::eventually_uses_at_most(std::uint64_t bytes) {
  const pid_t pid = device_process();
  return eventually([&] { return device_bytes_used(pid) <= bytes; });
}

std::uint64_t GpuWorkers::bytes_used_at_rest() {
  {
    const auto first = worker_in_the_middle();
    const auto second = worker_in_the_middle();
    EXPECT_TRUE(is_ok(first->ask("take all")));
    EXPECT_TRUE(is_ok(second->ask("take all")));
  }
  EXPECT_TRUE(eventually_no_sessions()) << devices();
  std::uint64_t used = device_bytes_used(device_process());
  EXPECT_TRUE(eventually([&] {  // a dead process' memory comes back a while after it
    const auto before = std::exchange(used, device_bytes_used(device_process()));
    return before == used;
  }));
  return used;
}

std::unique_ptr<DeviceClient> GpuWorkers::worker_in_the_middle() {
  auto one = worker();
  EXPECT_EQ(one->ask("attach m@1 bucket=1048576").value("path", ""), "ipc");
  EXPECT_EQ(one->ask("take 2").value("more", false), true);
  return one;
}

Sums GpuWorkers::sums_of(DeviceClient& worker) {
  const auto answer = worker.ask("sums");
  return is_ok(answer) ? answer.value("sums", Sums{}) : Sums{};
}

void GpuWorkers::expect_loads(DeviceClient& worker, const std::string& attach, const Sums& sums,
                              const std::string& path) {
  const auto attached = worker.ask(attach);
  ASSERT_TRUE(is_ok(attached)) << attached;
  const auto taken = worker.ask("take all");
  ASSERT_TRUE(is_ok(taken)) << taken;
  EXPECT_EQ(taken.value("path", "").substr(0, path.size()), path) << taken;
  EXPECT_EQ(sums_of(worker), sums);
}

}  // namespace rekindle::testing
