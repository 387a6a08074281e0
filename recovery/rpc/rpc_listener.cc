#include "recovery/rpc/rpc_listener.h"

#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "recovery/rpc/address.h"
#include "src/base/log.h"

namespace rekindle::rpc {

namespace asio = boost::asio;

namespace {

constexpr int kBacklog = 1024;
constexpr int kAcceptsPerWake = 64;
constexpr std::chrono::milliseconds kPause{100};

int open_spare() { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); }

Failure listen_failed(const std::string& address, int error_number) {
  switch (error_number) {
    case EADDRINUSE:
      return fail(ErrorCode::kUnavailable,
                  "listen on {}: another process uses this port; stop it or choose another (port 0 "
                  "takes any free one)",
                  address);
    case EADDRNOTAVAIL:
      return fail(ErrorCode::kInvalid, "listen on {}: this host does not have that address",
                  address);
    default:
      return fail_errno(error_number, fmt::format("listen on {}", address));
  }
}

}  // namespace

Listener::Listener(const asio::any_io_executor& executor, UniqueFd fd, std::string unix_path,
                   OnAccept on_accept, std::function<void()> on_exhausted)
    : descriptor_(executor, fd.release()),
      pause_(executor),
      spare_(open_spare()),
      unix_path_(std::move(unix_path)),
      on_accept_(std::move(on_accept)),
      on_exhausted_(std::move(on_exhausted)) {}

Listener::~Listener() { close(); }

void Listener::start() { wait(); }

void Listener::close() {
  if (closed_) return;
  closed_ = true;
  if (!unix_path_.empty()) ::unlink(unix_path_.c_str());
  boost::system::error_code ignored;
  descriptor_.close(ignored);
  pause_.cancel();
}

void Listener::wait() {
  if (closed_) return;
  descriptor_.async_wait(asio::posix::stream_descriptor::wait_read,
                         [self = shared_from_this()](const boost::system::error_code& error) {
                           if (!error) self->accept_some();
                         });
}

void Listener::accept_some() {
  for (int i = 0; i < kAcceptsPerWake && !closed_; ++i) {
    sockaddr_storage storage{};
    socklen_t size = sizeof storage;
    UniqueFd fd(::accept4(descriptor_.native_handle(), reinterpret_cast<sockaddr*>(&storage), &size,
                          SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (errno == EAGAIN) break;
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        return shed(errno);
      }
      // This connection failed before it was accepted.
      continue;
    }
    shedding_ = false;
    const bool is_unix = !unix_path_.empty();
    const Socket::protocol_type protocol(is_unix ? AF_UNIX : storage.ss_family,
                                         is_unix ? 0 : IPPROTO_TCP);
    boost::system::error_code error;
    Socket socket(descriptor_.get_executor());
    socket.assign(protocol, fd.get(), error);
    // The limit of epoll.
    if (error) return shed(error.value());
    fd.release();
    on_accept_(std::move(socket),
               is_unix ? "unix" : to_string(Endpoint(&storage, size, IPPROTO_TCP)));
  }
  wait();
}

void Listener::shed(int error_number) {
  if (!shedding_) {
    log::warn("rpc.shed", "error", errno_error(error_number, "accept"), "action",
              "new connections are closed until descriptors are free; raise ulimit -n");
  }
  shedding_ = true;
  spare_.reset();
  UniqueFd(::accept4(descriptor_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC)).reset();
  on_exhausted_();
  spare_.reset(open_spare());
  pause();
}

void Listener::pause() {
  pause_.expires_after(kPause);
  pause_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
    if (!error) self->wait();
  });
}

Result<UniqueFd> listen_tcp(const std::string& address, std::string& bound) {
  TRY(const HostPort parsed, HostPort::parse(address));
  TRY(const std::vector<Endpoint> endpoints, resolve_blocking(parsed));
  const Endpoint& endpoint = endpoints.front();
  UniqueFd fd(::socket(endpoint.data()->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK,
                       IPPROTO_TCP));
  if (!fd) return listen_failed(address, errno);
  const int on = 1;
  (void)::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (endpoint.data()->sa_family == AF_INET6) {
    // "[::]:7400" also serves IPv4.
    const int off = 0;
    (void)::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
  }
  if (::bind(fd.get(), endpoint.data(), static_cast<socklen_t>(endpoint.size())) != 0 ||
      ::listen(fd.get(), kBacklog) != 0) {
    return listen_failed(address, errno);
  }
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&storage), &size) != 0) {
    return listen_failed(address, errno);
  }
  bound = to_string(Endpoint(&storage, size, IPPROTO_TCP));
  return fd;
}

}  // namespace rekindle::rpc
