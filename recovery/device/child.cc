#include "recovery/device/child.h"

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <spawn.h>

#include "recovery/device/process.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::device {

namespace {

constexpr std::chrono::milliseconds kReapDeadline{50};  // then it goes with this process
constexpr std::chrono::milliseconds kReapLook{2};

std::string describe(int status) {
  if (WIFSIGNALED(status)) {
    return fmt::format("was killed by signal {} ({})", WTERMSIG(status),
                       ::strsignal(WTERMSIG(status)));
  }
  const int code = WEXITSTATUS(status);
  if (code == kDeviceLostExit) return "ended because a GPU fails; its log says why";
  return fmt::format("exited with code {}", code);
}

// Not a handler and no mask of ours: it is a program of its own.
void set_signals(posix_spawnattr_t& attributes) {
  sigset_t none;
  sigemptyset(&none);
  (void)::posix_spawnattr_setsigmask(&attributes, &none);
  (void)::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
}

}  // namespace

Result<std::unique_ptr<Child>> Child::start(const std::vector<std::string>& command) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return fail_errno(errno, "make a socket for the device process");
  }
  UniqueFd ours(ends[0]);
  UniqueFd theirs(ends[1]);
  if (theirs.get() == kSocket) {  // dup2 onto itself would leave it to be closed
    theirs = UniqueFd(::fcntl(theirs.get(), F_DUPFD_CLOEXEC, kSocket + 1));
    if (!theirs) return fail_errno(errno, "make a socket for the device process");
  }
  std::vector<char*> arguments;
  for (const auto& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  const char* const program = arguments.front();
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  (void)::posix_spawn_file_actions_init(&actions);
  (void)::posix_spawnattr_init(&attributes);
  int error = ::posix_spawn_file_actions_adddup2(&actions, theirs.get(), kSocket);
  set_signals(attributes);
  pid_t pid = -1;
  if (error == 0) {
    error = ::posix_spawnp(&pid, program, &actions, &attributes, arguments.data(), environ);
  }
  (void)::posix_spawn_file_actions_destroy(&actions);
  (void)::posix_spawnattr_destroy(&attributes);
  if (error != 0) return fail_errno(error, "start the device process");
  return std::unique_ptr<Child>(new Child(pid, std::move(ours)));
}

void Child::kill() const {
  if (!ended_) (void)::kill(pid_, SIGKILL);
}

std::optional<std::string> Child::ended() {
  if (ended_) return ended_;
  int status = 0;
  const pid_t got = ::waitpid(pid_, &status, WNOHANG);
  if (got == pid_) ended_ = describe(status);
  if (got < 0 && errno == ECHILD) ended_ = "was reaped by another";
  return ended_;
}

Child::~Child() {
  kill();
  const TimePoint give_up = SteadyClock().now() + kReapDeadline;
  while (!ended() && SteadyClock().now() < give_up) std::this_thread::sleep_for(kReapLook);
  if (!ended_) log::error("device.not_reaped", "pid", pid_, "hint", "it hangs in a driver");
}

}  // namespace rekindle::device
