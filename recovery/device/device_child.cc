#include "recovery/device/device_child.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <spawn.h>

#include "src/base/duplicate_fd.h"
#include "src/base/log.h"
#include "src/ipc/channel.h"

namespace rekindle::device {

namespace {

// After it, the process is left to be reaped when this process ends.
constexpr std::chrono::milliseconds kReapDeadline{50};
// How often an end is looked for where the kernel has no pidfds.
constexpr std::chrono::milliseconds kLookWithoutPidfd{20};

UniqueFd open_pidfd(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

std::string describe(int status) {
  if (WIFSIGNALED(status)) {
    return fmt::format("was killed by signal {} ({})", WTERMSIG(status),
                       ::strsignal(WTERMSIG(status)));
  }
  const int code = WEXITSTATUS(status);
  if (code == kDeviceLostExit) return "ended because a GPU fails; its log says why";
  return fmt::format("exited with code {}", code);
}

// The process is a program of its own: it inherits no signal mask.
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
  // dup2() onto itself would leave the descriptor to be closed on exec.
  if (theirs.get() == kSocket) {
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

Child::Child(pid_t pid, UniqueFd socket)
    : pid_(pid), pidfd_(open_pidfd(pid)), socket_(std::move(socket)) {}

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

async::Task<void> Child::wait_ended(TimePoint deadline) const {
  namespace asio = boost::asio;
  auto pidfd = duplicate(pidfd_.get(), "keep a pidfd");
  if (!pidfd) {
    co_await async::sleep_until(std::min(deadline, steady_now() + kLookWithoutPidfd));
    co_return;
  }
  const auto executor = co_await asio::this_coro::executor;
  // Shared with the timer, whose handler may run after this coroutine.
  const auto watch = std::make_shared<asio::posix::stream_descriptor>(executor, pidfd->release());
  asio::steady_timer timer(executor, deadline);
  timer.async_wait([watch](const boost::system::error_code& error) {
    boost::system::error_code ignored;
    if (!error) watch->cancel(ignored);
  });
  boost::system::error_code ended;
  co_await watch->async_wait(asio::posix::stream_descriptor::wait_read,
                             asio::redirect_error(asio::use_awaitable, ended));
}

Child::~Child() {
  kill();
  if (!ended() && pidfd_) {
    (void)ipc::wait_for(pidfd_.get(), POLLIN, steady_now() + kReapDeadline);
    (void)ended();
  }
  if (!ended_) log::error("device.not_reaped", "pid", pid_, "hint", "it hangs in a driver");
}

}  // namespace rekindle::device
