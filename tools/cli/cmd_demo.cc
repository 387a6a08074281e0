#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

#include "src/base/clock.h"
#include "src/base/unique_fd.h"
#include "src/base/units.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "tools/cli/sample_model.h"
#include "tools/cli/scratch_directory.h"

// `rekindle demo`: a fleet of real processes of this very binary on loopback ports, with a
// generated model.
namespace rekindle::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::milliseconds kLookAtOutput{10};
constexpr std::chrono::seconds kStepDeadline{60};

std::string contents(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A child process whose output goes to NAME.out and NAME.err. It is killed with this object, and
// with this process.
class DemoProcess {
 public:
  static Result<std::unique_ptr<DemoProcess>> start(const fs::path& directory,
                                                    const std::string& name,
                                                    const std::vector<std::string>& command) {
    auto process = std::unique_ptr<DemoProcess>(new DemoProcess(directory, name));
    TRY_VOID(process->spawn(command));
    return process;
  }
  ~DemoProcess() { kill(); }
  DemoProcess(const DemoProcess&) = delete;
  DemoProcess& operator=(const DemoProcess&) = delete;

  void kill() {
    if (pid_ < 0) return;
    ::kill(pid_, SIGKILL);
    (void)wait();
  }

  // Kills the one child of this process, and not the process itself.
  Result<void> kill_child() const {
    const std::string children = contents(fmt::format("/proc/{0}/task/{0}/children", pid_));
    const pid_t child = std::atoi(children.c_str());
    if (child <= 0) return fail(ErrorCode::kInternal, "{} has no child to kill", name_);
    ::kill(child, SIGKILL);
    return {};
  }

  // The rest of the line that follows the `count`-th occurrence of `text` in the output.
  Result<std::string> wait_for(const std::string& text, int count = 1) {
    const TimePoint give_up = steady_now() + kStepDeadline;
    while (true) {
      const std::string said = contents(out_);
      std::size_t at = said.find(text);
      for (int i = 1; i < count && at != std::string::npos; ++i) at = said.find(text, at + 1);
      const std::size_t end = at == std::string::npos ? at : said.find('\n', at);
      if (end != std::string::npos) return said.substr(at + text.size(), end - at - text.size());
      if (has_ended()) return fail(ErrorCode::kInternal, "{} ended: {}", name_, contents(err_));
      if (steady_now() > give_up) {
        return fail(ErrorCode::kTimeout, "{} did not say '{}' within {} s: {}", name_, text,
                    kStepDeadline.count(), contents(err_));
      }
      std::this_thread::sleep_for(kLookAtOutput);
    }
  }

  // Runs to its end, which must be a success.
  Result<std::string> finish() {
    const TimePoint give_up = steady_now() + kStepDeadline;
    while (!has_ended()) {
      if (steady_now() > give_up) {
        kill();
        return fail(ErrorCode::kTimeout, "{} did not end within {} s: {}", name_,
                    kStepDeadline.count(), contents(err_));
      }
      std::this_thread::sleep_for(kLookAtOutput);
    }
    const int status = wait();
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return contents(out_);
    return fail(ErrorCode::kInternal, "{} failed: {}", name_, contents(err_));
  }

 private:
  DemoProcess(const fs::path& directory, const std::string& name)
      : name_(name), out_(directory / (name + ".out")), err_(directory / (name + ".err")) {}

  Result<void> spawn(const std::vector<std::string>& command) {
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    const UniqueFd out(::open(out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    const UniqueFd err(::open(err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (!out || !err) return fail_errno(errno, out_.string());
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ < 0) return fail_errno(errno, "fork");
    if (pid_ > 0) return {};
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    ::dup2(out.get(), STDOUT_FILENO);
    ::dup2(err.get(), STDERR_FILENO);
    ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }

  bool has_ended() {
    siginfo_t info{};
    return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == pid_;
  }

  int wait() {
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return status;
  }

  const std::string name_;
  const fs::path out_;
  const fs::path err_;
  pid_t pid_ = -1;
};

// Beside the command in a build, in libexec beside bin where it is installed.
Result<std::string> find_worker(const fs::path& self) {
  const fs::path bin = self.parent_path();
  for (const fs::path& path :
       {bin / "example_worker", bin / "../libexec/rekindle/example_worker"}) {
    if (fs::exists(path)) return path.lexically_normal().string();
  }
  return fail(ErrorCode::kNotFound,
              "the example worker is neither in {0} nor in {0}/../libexec/rekindle: install "
              "rekindle completely, or build the target example_worker",
              bin.string());
}

// In memory where it has room for `wanted_bytes`.
Result<std::unique_ptr<ScratchDirectory>> demo_directory(std::uint64_t wanted_bytes) {
  std::error_code error;
  const fs::path memory = "/dev/shm";
  const auto room = fs::space(memory, error);
  const fs::path base =
      !error && room.available > wanted_bytes ? memory : fs::temp_directory_path();
  if (fs::space(base, error).available < wanted_bytes) {
    return fail(ErrorCode::kExhausted, "{} has less than {} free: choose a smaller --gib",
                base.string(), format_bytes(wanted_bytes));
  }
  return ScratchDirectory::create(base, "rekindle-demo");
}

class Demo {
 public:
  Demo(fs::path directory, std::string self, std::string worker)
      : directory_(std::move(directory)), self_(std::move(self)), worker_(std::move(worker)) {}

  Result<void> run(std::uint64_t model_bytes) {
    TRY_VOID(start_fleet());
    TRY_VOID(publish(1, model_bytes));
    TRY_VOID(scale_out());
    TRY_VOID(crash_and_return());
    TRY_VOID(publish(2, model_bytes));
    TRY_VOID(follow_update());
    return pull_by_hand();
  }

 private:
  void say(const std::string& line) {
    print_line(fmt::format("{:6.1f} s  {}", seconds(steady_now() - started_), line));
    std::fflush(stdout);
  }

  Result<std::unique_ptr<DemoProcess>> start(const std::string& name,
                                             std::vector<std::string> words) {
    words.insert(words.begin(), self_);
    return DemoProcess::start(directory_, name, words);
  }
  std::string store(const std::string& host) const { return (directory_ / host).string(); }
  // A command that runs to its end.
  Result<std::string> rekindle(const std::string& name, std::vector<std::string> words) {
    words.insert(words.end(), {"--quiet", "--coordinator", coordinator_});
    TRY(const auto process, start(name, std::move(words)));
    return process->finish();
  }

  Result<void> start_agent(const std::string& host) {
    TRY(agents_[host],
        start("agent-" + host, {"agent", "--node-id", host, "--store", store(host), "--listen",
                                "127.0.0.1:0", "--coordinator", coordinator_}));
    TRY_VOID(agents_[host]->wait_for("listening on "));
    return {};
  }

  Result<void> start_fleet() {
    TRY(processes_["coordinator"],
        start("coordinator", {"coordinator", "--listen", "127.0.0.1:0", "--state",
                              (directory_ / "state").string()}));
    TRY(coordinator_, processes_["coordinator"]->wait_for("coordinator listening on "));
    for (const char* host : {"a", "b", "c"}) TRY_VOID(start_agent(host));
    say(fmt::format("a coordinator on {}, agents a, b and c, each with a store of its own",
                    coordinator_));
    return {};
  }

  Result<void> publish(int version, std::uint64_t bytes) {
    const fs::path model = directory_ / fmt::format("model-{}", version);
    TRY(const SampleModel made,
        make_sample_model(model, bytes, static_cast<std::uint64_t>(version)));
    const TimePoint began = steady_now();
    TRY_VOID(rekindle(
        fmt::format("publish-{}", version),
        {"publish", fmt::format("demo@{}", version), model.string(), "--store", store("a")}));
    say(fmt::format("agent a published demo@{}: {} tensors, {}, in {:.1f} s", version, made.tensors,
                    format_bytes(made.bytes), seconds(steady_now() - began)));
    return {};
  }

  // The `count`-th time that the worker of `host` is ready.
  Result<std::string> ready(const std::string& host, int count) {
    return processes_["worker-" + host]->wait_for("ready: ", count);
  }

  Result<void> scale_out() {
    for (const char* host : {"b", "c"}) {
      const std::string name = fmt::format("worker-{}", host);
      TRY(processes_[name],
          start(name, {"run", "--model", "demo", "--instance", fmt::format("chat-{}", host),
                       "--store", store(host), "--", worker_}));
    }
    for (const char* host : {"b", "c"}) {
      TRY(const std::string line, ready(host, 1));
      say(fmt::format("scale-out: a worker on {} is ready: {}", host, line));
    }
    return {};
  }

  Result<void> crash_and_return() {
    TimePoint killed = steady_now();
    TRY_VOID(processes_["worker-b"]->kill_child());
    TRY(const std::string again, ready("b", 2));
    say(fmt::format("crash: SIGKILL to the worker on b; it is ready again after {:.2f} s: {}",
                    seconds(steady_now() - killed), again));
    killed = steady_now();
    agents_["b"]->kill();
    TRY_VOID(start_agent("b"));
    TRY(const std::string third, ready("b", 3));
    say(fmt::format(
        "crash: SIGKILL to the agent of b, started again; its worker is ready after {:.2f} s: {}",
        seconds(steady_now() - killed), third));
    return {};
  }

  Result<void> follow_update() {
    for (const auto& [host, count] : {std::pair("b", 4), std::pair("c", 2)}) {
      TRY(const std::string line, ready(host, count));
      say(fmt::format("update: the worker on {} follows: {}", host, line));
    }
    return {};
  }

  Result<void> pull_by_hand() {
    const std::string copy = (directory_ / "pulled").string();
    TRY_VOID(rekindle("pull", {"pull", "demo@2", "--to", copy}));
    TRY_VOID(rekindle("verify", {"verify", copy}));
    say("pull: demo@2 pulled into a directory by the command line; every byte matches its digests");
    return {};
  }

  const TimePoint started_ = steady_now();
  const fs::path directory_;
  const std::string self_;
  const std::string worker_;
  std::string coordinator_;
  // Workers end before the agents, the agents before the coordinator.
  std::map<std::string, std::unique_ptr<DemoProcess>> agents_;
  std::map<std::string, std::unique_ptr<DemoProcess>> processes_;
};

struct DemoArgs {
  double gib = 0.25;
  std::string model_only;
};

// Two versions in three stores, the originals and a pulled copy.
constexpr double kCopiesOfModel = 10;

Result<int> run_demo(const DemoArgs& args) {
  const auto bytes = static_cast<std::uint64_t>(args.gib * static_cast<double>(kGiB));
  if (!args.model_only.empty()) {
    TRY(const SampleModel made, make_sample_model(args.model_only, bytes, 1));
    print_line(fmt::format("{}: {} tensors, {} in {} files", printable(args.model_only),
                           made.tensors, format_bytes(made.bytes), made.files));
    return kExitOk;
  }
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (error) return fail_errno(error.value(), "/proc/self/exe");
  TRY(const std::string worker, find_worker(self));
  TRY(const auto directory,
      demo_directory(static_cast<std::uint64_t>(kCopiesOfModel * static_cast<double>(bytes))));
  Demo demo(directory->path(), self.string(), worker);
  TRY_VOID(demo.run(bytes));
  print_line("All of it worked. The same commands run a fleet: see `rekindle --help`.");
  return kExitOk;
}

}  // namespace

void add_demo(Command& app, Session& session) {
  Command sub = app.command("demo",
                            "Run a small fleet on this machine: scale-out, crashes, an update and "
                            "a pull, with a generated model.\n"
                            "It starts a coordinator, three agents and two workers on loopback "
                            "ports, and leaves nothing behind.");
  auto args = std::make_shared<DemoArgs>();
  sub.option("--gib", args->gib, "Approximate size of the model in GiB [0.25]")
      .between(0.01, 4096.0)
      .type_name("N");
  sub.option("--model-only", args->model_only, "Only write the model into this directory")
      .type_name("DIR");
  sub.runs(session, "demo", [args] { return run_demo(*args); });
}

}  // namespace rekindle::cli
