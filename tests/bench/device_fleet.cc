#include "tests/bench/device_fleet.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

namespace rekindle::bench {

void give_up(const std::string& why) {
  fmt::print(stderr, "bench: {}\n", why);
  std::exit(1);
}

std::uint64_t make_model(const std::filesystem::path& directory, std::uint64_t bytes,
                         std::uint64_t count) {
  std::filesystem::create_directories(directory);
  const std::uint64_t each = bytes / count / 8192 * 8192;
  const std::uint64_t per_file = std::max<std::uint64_t>(1, (4ull << 30) / each);
  std::vector<std::uint64_t> words(each / 8);
  for (std::uint64_t first = 0; first < count; first += per_file) {
    const std::uint64_t end = std::min(count, first + per_file);
    Json header = Json::object();
    for (std::uint64_t i = first; i < end; ++i) {
      header[fmt::format("layer.{:06}", i)] = {
          {"dtype", "BF16"},
          {"shape", {each / 8192, 4096}},
          {"data_offsets", {(i - first) * each, (i - first + 1) * each}}};
    }
    std::string text = header.dump();
    text.resize((text.size() + 8 + 255) / 256 * 256 - 8, ' ');  // so that tensors begin at 256
    const auto path = directory / fmt::format("model-{:05}.safetensors", first / per_file);
    const UniqueFd fd(::open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    const std::uint64_t size = text.size();
    const auto put = [&](const void* data, std::size_t length) {
      const auto* at = static_cast<const char*>(data);
      while (length > 0) {
        const ssize_t written = ::write(fd.get(), at, length);
        if (written <= 0) give_up("write the model: is there room in /dev/shm?");
        at += written;
        length -= static_cast<std::size_t>(written);
      }
    };
    put(&size, sizeof size);
    put(text.data(), text.size());
    for (std::uint64_t i = first; i < end; ++i) {
      for (std::uint64_t j = 0; j < words.size(); ++j) words[j] = i << 40 | j;
      put(words.data(), each);
    }
  }
  return each * count;
}

std::unique_ptr<testing::Process> start_coordinator(const std::string& rekindle,
                                                    const std::string& state,
                                                    std::string& address) {
  auto coordinator = std::make_unique<testing::Process>(testing::Spawn{
      .argv = {rekindle, "coordinator", "--listen", "127.0.0.1:0", "--state", state}});
  address = coordinator->value_after("coordinator listening on ");
  if (address.empty()) give_up("no coordinator: " + coordinator->err());
  return coordinator;
}

std::unique_ptr<testing::Process> start_agent(const std::string& rekindle, const std::string& store,
                                              const std::vector<std::string>& arguments,
                                              const std::vector<std::string>& as) {
  testing::Spawn spawn{.argv = as};
  spawn.argv.insert(spawn.argv.end(),
                    {rekindle, "agent", "--listen", "127.0.0.1:0", "--store", store});
  spawn.argv.insert(spawn.argv.end(), arguments.begin(), arguments.end());
  auto agent = std::make_unique<testing::Process>(std::move(spawn));
  if (!agent->wait_for_out("listening")) give_up("no agent: " + agent->err());
  return agent;
}

void wait_until_pinned(const std::string& rekindle, const std::string& store, std::uint64_t bytes) {
  const bool done = testing::eventually(
      [&] {
        const auto status = testing::run({rekindle, "status", "--json", "--store", store});
        const auto said = Json::parse(status.out, nullptr, false);
        return !said.is_discarded() && said.contains("devices") &&
               said["devices"].value("pinned_bytes", std::uint64_t{0}) >= bytes;
      },
      kLong);
  if (!done) give_up("the device process did not pin the model");
}

DeviceWorker::DeviceWorker(const std::string& program, const std::string& store,
                           const std::string& device, const std::string& group) {
  int in[2];
  int out[2];
  if (::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0) give_up("no pipes");
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(in[0], 0);
    ::dup2(out[1], 1);
    ::setenv("REKINDLE_STORE", store.c_str(), 1);
    ::setenv("REKINDLE_MODEL", "m@1", 1);
    ::setenv("REKINDLE_DEVICE", device.c_str(), 1);
    ::setenv("REKINDLE_GROUP", group.c_str(), 1);
    const std::string instance = fmt::format("{}-{}", group, device.substr(device.find(':') + 1));
    ::setenv("REKINDLE_INSTANCE", instance.c_str(), 1);
    ::execl(program.c_str(), program.c_str(), nullptr);
    ::_exit(127);
  }
  ::close(in[0]);
  ::close(out[1]);
  in_ = UniqueFd(in[1]);
  out_.reset(::fdopen(out[0], "r"));
}

void DeviceWorker::kill() { ::kill(pid_, SIGKILL); }

DeviceWorker::~DeviceWorker() {
  in_ = UniqueFd();
  ::waitpid(pid_, nullptr, 0);
}

void DeviceWorker::say(const std::string& word) {
  const std::string line = word + "\n";
  if (::write(in_.get(), line.data(), line.size()) < 0) give_up("a worker is gone");
}

Json DeviceWorker::answer() {
  char line[4096];
  if (std::fgets(line, sizeof line, out_.get()) == nullptr) give_up("a worker has ended");
  return Json::parse(line);
}

double slowest(DeviceWorkers& workers, const std::string& word, Json* last) {
  for (const auto& worker : workers) worker->say(word);
  double seconds = 0;
  for (const auto& worker : workers) {
    const Json said = worker->answer();
    seconds = std::max(seconds, said["seconds"].get<double>());
    if (last != nullptr) *last = said;
  }
  return seconds;
}

Json update_to(const std::string& rekindle, const std::string& coordinator, int version,
               const std::string& group, DeviceWorkers& workers) {
  for (const auto& worker : workers) worker->say("update");
  const auto update = testing::run({rekindle, "update", fmt::format("m@{}", version), "--group",
                                    group, "--json", "--coordinator", coordinator},
                                   kLong);
  const Json said = Json::parse(update.out, nullptr, false);
  if (update.exit.code != 0 || said.is_discarded()) give_up("update: " + update.out + update.err);
  for (const auto& worker : workers) (void)worker->answer();
  return said;
}

std::uint64_t wrong_words(DeviceWorkers& workers) {
  std::uint64_t wrong = 0;
  for (const auto& worker : workers) worker->say("check");
  for (const auto& worker : workers) wrong += worker->answer()["wrong"].get<std::uint64_t>();
  return wrong;
}

DeviceBenchOptions options_of(int argc, char** argv, DeviceBenchOptions options) {
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    if (i + 1 == argc) give_up(fmt::format("{}: no such option, or no value", name));
    const std::string value = argv[i + 1];
    if (name == "--gib") {
      options.gib = std::atof(value.c_str());
    } else if (name == "--tensors") {
      options.tensors = static_cast<std::uint64_t>(std::atoll(value.c_str()));
    } else if (name == "--gpus") {
      options.gpus = static_cast<std::size_t>(std::atoi(value.c_str()));
    } else if (name == "--runs") {
      options.runs = static_cast<std::size_t>(std::atoi(value.c_str()));
    } else if (name == "--device") {
      options.kind = value;
    } else if (name == "--bucket") {
      options.bucket = value;
    } else {
      give_up(fmt::format("{}: no such option; see the head of its source", name));
    }
  }
  if (options.gib <= 0 || options.tensors == 0 || options.gpus == 0 || options.runs == 0) {
    give_up("--gib, --tensors, --gpus and --runs are above 0");
  }
  return options;
}

}  // namespace rekindle::bench
