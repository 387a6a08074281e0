#pragma once

#include <chrono>
#include <csignal>
#include <string>
#include <utility>
#include <vector>

#include <sys/types.h>

#include "recovery/worker/core/restart_policy.h"
#include "src/base/result.h"

namespace rekindle::cli {

struct SupervisorOptions {
  std::vector<std::string> command;
  std::vector<std::pair<std::string, std::string>> environment;  // on top of ours
  std::string agent_socket;                                      // of the agent that it attaches to
  worker::RestartOptions restart;
  std::chrono::milliseconds kill_after{60'000};  // of a worker that was told to stop
  bool quiet = false;
};

// Runs a command until it exits with 0, is told to stop, or fails too often. A failure while its
// agent is away is not its own: it starts again once somebody listens at the socket. Signals that
// end or inform a process are passed on; the terminal's own reach the child by themselves. The
// child is killed when this process dies. One at a time in a process: it takes over the signal
// mask.
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
    int status = 0;  // of waitpid
    TimePoint started;
    TimePoint ended;
  };
  Result<pid_t> start(int failures);
  Result<End> run_once(int failures);
  void pass_on(pid_t child, const siginfo_t& signal);
  // Takes a signal, at most until `deadline`; false: none came.
  bool take_signal(siginfo_t& signal, TimePoint deadline);
  bool pause(std::chrono::milliseconds delay);  // false: told to stop
  bool wait_for_agent();                        // the same
  bool agent_listens() const;
  void say(const std::string& line) const;

  const SupervisorOptions options_;
  worker::RestartPolicy policy_;
  sigset_t watched_{};
  sigset_t before_{};
  int stop_signal_ = 0;  // the first that told us to stop
  TimePoint kill_at_ = TimePoint::max();
};

}  // namespace rekindle::cli
