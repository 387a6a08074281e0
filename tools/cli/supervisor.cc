#include "tools/cli/supervisor.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "recovery/worker/worker_wire.h"
#include "src/base/clock.h"
#include "src/base/failpoint.h"
#include "src/base/unique_fd.h"
#include "src/base/version.h"
#include "src/ipc/channel.h"
#include "src/ipc/unix_socket.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/output.h"

extern char** environ;

namespace rekindle::cli {
namespace {

constexpr int kStopSignals[] = {SIGTERM, SIGINT, SIGQUIT, SIGHUP};
constexpr int kOtherSignals[] = {SIGUSR1, SIGUSR2, SIGCONT, SIGWINCH};
constexpr const char* kFailuresVariable = "REKINDLE_FAILURES";
constexpr std::chrono::milliseconds kLongestWait{60'000};
// For a helper to end after SIGTERM.
constexpr std::chrono::milliseconds kHelperGrace{2'000};
// How often it checks whether the agent is back.
constexpr std::chrono::milliseconds kAgentCheckInterval{50};
// A program that starts processes faster than this command finds them is not stopped.
constexpr int kMostFreezes = 16;
// The kernel frees the memory of a killed process in this time.
constexpr std::chrono::milliseconds kKilledDeadline{10'000};
// Between two looks at ranks that have their time to end.
constexpr std::chrono::milliseconds kRemainsLook{20};
// For the answer of an agent to a hello.
constexpr std::chrono::milliseconds kHelloDeadline{500};

std::function<double()> dice() {
  return [engine = std::mt19937_64(std::random_device{}())]() mutable {
    return std::uniform_real_distribution<double>(0.0, 1.0)(engine);
  };
}

std::string describe(int status) {
  if (WIFSIGNALED(status)) {
    const char* const name = ::sigabbrev_np(WTERMSIG(status));
    return fmt::format("died by SIG{}{}", name != nullptr ? name : "?",
                       WCOREDUMP(status) ? " (core dumped)" : "");
  }
  return fmt::format("ended with exit code {}", WEXITSTATUS(status));
}

int exit_code_of(int status) {
  return WIFSIGNALED(status) ? kExitSignal + WTERMSIG(status) : WEXITSTATUS(status);
}

// The value of TRACEPARENT for one life of the command.
std::string traceparent_below(const trace::Context& outer) {
  const trace::TraceId id = outer.valid() ? outer.trace : trace::TraceId::random();
  return fmt::format("00-{}-{}-01", id.hex(), trace::SpanId::random().hex());
}

// The environment of this process as NAME=VALUE, with `more` added. A standby of another
// supervisor that becomes one itself does not pass on its own place.
std::vector<std::string> environment_with(
    const std::vector<std::pair<std::string, std::string>>& more) {
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::string name = text.substr(0, text.find('='));
    if (name == ipc::kStandbyVariable) continue;
    if (std::ranges::none_of(more, [&](const auto& item) { return item.first == name; })) {
      out.push_back(text);
    }
  }
  for (const auto& [name, value] : more) out.push_back(name + "=" + value);
  return out;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (auto& text : texts) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

// Runs in the child between fork and exec, so it calls only async-signal-safe functions.
[[noreturn]] void become(char** argv, char** environment, const sigset_t& mask, pid_t parent,
                         int report_fd, int output_fd) {
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || ::getppid() != parent) ::_exit(kExitFailed);
  if (output_fd != STDOUT_FILENO && ::dup2(output_fd, STDOUT_FILENO) < 0) ::_exit(kExitFailed);
  ::signal(SIGPIPE, SIG_DFL);
  (void)::sigprocmask(SIG_SETMASK, &mask, nullptr);
  ::execvpe(argv[0], argv, environment);
  const int error = errno;
  (void)!::write(report_fd, &error, sizeof error);
  ::_exit(kExitFailed);
}

// `output_fd` becomes its stdout.
Result<pid_t> start_process(std::vector<std::string> words, std::vector<std::string> settings,
                            const sigset_t& mask, int output_fd) {
  const auto argv = pointers(words);
  const auto environment = pointers(settings);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return fail_errno(errno, "create a pipe");
  UniqueFd read_end(ends[0]), write_end(ends[1]);
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) return fail_errno(errno, "fork");
  if (child == 0) {
    become(const_cast<char**>(argv.data()), const_cast<char**>(environment.data()), mask, parent,
           write_end.get(), output_fd);
  }
  write_end.reset();
  int error = 0;
  if (::read(read_end.get(), &error, sizeof error) == sizeof error) {
    (void)::waitpid(child, nullptr, 0);
    return fail(error == ENOENT ? ErrorCode::kNotFound : ErrorCode::kInvalid, "run {}: {}",
                words.front(), std::strerror(error));
  }
  return child;
}

// Of a supervisor that may restart a process without end.
worker::RestartOptions without_limit(worker::RestartOptions options) {
  options.crash_loop = 0;
  return options;
}

}  // namespace

Supervisor::Supervisor(SupervisorOptions options, std::unique_ptr<RankWatch> ranks)
    : options_(std::move(options)),
      policy_(options_.restart, dice()),
      standby_policy_(without_limit(options_.restart), dice()),
      ranks_(std::move(ranks)) {
  sigemptyset(&watched_);
  for (const int number : kStopSignals) sigaddset(&watched_, number);
  for (const int number : kOtherSignals) sigaddset(&watched_, number);
  sigaddset(&watched_, SIGCHLD);
  (void)::sigprocmask(SIG_BLOCK, &watched_, &before_);
}

Supervisor::~Supervisor() { (void)::sigprocmask(SIG_SETMASK, &before_, nullptr); }

void Supervisor::say(const std::string& line) const {
  if (!options_.quiet) std::fprintf(stderr, "rekindle run: %s\n", printable(line).c_str());
}

Result<pid_t> Supervisor::start(int failures, const StandbyDoor* door) {
  auto extra = options_.environment;
  extra.emplace_back(kFailuresVariable, fmt::format("{}", failures));
  extra.emplace_back("TRACEPARENT", traceparent_below(options_.trace));
  if (door != nullptr) extra.emplace_back(ipc::kStandbyVariable, door->name());
  return start_process(options_.command, environment_with(extra), before_, STDOUT_FILENO);
}

// --- helpers

Result<pid_t> Supervisor::start_helper(const std::vector<std::string>& words) const {
  return start_process(words, environment_with({}), before_, STDERR_FILENO);
}

void Supervisor::prepare() {
  if (options_.prepare.empty()) return;
  const auto child = start_helper(options_.prepare);
  if (!child) return say(child.error().message());
  const std::string what = options_.prepare[1] + " " + options_.prepare[2];
  const TimePoint give_up = steady_now() + options_.prepare_timeout;
  TimePoint kill_at = TimePoint::max();
  int status = 0;
  while (::waitpid(*child, &status, WNOHANG) == 0) {
    const TimePoint now = steady_now();
    if (now >= kill_at) {
      (void)::kill(*child, SIGKILL);
      (void)::waitpid(*child, &status, 0);
      break;
    }
    if (kill_at == TimePoint::max() && (now >= give_up || stop_signal_ != 0)) {
      (void)::kill(*child, SIGTERM);
      kill_at = now + kHelperGrace;
    }
    take_turn(kill_at == TimePoint::max() ? give_up : kill_at);
  }
  const bool fine = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (!fine && stop_signal_ == 0) {
    say(fmt::format("{} {}{}; starting without", what, describe(status),
                    kill_at == TimePoint::max() ? "" : " because it took too long"));
  }
}

void Supervisor::start_companion() {
  if (options_.companion.empty() || companion_ != 0) return;
  const auto child = start_helper(options_.companion);
  if (child) companion_ = *child;
  if (!child) say(child.error().message());
}

void Supervisor::reap_companion() {
  int status = 0;
  if (companion_ <= 0 || ::waitpid(companion_, &status, WNOHANG) != companion_) return;
  companion_ = -1;
  const bool fine = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (fine || !supervising_ || stop_signal_ != 0) return;
  say(fmt::format("{} {} {}", options_.companion[1], options_.companion[2], describe(status)));
}

void Supervisor::end_companion() {
  if (companion_ > 0) (void)::kill(companion_, SIGTERM);
  const TimePoint give_up = steady_now() + kHelperGrace;
  while (companion_ > 0) {
    if (steady_now() >= give_up) (void)::kill(companion_, SIGKILL);
    take_turn(steady_now() >= give_up ? TimePoint::max() : give_up);
  }
}

// --- standbys

Supervisor::Child* Supervisor::heir() {
  const auto waits = std::ranges::find_if(
      standbys_, [](const Child& standby) { return standby.door->has_waiter(); });
  if (waits != standbys_.end()) return &*waits;
  return standbys_.empty() ? nullptr : &standbys_.front();
}

bool Supervisor::heir_waits() {
  const Child* const next = heir();
  return next != nullptr && next->door->has_waiter();
}

void Supervisor::start_standby() {
  const TimePoint now = steady_now();
  auto door = StandbyDoor::open();
  if (!door) return standby_failed(now, door.error().message());
  const auto pid = start(0, door->get());
  if (!pid) return standby_failed(now, pid.error().message());
  standbys_.push_back({*pid, now, std::move(*door)});
}

void Supervisor::start_standbys() {
  while (steady_now() >= next_standby_start()) start_standby();
}

void Supervisor::standby_failed(TimePoint started, const std::string& what) {
  const auto decision = standby_policy_.failed(started, steady_now());
  standby_due_ = steady_now() + decision.delay;
  say(fmt::format("a standby {}; starting another one{}", what,
                  decision.delay.count() > 0
                      ? fmt::format(" in {:.1f} s (failure {} in a row)", seconds(decision.delay),
                                    decision.failures)
                      : ""));
}

void Supervisor::reap_standbys() {
  for (auto standby = standbys_.begin(); standby != standbys_.end();) {
    int status = 0;
    if (::waitpid(standby->pid, &status, WNOHANG) != standby->pid) {
      ++standby;
      continue;
    }
    const TimePoint started = standby->since;
    const std::string what =
        fmt::format("(pid {}) {} {}", standby->pid, describe(status),
                    standby->ready ? "while it waited"
                                   : "before it waited for its turn, see its own messages above");
    standby = standbys_.erase(standby);
    if (stop_signal_ == 0) standby_failed(started, what);
  }
}

// They hold no weights and serve nobody. So they need no more time than a worker to stop.
void Supervisor::end_standbys() {
  if (standbys_.empty()) return;
  if (stop_signal_ == 0) {
    stop_signal_ = SIGTERM;
    for (const Child& standby : standbys_) {
      standby.door->turn_away();
      (void)::kill(standby.pid, SIGTERM);
    }
  }
  kill_at_ = std::min(kill_at_, steady_now() + options_.kill_after);
  while (!standbys_.empty()) take_turn(TimePoint::max());
}

Result<Supervisor::Child> Supervisor::next_worker(int failures) {
  // A standby that has just died cannot take over.
  reap_standbys();
  Child* const next = heir();
  if (next == nullptr) {
    const TimePoint now = steady_now();
    TRY(const pid_t pid, start(failures, nullptr));
    return Child{pid, now, nullptr};
  }
  Child worker = std::move(*next);
  standbys_.erase(standbys_.begin() + (next - standbys_.data()));
  say(fmt::format("the standby pid {} takes over{}", worker.pid,
                  worker.door->has_waiter() ? "" : ", once it has started up"));
  worker.door->let_go({{kFailuresVariable, fmt::format("{}", failures)}});
  worker.since = steady_now();
  return worker;
}

// --- ranks

void Supervisor::look_at_ranks() {
  if (!watches_ranks()) return;
  ranks_->look();
  if (!worker_) return;
  if (!ranks_->death().empty() && !std::exchange(lost_rank_, true)) {
    (void)hold_all_below(worker_->pid, tree_);
    const bool kills = options_.rank_grace.count() > 0;
    if (kills) kill_tree_at_ = steady_now() + options_.rank_grace;
    say(fmt::format("{} of pid {} died{}", ranks_->death(), worker_->pid,
                    kills ? fmt::format("; pid {} has {:.1f} s to end", worker_->pid,
                                        seconds(options_.rank_grace))
                          : ""));
  }
  if (steady_now() >= kill_tree_at_) kill_tree();
}

// A process that is stopped starts no others.
void Supervisor::kill_tree() {
  kill_tree_at_ = TimePoint::max();
  (void)::kill(worker_->pid, SIGSTOP);
  for (const HeldProcess& process : tree_) process.signal(SIGSTOP);
  for (int freeze = 0; freeze < kMostFreezes; ++freeze) {
    const auto found = hold_all_below(worker_->pid, tree_);
    if (found.empty()) break;
    for (const HeldProcess& process : found) process.signal(SIGSTOP);
  }
  (void)::kill(worker_->pid, SIGKILL);
  const auto killed = std::ranges::count_if(tree_, [](const HeldProcess& process) {
    const bool lives = !process.has_ended();
    if (lives) process.signal(SIGKILL);
    return lives;
  });
  say(
      fmt::format("pid {} did not end within {:.1f} s of the death of {}: killed with {} process{} "
                  "below it",
                  worker_->pid, seconds(options_.rank_grace), ranks_->death(), killed,
                  killed == 1 ? "" : "es"));
}

void Supervisor::kill_remains(pid_t worker) {
  lost_rank_ = false;
  kill_tree_at_ = TimePoint::max();
  std::vector<HeldProcess> remains = std::exchange(tree_, {});
  if (options_.rank_grace.count() == 0) return;
  std::ranges::move(ranks_->take_survivors(), std::back_inserter(remains));
  // After the end of a worker its ranks may be ending, too.
  const TimePoint now = steady_now();
  TimePoint give_up = now;
  if (stop_signal_ != 0) {
    give_up = kill_at_ == TimePoint::max() ? now : kill_at_;
  } else if (ranks_->death().empty()) {
    give_up = now + options_.rank_grace;
  }
  const auto lives = [](const HeldProcess& process) { return !process.has_ended(); };
  while (steady_now() < give_up && std::ranges::any_of(remains, lives)) {
    take_turn(std::min(give_up, steady_now() + kRemainsLook));
  }
  const auto killed = std::ranges::count_if(remains, lives);
  if (killed == 0) return;
  say(fmt::format("killed {} process{} that pid {} has left behind", killed,
                  killed == 1 ? "" : "es", worker));
  for (const HeldProcess& process : remains) process.signal(SIGKILL);
  if (const std::size_t left = wait_for_ends(remains, kKilledDeadline); left > 0) {
    say(fmt::format("{} process{} of the worker did not end after SIGKILL; going on without", left,
                    left == 1 ? "" : "es"));
  }
}

// --- signals

void Supervisor::signal_all(int number) {
  if (worker_) (void)::kill(worker_->pid, number);
  for (const Child& standby : standbys_) (void)::kill(standby.pid, number);
}

// A signal of the terminal reaches its whole process group, and so the children. A hang-up may
// reach only the leader of the session. Signals that inform concern only the worker: a standby that
// still starts may have no handler yet.
void Supervisor::pass_on(const signalfd_siginfo& signal) {
  const int number = static_cast<int>(signal.ssi_signo);
  if (number == SIGCHLD) return;
  const bool stops = std::ranges::find(kStopSignals, number) != std::end(kStopSignals);
  if (stop_signal_ == 0 && stops) {
    stop_signal_ = number;
    kill_at_ = steady_now() + options_.kill_after;
  }
  // A process that waits may have a handler for the signal, and would wait on.
  for (const Child& standby : standbys_) {
    if (stops) standby.door->turn_away();
  }
  const bool everybodys = signal.ssi_code == SI_KERNEL && number != SIGHUP;
  if (everybodys) return;
  if (stops) return signal_all(number);
  if (worker_) (void)::kill(worker_->pid, number);
}

TimePoint Supervisor::next_standby_start() const {
  const bool wanted = supervising_ && stop_signal_ == 0 && standbys_.size() < options_.standbys;
  return wanted ? standby_due_ : TimePoint::max();
}

void Supervisor::take_turn(TimePoint deadline) {
  start_standbys();
  deadline = std::min({deadline, kill_at_, watches_ranks() ? kill_tree_at_ : TimePoint::max(),
                       next_standby_start(), steady_now() + kLongestWait});
  std::vector<pollfd> entries{{signals_.get(), POLLIN, 0}};
  for (const Child& standby : standbys_) standby.door->watch(entries);
  if (worker_ && worker_->door) worker_->door->watch(entries);
  if (watches_ranks()) ranks_->watch(entries);
  (void)::poll(entries.data(), entries.size(), ipc::poll_timeout_ms(steady_now(), deadline));
  signalfd_siginfo signal{};
  while (::read(signals_.get(), &signal, sizeof signal) == sizeof signal) pass_on(signal);
  for (Child& standby : standbys_) {
    standby.door->serve();
    if (standby.ready || !standby.door->has_waiter()) continue;
    standby.ready = true;
    say(fmt::format("the standby pid {} is ready after {:.1f} s", standby.pid,
                    seconds(steady_now() - standby.since)));
  }
  if (worker_ && worker_->door) worker_->door->serve();
  reap_standbys();
  reap_companion();
  look_at_ranks();
  if (steady_now() < kill_at_) return;
  kill_at_ = TimePoint::max();
  // Whoever waits for other processes kills them.
  if (!worker_ && standbys_.empty()) return;
  say(fmt::format("{} did not stop within {} s: killed",
                  worker_ ? fmt::format("pid {}", worker_->pid) : "a standby",
                  std::chrono::duration_cast<std::chrono::seconds>(options_.kill_after).count()));
  signal_all(SIGKILL);
}

// --- lives of the worker

Result<Supervisor::End> Supervisor::run_once(int failures) {
  if (watches_ranks()) ranks_->begin();
  TRY(worker_, next_worker(failures));
  TRY_VOID(failpoint("run.worker_started"));
  if (watches_ranks()) ranks_->follow(worker_->pid);
  if (failures == 0) start_companion();
  const pid_t pid = worker_->pid;
  End end;
  end.started = worker_->since;
  while (true) {
    const pid_t done = ::waitpid(pid, &end.status, WNOHANG);
    if (done == pid) break;
    if (done < 0) return fail_errno(errno, fmt::format("wait for pid {}", pid));
    take_turn(TimePoint::max());
  }
  end.ended = steady_now();
  worker_.reset();
  if (ranks_ == nullptr) return end;
  // The worker may have ended before its rank was seen to die.
  if (watches_ranks() && end.status == 0) ranks_->look_again();
  end.death = ranks_->death();
  kill_remains(pid);
  return end;
}

bool Supervisor::pause(std::chrono::milliseconds delay) {
  const auto until = steady_now() + delay;
  while (stop_signal_ == 0 && steady_now() < until && !heir_waits()) take_turn(until);
  return stop_signal_ == 0;
}

// The kernel also connects to a dying agent, which closes the connection without accepting it. An
// agent that keeps the connection open listens, even if it does not answer.
bool Supervisor::agent_listens() const {
  auto socket = ipc::connect_unix_socket(options_.agent_socket, steady_now() + kAgentCheckInterval);
  if (!socket) {
    return socket.error().code() != ErrorCode::kUnavailable &&
           socket.error().code() != ErrorCode::kNotFound;
  }
  proto::WorkerFrame hello;
  hello.set_call(1);
  hello.mutable_hello()->set_protocol_min(worker::kProtocol);
  hello.mutable_hello()->set_protocol_max(worker::kProtocol);
  hello.mutable_hello()->set_software(fmt::format("rekindle run {}", version()));
  const TimePoint deadline = steady_now() + kHelloDeadline;
  auto channel = ipc::Channel::adopt(std::move(*socket), ipc::kMaxFrameDescriptors);
  if (!channel || !channel->send(hello.SerializeAsString(), {}, deadline)) return false;
  const auto answer = channel->receive(deadline);
  return answer || answer.error().code() == ErrorCode::kTimeout;
}

bool Supervisor::wait_for_agent() {
  while (stop_signal_ == 0) {
    take_turn(steady_now() + kAgentCheckInterval);
    if (agent_listens()) return stop_signal_ == 0;
  }
  return false;
}

Result<int> Supervisor::run() {
  signals_ = UniqueFd(::signalfd(-1, &watched_, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_) return fail_errno(errno, "create a signalfd");
  if (ranks_ != nullptr) TRY_VOID(ranks_->start());
  prepare();
  if (stop_signal_ != 0) return kExitSignal + stop_signal_;
  supervising_ = true;
  const auto code = supervise();
  supervising_ = false;
  end_companion();
  end_standbys();
  return code;
}

Result<int> Supervisor::supervise() {
  int failures = 0;
  while (true) {
    TRY(const End end, run_once(failures));
    if (stop_signal_ != 0) return exit_code_of(end.status);
    std::string what = fmt::format("{} {} after {:.1f} s", options_.command.front(),
                                   describe(end.status), seconds(end.ended - end.started));
    if (!end.death.empty()) what += fmt::format(" and lost {}", end.death);
    if (end.status == 0 && end.death.empty() && !options_.always) {
      say(fmt::format("{}: its work is done (--always starts it again)", what));
      return kExitOk;
    }
    if (!agent_listens()) {
      say(fmt::format("{}, and no agent listens at {}; starting it again when one does", what,
                      options_.agent_socket));
      if (!wait_for_agent()) return kExitSignal + stop_signal_;
      continue;
    }
    const auto decision = policy_.failed(end.started, end.ended);
    failures = decision.failures;
    if (!decision.restart) {
      std::fprintf(
          stderr,
          "rekindle run: crash loop: %s failed %d times in a row, each within %.0f s of "
          "its start, and at last %s; not started again, see its own messages above\n",
          printable(options_.command.front()).c_str(), decision.failures,
          seconds(options_.restart.healthy_after),
          printable(end.death.empty() ? describe(end.status) : "lost " + end.death).c_str());
      return kExitCrashLoop;
    }
    // The standby that replaces the next worker starts no sooner than a worker would.
    standby_due_ = std::max(standby_due_, steady_now() + decision.delay);
    if (heir_waits()) {
      say(what);
      continue;
    }
    say(fmt::format("{}; starting it again{}", what,
                    decision.delay.count() > 0
                        ? fmt::format(" in {:.1f} s (failure {} in a row)", seconds(decision.delay),
                                      decision.failures)
                        : ""));
    if (!pause(decision.delay)) return kExitSignal + stop_signal_;
  }
}

}  // namespace rekindle::cli
