#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <thread>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/bench/bench_run.h"
#include "transport/registry.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::bench {
namespace {

// What the child tells its parent, through a pipe.
struct Ready {
  transport::RegionKey region;
  std::uint16_t raw_port = 0;
  std::uint32_t endpoint_bytes = 0;
  char endpoint[4096] = {};
};

bool send_all(int socket, const std::byte* data, std::uint64_t size) {
  while (size != 0) {
    const ssize_t n = ::send(socket, data, size, MSG_NOSIGNAL);
    if (n <= 0) return false;
    data += n;
    size -= static_cast<std::uint64_t>(n);
  }
  return true;
}

// One plain stream: answers requests until the client hangs up.
void serve_raw_stream(UniqueFd socket, std::span<const std::byte> pool, std::uint64_t pace) {
  if (pace != 0) {
    (void)::setsockopt(socket.get(), SOL_SOCKET, SO_MAX_PACING_RATE, &pace, sizeof pace);
  }
  constexpr std::uint64_t kSendBytes = 1 << 20;
  RawRequest request;
  while (::recv(socket.get(), &request, sizeof request, MSG_WAITALL) ==
         static_cast<ssize_t>(sizeof request)) {
    std::uint64_t at = request.offset % pool.size();
    while (request.bytes != 0) {
      const std::uint64_t size = std::min({request.bytes, kSendBytes, pool.size() - at});
      if (!send_all(socket.get(), pool.data() + at, size)) return;
      at = (at + size) % pool.size();
      request.bytes -= size;
    }
  }
}

Result<std::uint16_t> start_raw_server(std::span<const std::byte> pool, std::uint64_t pace,
                                       const std::string& congestion) {
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  if (!congestion.empty()) {
    (void)::setsockopt(listener.get(), IPPROTO_TCP, TCP_CONGESTION, congestion.data(),
                       static_cast<socklen_t>(congestion.size()));
  }
  if (!listener ||
      ::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listener.get(), 128) != 0 ||
      ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return fail_errno(errno, "listen for plain sockets");
  }
  std::thread([listener = std::move(listener), pool, pace] {
    while (true) {
      UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!socket) return;
      const int on = 1;
      (void)::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      std::thread(serve_raw_stream, std::move(socket), pool, pace).detach();
    }
  }).detach();
  return ntohs(address.sin_port);
}

// The child's life; never returns.
[[noreturn]] void serve(const Pool& pool, const SourceOptions& options,
                        const transport::PathTarget& target, int leash, int report,
                        int handshakes) {
  const auto give_up = [](const Error& error) {
    ::dprintf(STDERR_FILENO, "rekindle bench: source process: %s\n", error.message().c_str());
    ::_exit(1);
  };
  transport::SegmentRegistry registry;
  Ready ready;
  ready.region = registry.add(pool.bytes(), pool.fd(), 0, {}, nullptr);
  registry.admit({.token = target.token,
                  .puller = "bench",
                  .regions = {ready.region},
                  .max_bytes_per_second = options.link_bytes_per_second});

  std::unique_ptr<transport::Server> server;
  std::unique_ptr<VerbsSource> verbs;
  if (options.transport == "tcp") {
    auto made = transport::tcp::TcpServer::create({.listen_host = "127.0.0.1",
                                                   .congestion = options.tcp_congestion,
                                                   .max_streams_per_session = options.streams},
                                                  registry, target.incarnation);
    if (!made) give_up(made.error());
    server = std::move(*made);
  } else if (options.transport == "verbs") {
    auto made = VerbsSource::create(options.fabric, registry, target.incarnation);
    if (!made) give_up(made.error());
    verbs = std::move(*made);
  } else {
    auto made = transport::shm::ShmServer::create({}, registry, target.incarnation);
    if (!made) give_up(made.error());
    server = std::move(*made);
  }
  const auto raw_port = start_raw_server(
      pool.bytes(), options.link_bytes_per_second / options.streams, options.tcp_congestion);
  if (!raw_port) give_up(raw_port.error());
  ready.raw_port = *raw_port;
  const std::string endpoint = (verbs != nullptr ? verbs->server() : *server).endpoint("127.0.0.1");
  if (endpoint.size() > sizeof ready.endpoint) ::_exit(1);
  ready.endpoint_bytes = static_cast<std::uint32_t>(endpoint.size());
  std::memcpy(ready.endpoint, endpoint.data(), endpoint.size());
  if (::write(report, &ready, sizeof ready) != sizeof ready) ::_exit(1);
  if (verbs != nullptr) {
    answer_handshakes(verbs->server(), target.token, handshakes);
    ::_exit(0);
  }
  char end = 0;
  while (::read(leash, &end, 1) < 0 && errno == EINTR) {
  }
  ::_exit(0);
}

Result<std::pair<UniqueFd, UniqueFd>> make_pipe() {
  int fds[2] = {-1, -1};
  if (::pipe2(fds, O_CLOEXEC) != 0) return fail_errno(errno, "pipe");
  return std::pair{UniqueFd(fds[0]), UniqueFd(fds[1])};
}

}  // namespace

Result<std::unique_ptr<SourceProcess>> SourceProcess::start(const Pool& pool,
                                                            const SourceOptions& options) {
  TRY(auto leash, make_pipe());
  TRY(auto report, make_pipe());
  std::unique_ptr<SourceProcess> source(new SourceProcess);
  int sockets[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return fail_errno(errno, "socketpair");
  }
  source->handshakes_.reset(sockets[0]);
  const UniqueFd theirs(sockets[1]);
  source->target_ = {options.transport, {}, SessionToken::random(), Incarnation::random()};
  const pid_t parent = ::getpid();
  source->pid_ = ::fork();
  if (source->pid_ < 0) return fail_errno(errno, "fork a source process");
  if (source->pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    leash.second.reset();
    source->handshakes_.reset();
    serve(pool, options, source->target_, leash.first.get(), report.second.get(), theirs.get());
  }
  report.second.reset();
  source->leash_ = std::move(leash.second);
  Ready ready;
  if (::read(report.first.get(), &ready, sizeof ready) != sizeof ready) {
    return fail(ErrorCode::kUnavailable, "a source process did not start");
  }
  source->region_ = ready.region;
  source->raw_port_ = ready.raw_port;
  source->target_.endpoint.assign(ready.endpoint, ready.endpoint_bytes);
  return source;
}

SourceProcess::~SourceProcess() {
  if (pid_ <= 0) return;
  leash_.reset();
  ::kill(pid_, SIGKILL);  // it has nothing to save
  ::waitpid(pid_, nullptr, 0);
}

double SourceProcess::cpu_seconds() const {
  clockid_t clock = 0;
  timespec used{};
  if (::clock_getcpuclockid(pid_, &clock) != 0 || ::clock_gettime(clock, &used) != 0) return 0;
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

}  // namespace rekindle::bench
