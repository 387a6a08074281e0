// A worker as a user would write it: attaches as the environment says (rekindle run sets it), takes
// every byte in, and says on stdout what it has:
//   attached m@1 local        ready m@1 SUM        newer 2        lost PEER_LOST: …
// SUM is worker_sum() of all that it was handed. It then serves until it is told to end; with
// another word as argument it misbehaves: hang (does not load), wait FILE (loads once FILE is
// there), crash (abort once ready), once FILE (abort once ready when FILE is not there, and make
// it), leave (detach and stay), publish (makes m@7); or it leaves its bytes in DIR, a file each
// with % for / in its name, and ends: dump DIR; or it moves on to each newer version: follow, or
// follow DIR, which leaves the bytes of each in DIR/VERSION.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <thread>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <rekindle.h>

#include "tests/support/worker_sum.h"

namespace {

constexpr std::int64_t kPatience = 30'000;

std::string setting(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != 0 ? value : otherwise;
}

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

[[noreturn]] void lose(const rk_error& error) {
  say(std::string("lost ") + rk_code_name(error.code) + ": " + error.message);
  std::_Exit(3);
}

int publish(rk_agent* agent) {
  rk_error error;
  const std::uint64_t shape[] = {64, 1024};
  const rk_tensor_spec specs[] = {{"w", "BF16", 2, shape}, {"x", "F32", 2, shape}};
  rk_publication* publication = nullptr;
  if (rk_publish_begin(agent, "m@7", specs, 2, &publication, &error) != RK_OK) lose(error);
  for (std::size_t i = 0; i < 2; ++i) {
    void* data = nullptr;
    std::uint64_t bytes = 0;
    if (rk_publish_data(publication, i, &data, &bytes, &error) != RK_OK) lose(error);
    std::memset(data, static_cast<int>(17 + i), bytes);
  }
  if (rk_publish_commit(publication, kPatience, &error) != RK_OK) lose(error);
  say("published m@7");
  return 0;
}

void take_in(rk_session* session, std::map<std::string, std::string>& taken) {
  rk_error error;
  while (true) {
    const rk_tensor* tensors = nullptr;
    std::size_t count = 0;
    if (rk_next(session, kPatience, &tensors, &count, &error) != RK_OK) lose(error);
    if (count == 0) return;
    rk_session_info info{};
    info.size = sizeof info;
    if (rk_info(session, &info, &error) != RK_OK) lose(error);
    if (info.bytes_done < info.bytes_total) say("took a part");  // the rest has not come yet
    for (std::size_t i = 0; i < count; ++i) {
      if (tensors[i].bytes == 0) continue;
      taken[tensors[i].name].append(static_cast<const char*>(tensors[i].data), tensors[i].bytes);
    }
  }
}

// Until there is a newer version when it `follows`, else for ever.
void serve(rk_session* session, const rk_session_info& info, bool follows) {
  rk_error error;
  std::uint64_t told = info.version;
  while (true) {
    std::uint64_t version = 0;
    const int code = rk_wait_update(session, 200, &version, &error);
    if (code == RK_OK && version > told) say("newer " + std::to_string(told = version));
    if (told > info.version && follows) return;
    if (code == RK_OK) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    if (code != RK_OK && code != RK_TIMEOUT) lose(error);
  }
}

void dump(const std::map<std::string, std::string>& taken, const std::string& directory) {
  for (const auto& [name, bytes] : taken) {
    std::string file = name;
    std::replace(file.begin(), file.end(), '/', '%');
    std::ofstream(directory + "/" + file, std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
}

// Returns when it is to attach again, for a newer version.
void attach_and_serve(rk_agent* agent, const rk_attach_options& options, const std::string& mode,
                      const char* marker) {
  rk_error error;
  rk_session* session = nullptr;
  if (rk_attach(agent, &options, &session, &error) != RK_OK) lose(error);
  rk_session_info info{};
  info.size = sizeof info;
  if (rk_info(session, &info, &error) != RK_OK) lose(error);
  const std::string name = std::string(info.model) + "@" + std::to_string(info.version);
  say("attached " + name + " " + info.rung);

  std::map<std::string, std::string> taken;
  take_in(session, taken);
  say("took all");
  if (mode == "hang") std::this_thread::sleep_for(std::chrono::hours(1));
  while (mode == "wait" && ::access(marker, F_OK) != 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (rk_loaded(session, &error) != RK_OK) lose(error);
  std::int32_t code;
  do {  // a rank that failed comes back
    code = rk_wait_commit(session, kPatience, &error);
  } while (code == RK_UNAVAILABLE || code == RK_TIMEOUT);
  if (code != RK_OK) lose(error);
  if (mode == "dump") dump(taken, marker);
  if (mode == "follow" && *marker != 0) {
    const std::string directory = std::string(marker) + "/" + std::to_string(info.version);
    ::mkdir(directory.c_str(), 0700);
    dump(taken, directory);
  }
  say("ready " + name + " " + rekindle::testing::worker_sum(taken));

  if (mode == "dump") return rk_detach(session);
  if (mode == "crash") std::abort();
  if (mode == "once" && *marker != 0 && ::access(marker, F_OK) != 0) {
    ::close(::open(marker, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    std::abort();
  }
  if (mode == "leave") {
    rk_detach(session);
    say("left");
    std::this_thread::sleep_for(std::chrono::hours(1));
  }
  serve(session, info, mode == "follow");
  rk_detach(session);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const std::string store = setting("REKINDLE_STORE", "/dev/shm/rekindle");
  rk_error error;
  rk_agent* agent = nullptr;
  rk_connect_options where{};
  where.size = sizeof where;
  where.store = store.c_str();
  if (rk_connect(&where, &agent, &error) != RK_OK) lose(error);
  if (mode == "publish") return publish(agent);

  const std::string model = setting("REKINDLE_MODEL", "m");
  const std::string instance = setting("REKINDLE_INSTANCE", "");
  const std::string shard = setting("REKINDLE_SHARD", "");
  const std::string spec = setting("WORKER_SPEC", "");
  const std::string fallback = setting("WORKER_FALLBACK", "");
  rk_attach_options options{};
  options.size = sizeof options;
  options.model = model.c_str();
  options.shard = shard.empty() ? nullptr : shard.c_str();
  options.spec_json = spec.empty() ? nullptr : spec.c_str();
  options.instance = instance.empty() ? nullptr : instance.c_str();
  options.generation = std::stoull(setting("REKINDLE_GENERATION", "0"));
  options.rank = static_cast<std::uint32_t>(std::stoul(setting("REKINDLE_RANK", "0")));
  options.world = static_cast<std::uint32_t>(std::stoul(setting("REKINDLE_WORLD", "1")));
  options.fallback_dir = fallback.empty() ? nullptr : fallback.c_str();
  options.timeout_ms = kPatience;
  do {
    attach_and_serve(agent, options, mode, argc > 2 ? argv[2] : "");
  } while (mode != "dump");
}
