#pragma once

#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <sys/signalfd.h>
#include <sys/types.h>

#include "recovery/trace/span.h"
#include "recovery/worker/core/restart_policy.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "tools/cli/process_tree.h"
#include "tools/cli/rank_watch.h"
#include "tools/cli/standby_door.h"

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
  // After the death of a rank the worker has this long to end, before it is killed with all
  // processes below it. So have its ranks after the end of the worker. 0: none is killed.
  std::chrono::milliseconds rank_grace{500};
  // Kills a worker this long after it was told to stop.
  std::chrono::milliseconds kill_after{60'000};
  // Exit code 0 is a failure, too, unless this process was told to stop.
  bool always = false;
  // How many started processes wait to take over from the worker.
  std::size_t standbys = 0;
  bool quiet = false;
};

// Runs a command until it exits with 0, is told to stop, or fails too often. A failure while the
// agent is down does not count: the command starts again once somebody listens at the socket.
// Signals that end or inform a process are passed on; signals of the terminal reach the child by
// themselves. Standbys are more processes of the command that wait at their StandbyDoor: one of
// them takes over when the worker fails, and another one starts in its place. The death of a rank
// below the worker is a failure of the worker, also if it then ends with 0. The children are killed
// when this process dies. One supervisor at a time in a process, because it takes over the
// signal mask.
class Supervisor {
 public:
  // `ranks` is null if nobody can tell the ranks of the worker.
  Supervisor(SupervisorOptions options, std::unique_ptr<RankWatch> ranks);
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  // The exit code: the child's, 128 + its signal, or kExitCrashLoop.
  Result<int> run();

 private:
  // A process of the command.
  struct Child {
    pid_t pid = 0;
    // When it started, or took over.
    TimePoint since;
    // Null: it was started as the worker.
    std::unique_ptr<StandbyDoor> door;
    // It has waited for its turn.
    bool ready = false;
  };
  struct End {
    // Of waitpid.
    int status = 0;
    TimePoint started;
    TimePoint ended;
    // RankWatch::death().
    std::string death;
  };
  Result<int> supervise();
  // `door`: of a standby.
  Result<pid_t> start(int failures, const StandbyDoor* door);
  // A command of this program beside the worker. Its output goes to stderr.
  Result<pid_t> start_helper(const std::vector<std::string>& words) const;
  void prepare();
  void start_companion();
  void reap_companion();
  void end_companion();
  // Returns the worker's end.
  Result<End> run_once(int failures);
  Result<Child> next_worker(int failures);
  // The standby that takes over: the first one that waits, else the first one. Null: there is none.
  Child* heir();
  bool heir_waits();
  void start_standbys();
  void start_standby();
  void reap_standbys();
  void standby_failed(TimePoint started, const std::string& what);
  void end_standbys();
  void signal_all(int number);

  bool watches_ranks() const { return ranks_ != nullptr && stop_signal_ == 0; }
  void look_at_ranks();
  // The worker has not ended in time after the death of a rank.
  void kill_tree();
  // Kills what a worker that has ended leaves behind: its ranks and, if one of them had died, all
  // processes below it. Waits for their end, because they may hold GPU memory.
  void kill_remains(pid_t worker);

  void pass_on(const signalfd_siginfo& signal);
  // Waits for a signal or news of standbys until the deadline, and deals with them.
  void take_turn(TimePoint deadline);
  TimePoint next_standby_start() const;
  // Both return false when this process was told to stop. A standby that waits ends a pause.
  bool pause(std::chrono::milliseconds delay);
  bool wait_for_agent();
  bool agent_listens() const;
  void say(const std::string& line) const;

  const SupervisorOptions options_;
  worker::RestartPolicy policy_;
  worker::RestartPolicy standby_policy_;
  sigset_t watched_{};
  sigset_t before_{};
  // 0: it has not started; -1: it has ended.
  pid_t companion_ = 0;
  // Standbys start only while the command runs.
  bool supervising_ = false;
  UniqueFd signals_;
  std::optional<Child> worker_;
  const std::unique_ptr<RankWatch> ranks_;
  // The worker has lost a rank.
  bool lost_rank_ = false;
  // Below the worker, from the death of a rank on.
  std::vector<HeldProcess> tree_;
  TimePoint kill_tree_at_ = TimePoint::max();
  std::vector<Child> standbys_;
  // When the next standby may start.
  TimePoint standby_due_ = TimePoint::min();
  // The first signal that told this process to stop.
  int stop_signal_ = 0;
  TimePoint kill_at_ = TimePoint::max();
};

}  // namespace rekindle::cli
