#include "tools/cli/first_token.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <spawn.h>

#include "src/base/worker_pool.h"

extern char** environ;

namespace rekindle::cli {
namespace {

constexpr std::chrono::milliseconds kBetweenRequests{50};
constexpr std::chrono::milliseconds kCommandCheck{10};
// A dying server may accept a request that it never answers.
constexpr std::chrono::seconds kLongestRequest{30};
constexpr std::string_view kScheme = "http://";

struct Target {
  rpc::HostPort server;
  std::string path;
};

Result<Target> parse_url(const std::string& url) {
  if (!url.starts_with(kScheme)) {
    return fail(ErrorCode::kInvalid,
                "--first-token '{}': write http://HOST:PORT/PATH; for anything else, give "
                "--first-token-command",
                url);
  }
  const std::string rest = url.substr(kScheme.size());
  const std::size_t slash = rest.find('/');
  std::string address = rest.substr(0, slash);
  if (address.find(':') == std::string::npos) address += ":80";
  auto server = rpc::HostPort::parse(address);
  if (!server) return fail(std::move(server).error().with_context("--first-token"));
  return Target{std::move(*server), slash == std::string::npos ? "/" : rest.substr(slash)};
}

// The command in a new process group, without input and output, and with default signals.
Result<pid_t> spawn_shell(const std::string& command) {
  posix_spawn_file_actions_t files;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    ::posix_spawn_file_actions_addopen(&files, fd, "/dev/null", O_WRONLY, 0);
  }
  sigset_t none;
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setpgroup(&attributes, 0);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  std::string shell = "/bin/sh", option = "-c", text = command;
  const std::array<char*, 4> argv{shell.data(), option.data(), text.data(), nullptr};
  pid_t child = -1;
  const int error = ::posix_spawn(&child, shell.c_str(), &files, &attributes, argv.data(), environ);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&files);
  if (error != 0) return fail_errno(error, "start the first-token command");
  return child;
}

}  // namespace

Result<std::unique_ptr<FirstToken>> FirstToken::create(const FirstTokenArgs& args) {
  if (args.url.empty() && !args.body.empty()) {
    return fail(ErrorCode::kInvalid, "--first-token-body needs the URL of --first-token");
  }
  if (!args.url.empty() && !args.command.empty()) {
    return fail(ErrorCode::kInvalid, "give --first-token or --first-token-command, not both");
  }
  if (args.url.empty() && args.command.empty()) return nullptr;
  std::unique_ptr<FirstToken> made(new FirstToken(args));
  if (!args.url.empty()) {
    TRY(Target target, parse_url(args.url));
    made->path_ = std::move(target.path);
    made->client_.emplace(std::move(target.server));
  }
  return made;
}

FirstToken::~FirstToken() {
  stopping_.store(true);
  if (!thread_.joinable()) return;
  // Again and again, because a request may be about to begin.
  while (client_ && !over_.load()) {
    client_->interrupt();
    std::this_thread::sleep_for(kCommandCheck);
  }
  thread_.join();
}

Result<void> FirstToken::start(TimePoint give_up) {
  if (thread_.joinable()) return {};
  // The thread of the command deals with signals.
  const SignalsBlocked blocked;
  try {
    thread_ = std::thread([this, give_up] {
      ask_until(give_up);
      over_.store(true);
    });
  } catch (const std::system_error& error) {
    return fail(ErrorCode::kExhausted, "start a thread: {}", error.what());
  }
  return {};
}

std::optional<TimePoint> FirstToken::succeeded() const {
  const std::lock_guard lock(mutex_);
  return succeeded_;
}

std::string FirstToken::last_failure() const {
  const std::lock_guard lock(mutex_);
  return last_failure_;
}

void FirstToken::ask_until(TimePoint give_up) {
  while (!stopping_.load() && steady_now() < give_up) {
    const TimePoint deadline = std::min(give_up, steady_now() + kLongestRequest);
    const auto answer = client_ ? ask_server(deadline) : run_command(deadline);
    {
      const std::lock_guard lock(mutex_);
      if (answer) {
        succeeded_ = steady_now();
        return;
      }
      last_failure_ = answer.error().message();
    }
    if (!stopping_.load()) std::this_thread::sleep_for(kBetweenRequests);
  }
}

Result<void> FirstToken::ask_server(TimePoint deadline) {
  auto answer = args_.body.empty() ? client_->get(path_, deadline)
                                   : client_->post(path_, args_.body, deadline);
  if (!answer) return fail(std::move(answer).error().with_context(args_.url));
  if (answer->status >= 200 && answer->status < 300) return {};
  return fail(ErrorCode::kUnavailable, "{} answers with HTTP status {}", args_.url, answer->status);
}

Result<void> FirstToken::run_command(TimePoint deadline) const {
  TRY(const pid_t child, spawn_shell(args_.command));
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (stopping_.load() || steady_now() >= deadline) {
      (void)::kill(-child, SIGKILL);
      (void)::waitpid(child, &status, 0);
      return fail(ErrorCode::kTimeout, "the first-token command did not end in time");
    }
    std::this_thread::sleep_for(kCommandCheck);
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return {};
  return fail(ErrorCode::kUnavailable, "the first-token command {}",
              WIFEXITED(status) ? fmt::format("exits with {}", WEXITSTATUS(status))
                                : fmt::format("died by signal {}", WTERMSIG(status)));
}

}  // namespace rekindle::cli
