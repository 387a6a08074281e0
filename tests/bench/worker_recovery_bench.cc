// A worker of a host whose agent lives is killed again and again under `rekindle run`: how soon the
// agent knows, and how soon the next one may serve. The model is mapped, not copied.
//
//   worker_recovery_bench [--mib N] [--runs N]
//
// `detected` is from kill() to the agent's event; `attach to ready` from main() of the next worker
// to its commit, which is what Rekindle adds to the worker's own start; `back` is all of it.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "src/base/unique_fd.h"
#include "tests/support/process.h"

namespace {

using namespace rekindle;           // NOLINT(google-build-using-namespace)
using namespace rekindle::testing;  // NOLINT(google-build-using-namespace)
using Json = nlohmann::json;

const std::string kRekindle = REKINDLE_BINARY;
const std::string kWorker = RECOVERY_WORKER;
constexpr std::chrono::milliseconds kLong{300'000};

std::int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

[[noreturn]] void give_up(const std::string& why) {
  fmt::print(stderr, "worker_recovery_bench: {}\n", why);
  std::exit(1);
}

// One file of `mib` tensors of 1 MiB, all there (no holes).
void make_model(const std::filesystem::path& directory, std::size_t mib) {
  std::filesystem::create_directories(directory);
  Json header = Json::object();
  constexpr std::size_t kMib = 1 << 20;
  for (std::size_t i = 0; i < mib; ++i) {
    header[fmt::format("layer.{:05}", i)] = {
        {"dtype", "BF16"}, {"shape", {512, 1024}}, {"data_offsets", {i * kMib, (i + 1) * kMib}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const auto path = directory / "model.safetensors";
  const UniqueFd fd(::open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  const std::uint64_t size = text.size();
  const auto put = [&](const void* data, std::size_t bytes) {
    if (::write(fd.get(), data, bytes) != static_cast<ssize_t>(bytes)) give_up("write the model");
  };
  put(&size, sizeof size);
  put(text.data(), text.size());
  std::string block(kMib, 0);
  for (std::size_t i = 0; i < mib; ++i) {
    std::memset(block.data(), static_cast<int>(i * 7 + 1), block.size());
    put(block.data(), block.size());
  }
}

std::vector<Json> lines_of(const std::string& text) {
  std::vector<Json> lines;
  std::size_t begin = 0;
  for (std::size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    lines.push_back(Json::parse(text.substr(begin, end - begin)));
  }
  return lines;
}

void print(const char* what, std::vector<double> ms) {
  std::ranges::sort(ms);
  const auto at = [&](double part) {
    return ms[std::min(ms.size() - 1,
                       static_cast<std::size_t>(part * static_cast<double>(ms.size())))];
  };
  fmt::print("{:16} p50 {:8.2f} ms   p99 {:8.2f} ms   max {:8.2f} ms\n", what, at(0.5), at(0.99),
             ms.back());
}

Json next_ready(Process& supervisor, std::size_t number) {
  std::vector<Json> said;
  eventually(
      [&] {
        said = lines_of(supervisor.out());
        return said.size() > number || !supervisor.running();
      },
      kLong);
  if (said.size() <= number) give_up("the worker did not come back: " + supervisor.err());
  return said[number];
}

}  // namespace

int main(int argc, char** argv) {
  std::size_t mib = 8192;
  std::size_t runs = 50;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--mib") mib = static_cast<std::size_t>(std::atoll(argv[i + 1]));
    if (name == "--runs") runs = static_cast<std::size_t>(std::atoll(argv[i + 1]));
  }
  const TempDir directory(true);
  const std::string store = directory / "store";
  make_model(directory / "model", mib);
  Process agent({.argv = {kRekindle, "agent", "--listen", "127.0.0.1:0", "--store", store}});
  if (!agent.wait_for_out("listening")) give_up("no agent: " + agent.err());
  const auto published =
      run({kRekindle, "publish", "m@1", directory / "model", "--store", store, "--quiet"}, kLong);
  if (published.exit.code != 0) give_up("publish: " + published.err);
  Process supervisor(
      {.argv = {kRekindle, "run", "--model", "m", "--instance", "i", "--store", store,
                "--crash-loop", "0", "--healthy-after", "1ms", "--", kWorker}});
  std::vector<double> back, own;
  std::vector<std::int64_t> killed;
  Json worker = next_ready(supervisor, 0);
  for (std::size_t i = 1; i <= runs; ++i) {
    ::usleep(static_cast<useconds_t>(30'000 + 1000 * (i % 23)));  // at any phase of its looks
    killed.push_back(now_us());
    ::kill(worker["pid"].get<pid_t>(), SIGKILL);
    worker = next_ready(supervisor, i);
    own.push_back((worker["ready"].get<double>() - worker["began"].get<double>()) / 1e3);
    back.push_back((worker["ready"].get<double>() - static_cast<double>(killed.back())) / 1e3);
  }
  const auto events = run({kRekindle, "events", "--json", "--store", store});
  std::vector<double> detected;
  for (const auto& event : lines_of(events.out)) {
    // The log keeps the newest events: deaths are matched to the kill before them.
    if (event["event"] != "died" && event["event"] != "failed") continue;
    const auto at = event["unix_us"].get<std::int64_t>();
    const auto kill = std::ranges::upper_bound(killed, at);
    if (kill == killed.begin()) give_up("a death before it was killed");
    detected.push_back(static_cast<double>(at - *(kill - 1)) / 1e3);
  }
  if (detected.empty()) give_up("no death was seen: " + events.err);
  fmt::print("{} MiB mapped, {} workers killed (deaths in the log: {})\n", mib, runs,
             detected.size());
  print("detected", detected);
  print("attach to ready", own);
  print("back", back);
  return 0;
}
