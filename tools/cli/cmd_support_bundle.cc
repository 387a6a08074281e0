#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spawn.h>

#include "src/base/clock.h"
#include "src/base/unique_fd.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "tools/cli/remote.h"
#include "tools/cli/scratch_directory.h"

// `rekindle support-bundle`: what somebody needs who looks for a problem from afar.
namespace rekindle::cli {
namespace {

namespace fs = std::filesystem;

// Exit codes of `timeout`, and of a program that is not installed.
constexpr int kTimedOut = 124;
constexpr int kKilled = 137;
constexpr int kNotInstalled = 127;
constexpr std::chrono::milliseconds kShortestTimeout{100};
constexpr std::chrono::milliseconds kLookAtProgram{10};
// Longer than `timeout` takes to kill its program.
constexpr std::chrono::seconds kProgramEndDeadline{5};

struct BundleArgs {
  std::string to;
  std::string timeout = "20s";
};

// A program whose output becomes a file of the bundle.
struct Probe {
  std::string file;
  std::vector<std::string> command;
};

std::vector<Probe> probes(const Settings& settings, const std::string& self) {
  const auto own = [&](std::vector<std::string> words) {
    words.insert(words.begin(), self);
    words.insert(words.end(), {"--quiet", "--store", settings.store});
    add_credential_words(settings, words);
    if (!settings.coordinator.empty()) {
      words.insert(words.end(), {"--coordinator", settings.coordinator});
    }
    return words;
  };
  const std::string agent = "unix:" + agent::agent_socket(settings.store).string();
  std::vector<Probe> list{
      {"version.json", {self, "version", "--json"}},
      {"doctor.txt", own({"doctor"})},
      {"topo.json", own({"topo", "--json"})},
      {"agent-status.json", own({"status", "--json", "--agent", agent})},
      {"agent-events.jsonl", own({"events", "--json"})},
  };
  if (!settings.coordinator.empty()) {
    list.push_back({"fleet-status.json", own({"status", "--json"})});
    list.push_back({"fleet-events.jsonl", own({"events", "--fleet", "--json"})});
  }
  for (const std::string daemon : {"agent", "coordinator"}) {
    std::vector<std::string> words{self, "config", "show", daemon};
    if (!settings.config.empty()) words.push_back(settings.config);
    list.push_back({daemon + "-settings.txt", std::move(words)});
  }
  if (!settings.config.empty()) list.push_back({"rekindle.toml", {"cat", settings.config}});
  const std::vector<Probe> of_host{
      {"host/journal.txt",
       {"journalctl", "--no-pager", "--output=short-iso-precise", "--lines=20000",
        "--unit=rekindle-agent", "--unit=rekindle-coordinator"}},
      {"host/kernel.txt", {"dmesg", "--ctime"}},
      {"host/system.txt", {"uname", "-a"}},
      {"host/release.txt", {"cat", "/etc/os-release"}},
      {"host/cpus.txt", {"lscpu"}},
      {"host/memory.txt", {"cat", "/proc/meminfo"}},
      {"host/mounts.txt", {"cat", "/proc/mounts"}},
      {"host/space.txt", {"df", "-h"}},
      {"host/limits.txt", {"sh", "-c", "ulimit -a"}},
      {"host/network.txt", {"ip", "-statistics", "address"}},
      {"host/sockets.txt", {"ss", "--tcp", "--listening", "--numeric", "--processes"}},
      {"host/rdma-links.txt", {"rdma", "-d", "link"}},
      {"host/rdma-devices.txt", {"ibv_devinfo", "-v"}},
      {"host/gpus.txt", {"nvidia-smi", "-q"}},
      {"host/gpu-topology.txt", {"nvidia-smi", "topo", "-m"}},
  };
  list.insert(list.end(), of_host.begin(), of_host.end());
  return list;
}

// Runs programs, one after the other, until a signal comes.
class Programs {
 public:
  // Runs it to its end. Output and errors go to `file`. The result is the exit code, or 128 and the
  // number of a signal. nullopt: a signal has come, and the program has ended.
  Result<std::optional<int>> run(std::vector<std::string> words, const fs::path& file) {
    TRY(const pid_t child, start(std::move(words), file));
    bool told = false;
    TimePoint give_up{};
    for (;;) {
      int status = 0;
      const pid_t ended = ::waitpid(child, &status, WNOHANG);
      if (ended < 0 && errno != EINTR) return fail_errno(errno, "waitpid");
      if (ended == child && told) return std::nullopt;
      if (ended == child) {
        return WIFEXITED(status) ? WEXITSTATUS(status) : kExitSignal + WTERMSIG(status);
      }
      if (told) {
        if (steady_now() > give_up) ::kill(child, SIGKILL);
        std::this_thread::sleep_for(kLookAtProgram);
      } else if (interrupts_.within(kLookAtProgram)) {
        // `timeout` passes it on, and kills a program that stays.
        told = ::kill(child, SIGTERM) == 0;
        give_up = steady_now() + kProgramEndDeadline;
      }
    }
  }
  // After a signal.
  int exit_code() const { return interrupts_.exit_code(); }

 private:
  // With no signal blocked.
  static Result<pid_t> start(std::vector<std::string> words, const fs::path& file) {
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, file.c_str(),
                                       O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ::posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
    posix_spawnattr_t attributes;
    ::posix_spawnattr_init(&attributes);
    sigset_t none;
    ::sigemptyset(&none);
    ::posix_spawnattr_setsigmask(&attributes, &none);
    ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    pid_t child = -1;
    const int error =
        ::posix_spawnp(&child, arguments.front(), &actions, &attributes, arguments.data(), environ);
    ::posix_spawnattr_destroy(&attributes);
    ::posix_spawn_file_actions_destroy(&actions);
    if (error != 0) return fail_errno(error, arguments.front());
    return child;
  }

  Interrupts interrupts_;
};

std::string outcome_of(int code) {
  switch (code) {
    case 0:
      return "ok";
    case kTimedOut:
    case kKilled:
      return "took too long";
    case kNotInstalled:
      return "not installed";
    default:
      return fmt::format("exit code {}", code);
  }
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "host";
  return name.data();
}

Result<int> support_bundle(const Settings& settings, const BundleArgs& args) {
  TRY(const auto timeout, parse_duration("--timeout", args.timeout));
  if (timeout < kShortestTimeout) {
    return fail(ErrorCode::kInvalid, "--timeout: {} is too short, 100ms is the shortest",
                args.timeout);
  }
  const std::string seconds = fmt::format("{:.3f}", std::chrono::duration<double>(timeout).count());
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (error) return fail_errno(error.value(), "/proc/self/exe");
  const std::string name = fmt::format("rekindle-support-{}-{:%Y%m%dT%H%M%SZ}", host_name(),
                                       fmt::gmtime(std::time(nullptr)));
  const fs::path to = args.to.empty() ? fs::path(name + ".tar.gz") : fs::path(args.to);
  // From here on a signal leaves nothing behind.
  Programs programs;
  // Made first, so that a bundle without a place costs no minute. Nobody else may read it.
  UniqueFd made(::open(to.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!made) return fail_errno(errno, to.string());
  made.reset();

  // nullopt: a signal has come.
  const auto assemble = [&]() -> Result<std::optional<Json>> {
    std::error_code failed;
    const fs::path temporary = fs::temp_directory_path(failed);
    if (failed) return fail_errno(failed.value(), "the directory for temporary files");
    TRY(const auto work, ScratchDirectory::create(temporary, "rekindle-support"));
    const fs::path inside = work->path() / name;
    fs::create_directories(inside / "host", failed);
    if (failed) return fail_errno(failed.value(), inside.string());
    Json files = Json::array();
    for (const Probe& probe : probes(settings, self.string())) {
      std::vector<std::string> words{"timeout", "--kill-after=1", seconds};
      words.insert(words.end(), probe.command.begin(), probe.command.end());
      TRY(const auto code, programs.run(std::move(words), inside / probe.file));
      if (!code) return std::nullopt;
      files.push_back({{"file", probe.file},
                       {"command", fmt::format("{}", fmt::join(probe.command, " "))},
                       {"outcome", outcome_of(*code)}});
    }
    Json about{{"host", host_name()},
               {"time", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
               {"version", build_info().version},
               {"files", std::move(files)}};
    std::ofstream(inside / "about.json") << about.dump(2) << "\n";
    TRY(const auto code,
        programs.run({"tar", "--create", "--gzip", "--owner=0", "--group=0", "--file",
                      fs::absolute(to).string(), "--directory", work->path().string(), name},
                     work->path() / "tar.log"));
    if (!code) return std::nullopt;
    if (*code != 0) return fail(ErrorCode::kInternal, "tar could not write {}", to.string());
    return about;
  };
  auto assembled = assemble();
  if (!assembled || !*assembled) {
    fs::remove(to, error);
    if (assembled) return programs.exit_code();
    return fail(std::move(assembled).error());
  }
  Json about = **std::move(assembled);
  std::string missing;
  for (const Json& file : about["files"]) {
    if (file["outcome"] == "ok") continue;
    missing += fmt::format("  {}: {}\n", file["file"].get<std::string>(),
                           file["outcome"].get<std::string>());
  }
  std::string text = fmt::format(
      "{}: what this host and its daemons say now. It has no secret and no weights, but names of "
      "hosts, models and users, and addresses: look at it before you send it.\n",
      to.string());
  if (!missing.empty()) text += "not complete:\n" + missing;
  about["bundle"] = to.string();
  print_result(settings.json, about, text);
  return kExitOk;
}

}  // namespace

void add_support_bundle(Command& app, Session& session) {
  Command sub = app.command(
      "support-bundle",
      "Write what this host and its daemons say now to one file, for somebody who looks for a\n"
      "problem from afar: versions, doctor, status, events, logs of the units, and the host's\n"
      "hardware. With --coordinator the status of the fleet, too. It reads no secret and no "
      "weights.");
  auto args = std::make_shared<BundleArgs>();
  sub.option("--to", args->to, "The file [rekindle-support-HOST-TIME.tar.gz]").type_name("FILE");
  sub.option("--timeout", args->timeout, "The most time that each command may take [20s]")
      .type_name("TIME");
  sub.runs(session, "support-bundle",
           [&session, args] { return support_bundle(session.settings, *args); });
}

}  // namespace rekindle::cli
