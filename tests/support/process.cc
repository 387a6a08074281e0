#include "tests/support/process.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

extern char** environ;

namespace rekindle::testing {
namespace {

using Deadline = std::chrono::steady_clock::time_point;

[[noreturn]] void raise_errno(std::string_view what) {
  throw std::runtime_error(fmt::format("{}: {}", what, std::strerror(errno)));
}

UniqueFd memory_file(const char* name) {
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC));
  if (!fd) raise_errno("memfd_create");
  // Several processes may write at once, and the kernel does not guard the offset that they share.
  if (::fcntl(fd.get(), F_SETFL, O_APPEND) != 0) raise_errno("fcntl");
  return fd;
}

std::string read_all(int fd) {
  std::string text;
  std::array<char, 16384> buffer;
  for (off_t offset = 0;;) {
    const ssize_t got = ::pread(fd, buffer.data(), buffer.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return text;
    text.append(buffer.data(), static_cast<std::size_t>(got));
    offset += got;
  }
}

std::vector<std::string> environment(const Spawn& spawn) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    if (text.starts_with("REKINDLE_")) continue;
    bool replaced = false;
    for (const auto& [key, value] : spawn.env) replaced |= text.starts_with(key + "=");
    if (!replaced) result.emplace_back(text);
  }
  for (const auto& [key, value] : spawn.env) result.push_back(key + "=" + value);
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& text : strings) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

struct Terminal {
  UniqueFd master, slave;
};
Terminal open_terminal() {
  Terminal terminal;
  terminal.master = UniqueFd(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK));
  std::array<char, 64> name{};
  if (!terminal.master || ::grantpt(terminal.master.get()) != 0 ||
      ::unlockpt(terminal.master.get()) != 0 ||
      ::ptsname_r(terminal.master.get(), name.data(), name.size()) != 0) {
    raise_errno("pseudo-terminal");
  }
  terminal.slave = UniqueFd(::open(name.data(), O_RDWR | O_NOCTTY | O_CLOEXEC));
  const winsize size{.ws_row = 30, .ws_col = 100, .ws_xpixel = 0, .ws_ypixel = 0};
  if (!terminal.slave || ::ioctl(terminal.slave.get(), TIOCSWINSZ, &size) != 0) {
    raise_errno("pseudo-terminal");
  }
  return terminal;
}

// Between fork and exec: async-signal-safe calls only. Returns only on failure.
void become(const Spawn& spawn, char* const* argv, char* const* envp, std::array<int, 3> streams,
            pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(126);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  for (int i = 0; i < 3; ++i) {
    if (::dup2(streams[static_cast<std::size_t>(i)], i) < 0) return;
  }
  for (const auto& [resource, limit] : spawn.limits) {
    if (::setrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0) return;
  }
  if (!spawn.cwd.empty() && ::chdir(spawn.cwd.c_str()) != 0) return;
  ::execvpe(argv[0], argv, envp);
}

}  // namespace

Process::Process(Spawn spawn) {
  if (spawn.argv.empty()) throw std::runtime_error("nothing to run");
  const UniqueFd input = memory_file("stdin");
  if (::pwrite(input.get(), spawn.input.data(), spawn.input.size(), 0) !=
      static_cast<ssize_t>(spawn.input.size())) {
    raise_errno("write stdin");
  }
  Terminal terminal;
  if (spawn.terminal) terminal = open_terminal();
  out_ = memory_file("stdout");
  err_ = memory_file("stderr");
  std::array<int, 3> streams{input.get(), out_.get(), err_.get()};
  if (spawn.terminal) streams[1] = streams[2] = terminal.slave.get();

  std::vector<std::string> env = environment(spawn);
  const std::vector<char*> argv = pointers(spawn.argv);
  const std::vector<char*> envp = pointers(env);
  std::array<int, 2> report{};  // closed by exec, or the errno of what failed
  if (::pipe2(report.data(), O_CLOEXEC) != 0) raise_errno("pipe");
  const UniqueFd report_read(report[0]);
  UniqueFd report_write(report[1]);
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) raise_errno("fork");
  if (pid_ == 0) {
    become(spawn, argv.data(), envp.data(), streams, parent);
    const int failure = errno;
    (void)!::write(report_write.get(), &failure, sizeof failure);
    ::_exit(127);
  }
  report_write.reset();
  pidfd_ = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  terminal_ = std::move(terminal.master);
  int failure = 0;
  if (::read(report_read.get(), &failure, sizeof failure) == sizeof failure) {
    ::waitpid(pid_, nullptr, 0);
    errno = failure;
    raise_errno(fmt::format("start {}", spawn.argv.front()));
  }
}

Process::~Process() {
  if (!exit_) kill();
}

void Process::reap(int status) {
  exit_ = WIFEXITED(status) ? Exit{WEXITSTATUS(status), 0} : Exit{-1, WTERMSIG(status)};
}

bool Process::running() {
  if (exit_) return false;
  drain_terminal();
  int status = 0;
  if (::waitpid(pid_, &status, WNOHANG) == pid_) reap(status);
  return !exit_;
}

void Process::signal(int number) {
  if (running() && ::kill(pid_, number) != 0) raise_errno("kill");
}

bool Process::wait_until(milliseconds deadline, const std::function<bool()>& done) {
  const Deadline end = std::chrono::steady_clock::now() + deadline;
  for (;;) {
    const bool alive = running();  // before done(): what it wrote last counts
    if (done()) return true;
    if (!alive || std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(2ms);
  }
}

std::optional<Exit> Process::wait(milliseconds deadline) {
  wait_until(deadline, [this] { return exit_.has_value(); });
  return exit_;
}

Exit Process::kill() {
  if (running()) {
    ::kill(pid_, SIGKILL);
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    reap(status);
  }
  return *exit_;
}

void Process::drain_terminal() {
  if (!terminal_) return;
  std::array<char, 4096> buffer;
  for (;;) {
    const ssize_t got = ::read(terminal_.get(), buffer.data(), buffer.size());
    if (got <= 0) return;  // nothing now, or EIO: no writer any more
    terminal_text_.append(buffer.data(), static_cast<std::size_t>(got));
  }
}

std::string Process::out() {
  drain_terminal();
  return terminal_ ? terminal_text_ : read_all(out_.get());
}

std::string Process::err() { return read_all(err_.get()); }

bool Process::wait_for_out(std::string_view text, milliseconds deadline) {
  return wait_until(deadline, [&] { return out().find(text) != std::string::npos; });
}

bool Process::wait_for_err(std::string_view text, milliseconds deadline) {
  return wait_until(deadline, [&] { return err().find(text) != std::string::npos; });
}

std::string Process::value_after(std::string_view prefix, milliseconds deadline) {
  std::string value;
  wait_until(deadline, [&] {
    const std::string text = out();
    const std::size_t begin = text.find(prefix);
    if (begin == std::string::npos) return false;
    const std::size_t end = text.find('\n', begin);
    if (end == std::string::npos) return false;
    value = text.substr(begin + prefix.size(), end - begin - prefix.size());
    return true;
  });
  return value;
}

Finished run(Spawn spawn, milliseconds deadline) {
  Process process(std::move(spawn));
  Finished finished;
  if (const auto exit = process.wait(deadline)) {
    finished.exit = *exit;
  } else {
    finished.timed_out = true;
    finished.exit = process.kill();
  }
  finished.out = process.out();
  finished.err = process.err();
  return finished;
}

Finished run(std::vector<std::string> argv, milliseconds deadline) {
  Spawn spawn;
  spawn.argv = std::move(argv);
  return run(std::move(spawn), deadline);
}

std::string program(const std::filesystem::path& built) {
  const char* const elsewhere = std::getenv("REKINDLE_TEST_PROGRAMS");
  if (elsewhere == nullptr || *elsewhere == 0) return built.string();
  return (std::filesystem::path(elsewhere) / built.filename()).string();
}

bool eventually(const std::function<bool()>& done, milliseconds deadline) {
  const Deadline end = std::chrono::steady_clock::now() + deadline;
  while (!done()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(5ms);
  }
  return true;
}

bool user_namespaces() { return run({"unshare", "-Urm", "true"}).exit.code == 0; }

std::vector<std::string> on_host(const std::filesystem::path& directory, int number) {
  const auto boot_id = directory / ("boot-id-" + std::to_string(number));
  write_file(boot_id, fmt::format("5eed0000-0000-4000-8000-{:012}\n", number));
  // New rights clear what Process has set for the death of its parent.
  constexpr const char* kScript =
      R"(mount --bind "$0" /proc/sys/kernel/random/boot_id && exec setpriv --pdeathsig KILL "$@")";
  return {"unshare", "-Urm", "sh", "-c", kScript, boot_id.string()};
}

CpuTime cpu_time(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  std::getline(file, text);
  // The name of the program may contain anything: proc(5).
  std::istringstream fields(text.erase(0, text.rfind(')') + 2));
  std::string skip;
  for (int i = 0; i < 11; ++i) fields >> skip;
  double user = 0;
  double system = 0;
  fields >> user >> system;
  const auto ticks = static_cast<double>(::sysconf(_SC_CLK_TCK));
  return {user / ticks, system / ticks};
}

std::uint16_t free_port() {
  static std::minstd_rand random{static_cast<unsigned>(::getpid())};
  // Nobody may listen yet at those that were returned before.
  static std::set<std::uint16_t> returned;
  for (int i = 0; i < 1000; ++i) {
    const auto port = static_cast<std::uint16_t>(20'000 + random() % 12'000);
    if (returned.contains(port)) continue;
    const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
      returned.insert(port);
      return port;
    }
  }
  throw std::runtime_error("no free port");
}

TempDir::TempDir(bool on_tmpfs) {
  const char* base = std::getenv("TMPDIR");
  std::string pattern = on_tmpfs ? "/dev/shm" : (base != nullptr ? base : "/tmp");
  pattern += "/rekindle-test.XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr) raise_errno("mkdtemp " + pattern);
  path_ = pattern;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("read " + path.string());
  std::ostringstream bytes;  // by blocks; byte by byte takes minutes under sanitizers
  bytes << in.rdbuf();
  return std::move(bytes).str();
}

void write_file(const std::filesystem::path& path, std::string_view bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file.flush()) throw std::runtime_error("write " + path.string());
}

}  // namespace rekindle::testing
