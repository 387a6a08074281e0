#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/resource.h>
#include <sys/types.h>

#include "src/base/unique_fd.h"

// Real processes under test: start, signal, wait with a deadline, read what they wrote. A child
// dies with its Process (SIGKILL, reaped) and with the test program (PDEATHSIG).
namespace rekindle::testing {

using std::chrono::milliseconds;
using namespace std::chrono_literals;

inline constexpr milliseconds kPatience{20'000};  // no healthy step takes this long, even loaded

struct Spawn {
  std::vector<std::string> argv;
  std::vector<std::pair<std::string, std::string>>
      env;  // on top of ours; REKINDLE_* is not passed on
  std::filesystem::path cwd;
  std::string input;      // on stdin
  bool terminal = false;  // stdout and stderr are a pseudo-terminal of 100 columns, read by out()
  std::vector<std::pair<int, rlimit>> limits;  // RLIMIT_NOFILE, …
};

struct Exit {
  int code = -1;   // -1 when it ended by a signal
  int signal = 0;  // 0 when it exited
  bool operator==(const Exit&) const = default;
};

class Process {
 public:
  // Throws std::runtime_error when the program cannot be started.
  explicit Process(Spawn spawn);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  bool running();
  void signal(int number);
  // nullopt: still running at the deadline.
  std::optional<Exit> wait(milliseconds deadline = kPatience);
  // SIGKILL and wait.
  Exit kill();

  std::string out();
  std::string err();
  // True when stdout (or stderr) contains `text` by the deadline; false when it does not or the
  // process ended without having said it.
  bool wait_for_out(std::string_view text, milliseconds deadline = kPatience);
  bool wait_for_err(std::string_view text, milliseconds deadline = kPatience);
  // The rest of the line that follows `prefix` on stdout, e.g. an address. "" as above.
  std::string value_after(std::string_view prefix, milliseconds deadline = kPatience);

 private:
  bool wait_until(milliseconds deadline, const std::function<bool()>& done);
  void reap(int status);
  void drain_terminal();

  pid_t pid_ = -1;
  UniqueFd pidfd_, out_, err_, terminal_;
  std::string terminal_text_;
  std::optional<Exit> exit_;
};

struct Finished {
  Exit exit;
  bool timed_out = false;  // it was killed then
  std::string out, err;
};
// Runs to the end.
Finished run(Spawn spawn, milliseconds deadline = kPatience);
Finished run(std::vector<std::string> argv, milliseconds deadline = kPatience);

// The program at `built`, or, where the tests run elsewhere than they were built, the one of that
// name in $REKINDLE_TEST_PROGRAMS.
std::string program(const std::filesystem::path& built);

// Polls `done` until it is true (true) or the deadline has passed (false).
bool eventually(const std::function<bool()>& done, milliseconds deadline = kPatience);

// A command prefix: what follows runs as if on another host, which Linux tells by the boot id that
// `number` stands for, so that it shares no memory with others. Needs user_namespaces().
std::vector<std::string> on_host(const std::filesystem::path& directory, int number);
bool user_namespaces();

// The CPU time that a process has taken so far, in steps of a clock tick (10 ms).
struct CpuTime {
  double user_s = 0;
  double system_s = 0;
  double total_s() const { return user_s + system_s; }
};
CpuTime cpu_time(pid_t pid);

// A TCP port of 127.0.0.1 that is free now, out of the range that outgoing connections take from:
// for servers that have to have the same one in their next life.
std::uint16_t free_port();

// Removed with all its contents at the end. On tmpfs when `on_tmpfs`.
class TempDir {
 public:
  explicit TempDir(bool on_tmpfs = false);
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

std::string read_file(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, std::string_view bytes);

}  // namespace rekindle::testing
