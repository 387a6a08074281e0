#pragma once

#include <chrono>
#include <csignal>
#include <string>
#include <utility>
#include <vector>

#include <sys/types.h>

#include "recovery/trace/span.h"
#include "recovery/worker/core/restart_policy.h"
#include "src/base/result.h"

namespace rekindle::cli {

struct SupervisorOptions {
  std::vector<std::string> command;
  // Added to the environment of this process.
  std::vector<std::pair<std::string, std::string>> environment;
  // Of the agent that the worker attaches to.
  std::string agent_socket;
  // Runs to its end before the first start of `command`, at most for `prepare_timeout`. Whether it
  // succeeds changes nothing. Empty: none.
  std::vector<std::string> prepare;
  std::chrono::milliseconds prepare_timeout{120'000};
  // Starts with the first start of `command`, once. Ends with this process at the latest. Empty:
  // none.
  std::vector<std::string> companion;
  worker::RestartOptions restart;
  // The parent of the command's lives. Invalid: each life begins a trace.
  trace::Context trace;
  // Kills a worker this long after it was told to stop.
  std::chrono::milliseconds kill_after{60'000};
  bool quiet = false;
};

// Runs a command until it exits with 0, is told to stop, or fails too often. A failure while the
// agent is down does not count: the command starts again once somebody listens at the socket.
// Signals that end or inform a process are passed on; signals of the terminal reach the child by
// themselves. The child is killed when this process dies. One supervisor at a time in a process,
// because it takes over the signal mask.
class Supervisor {
 public:
  explicit Supervisor(SupervisorOptions options);
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  // The exit code: the child's, 128 + its signal, or kExitCrashLoop.
  Result<int> run();

 private:
  struct End {
    // Of waitpid.
    int status = 0;
    TimePoint started;
    TimePoint ended;
  };
  // The worker.
  Result<pid_t> start(int failures);
  // A command of this program beside the worker. Its output goes to stderr.
  Result<pid_t> start_helper(const std::vector<std::string>& words) const;
  void prepare();
  void start_companion();
  void end_companion();
  Result<int> run_worker();
  Result<End> run_once(int failures);
  void pass_on(pid_t child, const siginfo_t& signal);
  // Waits for a signal until the deadline; false: none came.
  bool take_signal(siginfo_t& signal, TimePoint deadline);
  // Both return false when this process was told to stop.
  bool pause(std::chrono::milliseconds delay);
  bool wait_for_agent();
  bool agent_listens() const;
  void say(const std::string& line) const;

  const SupervisorOptions options_;
  worker::RestartPolicy policy_;
  sigset_t watched_{};
  sigset_t before_{};
  // Stays set when it has ended, until it is reaped. 0: none has started.
  pid_t companion_ = 0;
  // The first signal that told this process to stop.
  int stop_signal_ = 0;
  TimePoint kill_at_ = TimePoint::max();
};

}  // namespace rekindle::cli
