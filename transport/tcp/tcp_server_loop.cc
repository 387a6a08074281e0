#include "transport/tcp/tcp_server_loop.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <latch>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "src/base/log.h"
#include "src/base/worker_pool.h"
#include "transport/tcp/tcp_server_stream.h"
#include "transport/tcp/tcp_socket.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::transport::tcp {
namespace {

constexpr std::uint64_t kListenerId = 1;
constexpr std::uint64_t kWakeId = 2;
constexpr auto kCheckInterval = std::chrono::seconds(1);
constexpr auto kAcceptPause = std::chrono::milliseconds(100);

Result<void> watch(int epoll, int fd, std::uint32_t events, std::uint64_t id) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) return fail_errno(errno, "epoll_ctl");
  return {};
}

}  // namespace

Result<void> ServerLoop::start(int index, Listener* listener, Dealer deal) {
  listener_ = listener;
  deal_ = std::move(deal);
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) return fail_errno(errno, "start a data server thread: epoll_create1");
  wake_fd_.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake_fd_) return fail_errno(errno, "start a data server thread: eventfd");
  TRY_VOID(watch(epoll_.get(), wake_fd_.get(), EPOLLIN, kWakeId));
  if (listener_ != nullptr) {
    TRY_VOID(watch(epoll_.get(), listener_->fd(), EPOLLIN, kListenerId));
  }
  seen_changes_ = context_.registry.change_count();
  thread_ = std::thread([this, index] {
    set_thread_name(fmt::format("rk-tcp-{}", index));
    run();
  });
  return {};
}

void ServerLoop::stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake();
  thread_.join();
}

void ServerLoop::adopt(UniqueFd socket) {
  {
    const std::lock_guard lock(mutex_);
    adopted_.push_back(std::move(socket));
  }
  wake();
}

void ServerLoop::drop_session(const SessionToken& token, std::latch& done) {
  {
    const std::lock_guard lock(mutex_);
    drops_.emplace_back(token, &done);
  }
  wake();
}

void ServerLoop::wake() {
  const std::uint64_t one = 1;
  // A full counter wakes the thread as well.
  (void)!::write(wake_fd_.get(), &one, sizeof one);
}

void ServerLoop::run() {
  // sendfile has no MSG_NOSIGNAL, but a vanished peer must be an error here, not a signal.
  sigset_t pipe_signal;
  ::sigemptyset(&pipe_signal);
  ::sigaddset(&pipe_signal, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &pipe_signal, nullptr);
  while (!stop_) {
    wait_for_events();
    const TimePoint now = std::chrono::steady_clock::now();
    if (accept_again_at_ && now >= *accept_again_at_) {
      pause_accepting(false);
      accept_new();
    }
    check_registry();
    wake_throttled(now);
    give_turns();
    if (now >= next_check_) check_deadlines(now);
  }
  connections_.clear();
}

int ServerLoop::wait_ms(TimePoint now) const {
  if (!ready_.empty()) return 0;
  TimePoint until = TimePoint::max();
  if (!connections_.empty()) until = next_check_;
  for (const auto& [at, id] : throttled_) until = std::min(until, at);
  if (accept_again_at_) until = std::min(until, *accept_again_at_);
  if (until == TimePoint::max()) return -1;
  if (until <= now) return 0;
  return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(until - now).count());
}

void ServerLoop::wait_for_events() {
  std::array<epoll_event, 64> events;
  const int timeout = wait_ms(std::chrono::steady_clock::now());
  const int count =
      ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout);
  for (int i = 0; i < count; ++i) {
    const auto& event = events[static_cast<std::size_t>(i)];
    handle_event(event.data.u64, event.events);
  }
}

void ServerLoop::handle_event(Id id, std::uint32_t events) {
  if (id == kListenerId) return accept_new();
  if (id == kWakeId) {
    std::uint64_t value = 0;
    (void)!::read(wake_fd_.get(), &value, sizeof value);
    return take_inbox();
  }
  if ((events & (EPOLLERR | EPOLLHUP)) != 0) return close(id, false);
  make_ready(id);
}

void ServerLoop::take_inbox() {
  std::vector<UniqueFd> adopted;
  std::vector<std::pair<SessionToken, std::latch*>> drops;
  {
    const std::lock_guard lock(mutex_);
    adopted.swap(adopted_);
    drops.swap(drops_);
    stop_ = stopping_;
  }
  for (auto& socket : adopted) add(std::move(socket));
  for (const auto& [token, done] : drops) {
    std::vector<Id> doomed;
    for (const auto& [id, entry] : connections_) {
      if (entry.connection->admitted() && entry.connection->token() == token) doomed.push_back(id);
    }
    for (const Id id : doomed) close(id, false);
    done->count_down();
  }
}

void ServerLoop::add(UniqueFd socket) {
  const TimePoint now = std::chrono::steady_clock::now();
  if (connections_.empty()) next_check_ = now;
  if (pending_count_ >= max_pending_hellos_) evict_oldest_pending();
  const Id id = next_id_++;
  const int fd = socket.get();
  auto connection = std::make_unique<ServerStream>(std::move(socket), context_, now);
  // Edge-triggered in both directions: turns run until the socket says EAGAIN.
  if (!watch(epoll_.get(), fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, id)) {
    context_.shed.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  connections_.emplace(id, Entry{std::move(connection), false});
  pending_.push_back(id);
  ++pending_count_;
  make_ready(id);
}

void ServerLoop::accept_new() {
  if (accept_again_at_) return;
  std::uint64_t shed = 0;
  const auto outcome = listener_->accept_some(
      [&](UniqueFd socket) {
        context_.accepted.fetch_add(1, std::memory_order_relaxed);
        if (context_.connections.load(std::memory_order_relaxed) >=
            context_.options.max_connections) {
          ++shed;
          reset_and_close(socket);
          return;
        }
        deal_(std::move(socket));
      },
      shed);
  context_.shed.fetch_add(shed, std::memory_order_relaxed);
  if (outcome == Listener::Outcome::kExhausted) pause_accepting(true);
}

void ServerLoop::pause_accepting(bool pause) {
  epoll_event event{};
  event.events = pause ? 0u : static_cast<std::uint32_t>(EPOLLIN);
  event.data.u64 = kListenerId;
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_->fd(), &event);
  if (pause) {
    accept_again_at_ = std::chrono::steady_clock::now() + kAcceptPause;
  } else {
    accept_again_at_.reset();
  }
}

void ServerLoop::make_ready(Id id) {
  const auto found = connections_.find(id);
  if (found == connections_.end() || found->second.queued) return;
  found->second.queued = true;
  ready_.push_back(id);
}

void ServerLoop::give_turns() {
  std::vector<Id> turns;
  turns.swap(ready_);
  for (const Id id : turns) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) continue;
    Entry& entry = found->second;
    entry.queued = false;
    const bool was_admitted = entry.connection->admitted();
    const auto progress = entry.connection->step(std::chrono::steady_clock::now());
    if (!was_admitted && entry.connection->admitted()) --pending_count_;
    switch (progress) {
      case ServerStream::Progress::kIdle:
      case ServerStream::Progress::kBlocked:
        break;
      case ServerStream::Progress::kAgain:
        make_ready(id);
        break;
      case ServerStream::Progress::kThrottled:
        throttled_.emplace_back(entry.connection->resume_at(), id);
        break;
      case ServerStream::Progress::kClosed:
        close(id, false);
        break;
    }
  }
}

void ServerLoop::wake_throttled(TimePoint now) {
  std::erase_if(throttled_, [&](const auto& waiting) {
    if (waiting.first > now) return false;
    make_ready(waiting.second);
    return true;
  });
}

void ServerLoop::check_registry() {
  const std::uint64_t changes = context_.registry.change_count();
  if (changes == seen_changes_) return;
  seen_changes_ = changes;
  std::vector<Id> doomed;
  for (auto& [id, entry] : connections_) {
    if (!entry.connection->refresh_session()) doomed.push_back(id);
  }
  for (const Id id : doomed) close(id, false);
}

void ServerLoop::check_deadlines(TimePoint now) {
  const auto hello_timeout = context_.options.hello_timeout;
  next_check_ = now + std::min<Duration>(kCheckInterval, hello_timeout / 2);
  std::vector<Id> doomed;
  for (const auto& [id, entry] : connections_) {
    const ServerStream& connection = *entry.connection;
    const bool silent = !connection.admitted() && now - connection.opened_at() > hello_timeout;
    if (silent || connection.stalled(now)) doomed.push_back(id);
  }
  for (const Id id : doomed) close(id, true);
  std::erase_if(pending_, [&](Id id) {
    const auto found = connections_.find(id);
    return found == connections_.end() || found->second.connection->admitted();
  });
}

void ServerLoop::evict_oldest_pending() {
  while (!pending_.empty()) {
    const Id id = pending_.front();
    pending_.pop_front();
    const auto found = connections_.find(id);
    if (found == connections_.end() || found->second.connection->admitted()) continue;
    return close(id, true);
  }
}

void ServerLoop::close(Id id, bool shed) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  if (!found->second.connection->admitted()) --pending_count_;
  if (shed) context_.shed.fetch_add(1, std::memory_order_relaxed);
  connections_.erase(found);
}

namespace {

std::size_t thread_count(std::size_t wanted) {
  if (wanted != 0) return wanted;
  return std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 8);
}

class TcpServerImpl final : public TcpServer {
 public:
  TcpServerImpl(const ServerOptions& options, const SegmentRegistry& registry,
                const Incarnation& incarnation, Listener listener)
      : context_(options, registry, incarnation), listener_(std::move(listener)) {}
  ~TcpServerImpl() override {
    for (auto& loop : loops_) loop->stop();
  }

  Result<void> start() {
    const std::size_t threads = thread_count(context_.options.threads);
    const std::size_t pending =
        std::max<std::size_t>(context_.options.max_pending_hellos / threads, 1);
    for (std::size_t i = 0; i < threads; ++i) {
      loops_.push_back(std::make_unique<ServerLoop>(context_, pending));
    }
    // The listening loop starts last, as it deals connections to the others.
    for (std::size_t i = threads; i-- > 0;) {
      Listener* listener = i == 0 ? &listener_ : nullptr;
      TRY_VOID(loops_[i]->start(static_cast<int>(i), listener, [this](UniqueFd socket) {
        loops_[next_loop_++ % loops_.size()]->adopt(std::move(socket));
      }));
    }
    return {};
  }

  std::string endpoint(std::string_view host) const override {
    return format_endpoint(host, listener_.port());
  }
  std::uint16_t port() const override { return listener_.port(); }

  void drop_session(const SessionToken& token) override {
    std::latch done(static_cast<std::ptrdiff_t>(loops_.size()));
    for (auto& loop : loops_) loop->drop_session(token, done);
    // This is short: loops never block, and a turn is at most a megabyte per connection.
    done.wait();
  }

  ServerStats stats() const override {
    return {.connections = context_.connections,
            .accepted = context_.accepted,
            .shed = context_.shed,
            .encrypted = context_.encrypted,
            .encrypted_by_kernel = context_.encrypted_by_kernel,
            .ops = context_.ops,
            .bytes_sent_encrypted = context_.bytes_sent_encrypted,
            .bytes_sent = context_.bytes_sent};
  }

 private:
  ServerContext context_;
  Listener listener_;
  std::vector<std::unique_ptr<ServerLoop>> loops_;
  std::size_t next_loop_ = 0;  // used by the listening thread
};

}  // namespace

Result<std::unique_ptr<TcpServer>> TcpServer::create(const ServerOptions& options,
                                                     const SegmentRegistry& registry,
                                                     const Incarnation& incarnation) {
  TRY(Listener listener, Listener::bind(options.listen_host, options.port, options.congestion));
  auto server =
      std::make_unique<TcpServerImpl>(options, registry, incarnation, std::move(listener));
  TRY_VOID(server->start());
  return server;
}

}  // namespace rekindle::transport::tcp
