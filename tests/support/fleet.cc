#include "tests/support/fleet.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <random>
#include <stdexcept>

#include "src/tensor/safetensors.h"
#include "src/tensor/tensor_set.h"

namespace rekindle::testing {

namespace fs = std::filesystem;

namespace {

const std::string& binary() {
  static const std::string path = program(REKINDLE_BINARY);
  return path;
}

std::map<std::string, std::string> read_tensors(const fs::path& dir) {
  std::map<std::string, std::string> tensors;
  const auto files = safetensors::find_checkpoint(dir);
  if (!files) throw std::runtime_error(files.error().message());
  for (const auto& path : files->weights) {
    const auto header = safetensors::read_header(path);
    if (!header) throw std::runtime_error(header.error().message());
    const std::string bytes = read_file(path);
    for (const auto& entry : header->entries) {
      tensors[entry.info.name] = bytes.substr(entry.offset_bytes, entry.info.size_bytes());
    }
  }
  return tensors;
}

}  // namespace

std::size_t AgentProcess::sessions_opened() const {
  constexpr std::string_view kOpened = "session.open";
  const std::string log = process->err();
  std::size_t count = 0;
  for (auto at = log.find(kOpened); at != std::string::npos; at = log.find(kOpened, at + 1)) {
    ++count;
  }
  return count;
}

namespace {

// The networks of tests are trusted; on loopback nothing has to be said.
void trust_network(const std::string& listen, Spawn& spawn) {
  if (!listen.starts_with("127.") && !listen.starts_with("[::1]")) {
    spawn.argv.emplace_back("--insecure");
  }
}

}  // namespace

Fleet::Fleet() = default;

void Fleet::start_coordinator(const std::string& host, std::vector<std::string> more,
                              std::vector<std::string> under) {
  const std::string listen = coordinator_address_.empty() ? host + ":0" : coordinator_address_;
  Spawn spawn;
  spawn.argv = std::move(under);
  spawn.argv.insert(spawn.argv.end(), {binary(), "coordinator", "--listen", listen, "--state",
                                       dir("state").string()});
  trust_network(listen, spawn);
  spawn.argv.insert(spawn.argv.end(), more.begin(), more.end());
  coordinator_ = std::make_unique<Process>(std::move(spawn));
  coordinator_address_ = coordinator_->value_after("coordinator listening on ");
  if (coordinator_address_.empty()) {
    throw std::runtime_error("the coordinator did not start: " + coordinator_->err());
  }
}

AgentProcess& Fleet::start_agent(const std::string& name, std::vector<std::string> more,
                                 const std::string& listen, std::vector<std::string> under) {
  std::erase_if(agents_, [&](const auto& known) { return known->name == name; });
  auto agent = std::make_unique<AgentProcess>();
  agent->name = name;
  agent->store = dir("store-" + name);
  Spawn spawn;
  spawn.argv = std::move(under);
  spawn.argv.insert(spawn.argv.end(), {binary(), "agent", "--node-id", name, "--listen", listen,
                                       "--store", agent->store.string()});
  trust_network(listen, spawn);
  const bool elsewhere = std::find(more.begin(), more.end(), "--coordinator") != more.end();
  if (coordinator_ != nullptr && !elsewhere) {
    spawn.argv.insert(spawn.argv.end(), {"--coordinator", coordinator_address_});
  }
  spawn.argv.insert(spawn.argv.end(), more.begin(), more.end());
  agent->process = std::make_unique<Process>(std::move(spawn));
  agent->control = agent->process->value_after("agent listening on ");
  agent->data = agent->process->value_after("agent serving data on ");
  if (agent->control.empty() || agent->data.empty()) {
    throw std::runtime_error("agent " + name + " did not start: " + agent->process->err());
  }
  if (coordinator_ != nullptr && !agent->process->wait_for_err("coordinator.connected")) {
    throw std::runtime_error("agent " + name + " did not register: " + agent->process->err());
  }
  agents_.push_back(std::move(agent));
  return *agents_.back();
}

AgentProcess& Fleet::agent(const std::string& name) {
  for (auto& agent : agents_) {
    if (agent->name == name) return *agent;
  }
  throw std::runtime_error("no agent " + name);
}

Spawn Fleet::command(std::vector<std::string> arguments) const {
  Spawn spawn;
  spawn.argv = {binary()};
  spawn.argv.insert(spawn.argv.end(), arguments.begin(), arguments.end());
  spawn.argv.push_back("--json");
  if (!coordinator_address_.empty()) {
    spawn.argv.insert(spawn.argv.end(), {"--coordinator", coordinator_address_});
  }
  return spawn;
}

Fleet::Answer Fleet::answer_of(const Finished& finished) {
  Answer answer;
  answer.exit_code = finished.timed_out ? -2 : finished.exit.code;
  answer.err = finished.err;
  answer.json = nlohmann::json::parse(finished.out, nullptr, false);
  return answer;
}

Fleet::Answer Fleet::run_command(std::vector<std::string> arguments) const {
  return answer_of(run(command(std::move(arguments)), milliseconds(60'000)));
}

void Fleet::publish(const std::string& name, const std::string& version, const fs::path& path) {
  const auto answer =
      run_command({"publish", version, path.string(), "--store", agent(name).store.string()});
  if (answer.exit_code != 0) throw std::runtime_error("publish failed: " + answer.err);
  if (coordinator_ == nullptr) return;
  const std::string model = version.substr(0, version.find('@'));
  const bool known = eventually([&] {
    const auto status = run_command({"status"});
    if (status.exit_code != 0 || !status.json.contains("nodes")) return false;
    for (const auto& node : status.json["nodes"]) {
      if (node.dump().find("\"" + name + "\"") != std::string::npos &&
          node.dump().find(model) != std::string::npos) {
        return true;
      }
    }
    return false;
  });
  if (!known)
    throw std::runtime_error("the coordinator did not hear of " + version + " on " + name);
}

std::uint64_t make_checkpoint(const fs::path& dir, int tensors, std::uint64_t rows,
                              std::uint64_t seed) {
  fs::create_directories(dir);
  std::vector<TensorInfo> infos;
  for (int i = 0; i < tensors; ++i) {
    infos.push_back({"model.layers." + std::to_string(i) + ".mlp.up_proj.weight", DType::kBF16,
                     Shape{rows, 1024}});
  }
  const auto header = safetensors::make_header(infos, {}, 4096);
  if (!header) throw std::runtime_error(header.error().message());
  std::ofstream file(dir / "model.safetensors", std::ios::binary);
  file << *header;
  std::mt19937_64 random(seed);
  std::uint64_t total = 0;
  std::vector<std::uint64_t> words;
  for (const auto& info : infos) {
    words.resize(info.size_bytes() / 8);
    for (auto& word : words) word = random();
    file.write(reinterpret_cast<const char*>(words.data()),
               static_cast<std::streamsize>(info.size_bytes()));
    total += info.size_bytes();
  }
  write_file(dir / "config.json", R"({"model_type": "test", "hidden_size": 1024})");
  return total;
}

fs::path find_file(const fs::path& below, const std::string& name) {
  for (const auto& item : fs::recursive_directory_iterator(below)) {
    if (item.path().filename() == name) return item.path();
  }
  throw std::runtime_error("no " + name + " below " + below.string());
}

std::string compare_checkpoints(const fs::path& a, const fs::path& b) {
  const auto left = read_tensors(a);
  auto right = read_tensors(b);
  // A store keeps the small files of a checkpoint beside its tensors.
  for (auto it = right.begin(); it != right.end();) {
    const auto& [name, bytes] = *it;
    if (!name.starts_with(kFileTensorPrefix)) {
      ++it;
      continue;
    }
    const std::string file = name.substr(kFileTensorPrefix.size());
    if (!fs::exists(a / file) || read_file(a / file) != bytes) return file + " differs";
    it = right.erase(it);
  }
  for (const auto& [name, bytes] : left) {
    const auto found = right.find(name);
    if (found == right.end()) return name + " is missing";
    if (found->second != bytes) return name + " differs";
  }
  return left.size() == right.size() ? "" : "there are more tensors than there should be";
}

}  // namespace rekindle::testing
