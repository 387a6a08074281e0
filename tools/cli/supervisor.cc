#include "tools/cli/supervisor.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <time.h>

#include "recovery/worker/worker_wire.h"
#include "src/base/clock.h"
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
constexpr std::chrono::milliseconds kLongestWait{60'000};
// For a helper to end after SIGTERM.
constexpr std::chrono::milliseconds kHelperGrace{2'000};
// How often it checks whether the agent is back.
constexpr std::chrono::milliseconds kAgentCheckInterval{50};
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

// The environment of this process as NAME=VALUE, with `more` added.
std::vector<std::string> environment_with(
    const std::vector<std::pair<std::string, std::string>>& more) {
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::string name = text.substr(0, text.find('='));
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

}  // namespace

Supervisor::Supervisor(SupervisorOptions options)
    : options_(std::move(options)), policy_(options_.restart, dice()) {
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

Result<pid_t> Supervisor::start(int failures) {
  auto extra = options_.environment;
  extra.emplace_back("REKINDLE_FAILURES", fmt::format("{}", failures));
  extra.emplace_back("TRACEPARENT", traceparent_below(options_.trace));
  return start_process(options_.command, environment_with(extra), before_, STDOUT_FILENO);
}

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
    siginfo_t signal{};
    if (take_signal(signal, std::min(give_up, kill_at))) pass_on(0, signal);
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

void Supervisor::end_companion() {
  if (companion_ == 0) return;
  (void)::kill(companion_, SIGTERM);
  const TimePoint give_up = steady_now() + kHelperGrace;
  while (::waitpid(companion_, nullptr, WNOHANG) == 0) {
    if (steady_now() >= give_up) {
      (void)::kill(companion_, SIGKILL);
      (void)::waitpid(companion_, nullptr, 0);
      break;
    }
    siginfo_t signal{};
    (void)take_signal(signal, give_up);
  }
  companion_ = 0;
}

bool Supervisor::take_signal(siginfo_t& signal, TimePoint deadline) {
  const auto left = std::clamp<Duration>(deadline - steady_now(), Duration(0), kLongestWait);
  const auto whole = std::chrono::duration_cast<std::chrono::seconds>(left);
  const timespec time{.tv_sec = whole.count(), .tv_nsec = (left - whole).count()};
  return ::sigtimedwait(&watched_, &signal, &time) > 0;
}

// A signal of the terminal reaches its whole process group, and so the child. A hang-up may reach
// only the leader of the session.
void Supervisor::pass_on(pid_t child, const siginfo_t& signal) {
  const int number = signal.si_signo;
  if (number == SIGCHLD) return;
  if (stop_signal_ == 0 && std::ranges::find(kStopSignals, number) != std::end(kStopSignals)) {
    stop_signal_ = number;
    kill_at_ = steady_now() + options_.kill_after;
  }
  const bool everybodys = signal.si_code == SI_KERNEL && number != SIGHUP;
  if (!everybodys && child > 0) (void)::kill(child, number);
}

Result<Supervisor::End> Supervisor::run_once(int failures) {
  End end;
  end.started = steady_now();
  TRY(const pid_t child, start(failures));
  if (failures == 0) start_companion();
  while (true) {
    const pid_t done = ::waitpid(child, &end.status, WNOHANG);
    if (done == child) break;
    if (done < 0) return fail_errno(errno, fmt::format("wait for pid {}", child));
    if (steady_now() >= kill_at_) {
      say(fmt::format(
          "pid {} did not stop within {} s: killed", child,
          std::chrono::duration_cast<std::chrono::seconds>(options_.kill_after).count()));
      (void)::kill(child, SIGKILL);
      kill_at_ = TimePoint::max();
    }
    siginfo_t signal{};
    if (take_signal(signal, std::min(kill_at_, steady_now() + kLongestWait)))
      pass_on(child, signal);
  }
  end.ended = steady_now();
  return end;
}

bool Supervisor::pause(std::chrono::milliseconds delay) {
  const auto until = steady_now() + delay;
  while (stop_signal_ == 0 && steady_now() < until) {
    siginfo_t signal{};
    if (take_signal(signal, until)) pass_on(0, signal);
  }
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
  while (pause(kAgentCheckInterval)) {
    if (agent_listens()) return true;
  }
  return false;
}

Result<int> Supervisor::run() {
  prepare();
  if (stop_signal_ != 0) return kExitSignal + stop_signal_;
  auto code = run_worker();
  end_companion();
  return code;
}

Result<int> Supervisor::run_worker() {
  int failures = 0;
  while (true) {
    TRY(const End end, run_once(failures));
    const bool fine = WIFEXITED(end.status) && WEXITSTATUS(end.status) == 0;
    if (fine || stop_signal_ != 0) return exit_code_of(end.status);
    const double lived = seconds(end.ended - end.started);
    if (!agent_listens()) {
      say(fmt::format(
          "{} {} after {:.1f} s, and no agent listens at {}; starting it again when "
          "one does",
          options_.command.front(), describe(end.status), lived, options_.agent_socket));
      if (!wait_for_agent()) return kExitSignal + stop_signal_;
      continue;
    }
    const auto decision = policy_.failed(end.started, end.ended);
    failures = decision.failures;
    if (!decision.restart) {
      std::fprintf(stderr,
                   "rekindle run: crash loop: %s failed %d times in a row, each within %.0f s of "
                   "its start, and at last %s; not started again, see its own messages above\n",
                   printable(options_.command.front()).c_str(), decision.failures,
                   seconds(options_.restart.healthy_after), describe(end.status).c_str());
      return kExitCrashLoop;
    }
    say(fmt::format("{} {} after {:.1f} s; starting it again{}", options_.command.front(),
                    describe(end.status), lived,
                    decision.delay.count() > 0
                        ? fmt::format(" in {:.1f} s (failure {} in a row)", seconds(decision.delay),
                                      decision.failures)
                        : ""));
    if (!pause(decision.delay)) return kExitSignal + stop_signal_;
  }
}

}  // namespace rekindle::cli
