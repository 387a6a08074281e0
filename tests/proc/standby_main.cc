// A worker program of `rekindle run --standby` for its tests. It starts up, waits for its turn, and
// serves until it is told to end. It says on stdout, with its pid:
//   started PID    turn PID FAILURES    lost PID: why    deaf PID (it ignores SIGTERM)
// Arguments, each at most once: gate FILE (it starts up only once FILE is there), die FILE (as a
// standby it exits with 7 before it waits while FILE is there), fail (exits with 9 once it has its
// turn), stubborn (ignores SIGTERM), fds (says after `started` how many descriptors it has
// inherited), child (a child process waits in its place).
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "src/ipc/standby.h"

namespace {

using namespace std::chrono_literals;

std::string setting(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

long inherited_descriptors() {
  // One of them is the directory itself.
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator()) -
         1;
}

std::string failures_of_turn() {
  const std::string standby = setting(rekindle::ipc::kStandbyVariable);
  if (standby.empty()) return setting("REKINDLE_FAILURES");
  const auto turn = rekindle::ipc::wait_for_turn(standby, rekindle::TimePoint::max());
  if (!turn) {
    say("lost " + std::to_string(::getpid()) + ": " + turn.error().message());
    std::_Exit(3);
  }
  for (const auto& [name, value] : *turn) {
    if (name == "REKINDLE_FAILURES") return value;
  }
  return "none";
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const auto has = [&](const char* word) { return std::ranges::find(words, word) != words.end(); };
  const auto file_of = [&](const char* word) -> std::filesystem::path {
    const auto found = std::ranges::find(words, word);
    return found == words.end() ? "" : *(found + 1);
  };
  if (has("stubborn")) {
    std::signal(SIGTERM, SIG_IGN);
    say("deaf " + std::to_string(::getpid()));
  }
  const bool is_standby = !setting(rekindle::ipc::kStandbyVariable).empty();
  while (has("gate") && is_standby && !std::filesystem::exists(file_of("gate"))) {
    std::this_thread::sleep_for(10ms);
  }
  const std::string pid = std::to_string(::getpid());
  if (has("fds")) say("descriptors " + std::to_string(inherited_descriptors()));
  if (has("die") && is_standby && std::filesystem::exists(file_of("die"))) return 7;
  say("started " + pid);
  if (has("child")) {
    const pid_t child = ::fork();
    if (child > 0) {
      int status = 0;
      ::waitpid(child, &status, 0);
      return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    }
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  }
  say("turn " + pid + " " + failures_of_turn());
  // The answer stays the same.
  if (has("child")) say("again " + pid + " " + failures_of_turn());
  if (has("fail")) return 9;
  while (true) std::this_thread::sleep_for(1h);
}
