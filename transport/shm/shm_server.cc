#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "src/base/log.h"
#include "src/base/worker_pool.h"
#include "transport/shm/shm_protocol.h"
#include "transport/shm/shm_transport.h"

namespace rekindle::transport::shm {
namespace {

constexpr std::uint64_t kListenerId = 1;
constexpr std::uint64_t kWakeId = 2;

// A descriptor of the same file that cannot be written through.
UniqueFd reopen_read_only(int fd) {
  if (fd < 0) return {};
  return UniqueFd(::open(fmt::format("/proc/self/fd/{}", fd).c_str(), O_RDONLY | O_CLOEXEC));
}

struct Reader {
  UniqueFd socket;
  TimePoint opened_at{};
  bool admitted = false;
  // It was told to go, and its end of the socket is not closed yet.
  bool leaving = false;
  SessionToken token;
  // The regions that it may have mapped. They are held until it lets go, so that reader counts are
  // true.
  std::map<RegionKey, std::shared_ptr<const Region>> regions;
};

// One thread answers hellos and hands out descriptors: a few small messages per reader and region.
class ShmServerImpl final : public ShmServer {
 public:
  ShmServerImpl(const ServerOptions& options, const SegmentRegistry& registry,
                const Incarnation& incarnation)
      : options_(options), registry_(registry), incarnation_(incarnation) {}
  ~ShmServerImpl() override;
  Result<void> start();

  std::string endpoint(std::string_view) const override { return endpoint_.to_string(); }
  void drop_session(const SessionToken& token) override;

 private:
  using Id = std::uint64_t;
  void run();
  void wake();
  int wait_ms() const;
  void accept_new();
  void handle(Id id, std::uint32_t events);
  bool handle_packet(Reader& reader);  // false: close it
  bool handle_hello(Reader& reader);
  bool handle_request(Reader& reader);
  HelloStatus judge(const ClientHello& hello) const;
  void start_drops();
  void finish_drops();
  void check_deadlines();

  const ServerOptions options_;
  const SegmentRegistry& registry_;
  const Incarnation incarnation_;
  Endpoint endpoint_;
  UniqueFd counter_;  // of the registry's changes, read-only
  UniqueFd listener_, epoll_, wake_fd_;
  std::thread thread_;

  struct Drop {
    SessionToken token;
    TimePoint deadline;
    bool started = false;
  };
  std::mutex mutex_;
  std::condition_variable dropped_;
  std::map<std::uint64_t, Drop> drops_;  // guarded by mutex_, as are these two
  std::uint64_t next_drop_ = 0;
  bool stop_ = false;

  std::unordered_map<Id, Reader> readers_;  // the thread's own
  Id next_id_ = 16;
};

Result<void> ShmServerImpl::start() {
  TRY(endpoint_.boot_id, host_boot_id());
  endpoint_.socket_name = fmt::format("rekindle-{}", SessionToken::random().hex());
  counter_ = reopen_read_only(registry_.changes().fd());
  listener_.reset(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!listener_) return fail_errno(errno, "start the shm server: socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, endpoint_.socket_name.data(), endpoint_.socket_name.size());
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + endpoint_.socket_name.size());
  if (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      ::listen(listener_.get(), 128) != 0) {
    return fail_errno(errno, "start the shm server: bind");
  }
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  wake_fd_.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  epoll_event listening{.events = EPOLLIN, .data = {.u64 = kListenerId}};
  epoll_event waking{.events = EPOLLIN, .data = {.u64 = kWakeId}};
  if (!epoll_ || !wake_fd_ ||
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &listening) != 0 ||
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_fd_.get(), &waking) != 0) {
    return fail_errno(errno, "start the shm server: epoll");
  }
  thread_ = std::thread([this] {
    set_thread_name("rk-shm");
    run();
  });
  return {};
}

ShmServerImpl::~ShmServerImpl() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake();
  thread_.join();
}

void ShmServerImpl::wake() {
  const std::uint64_t one = 1;
  (void)!::write(wake_fd_.get(), &one, sizeof one);
}

void ShmServerImpl::drop_session(const SessionToken& token) {
  std::unique_lock lock(mutex_);
  const std::uint64_t id = next_drop_++;
  drops_[id] = {token, std::chrono::steady_clock::now() + options_.drop_timeout, false};
  wake();
  dropped_.wait(lock, [&] { return !drops_.contains(id); });  // the thread keeps the deadline
}

int ShmServerImpl::wait_ms() const {
  if (readers_.empty()) return -1;
  const bool leaving = std::any_of(readers_.begin(), readers_.end(),
                                   [](const auto& entry) { return entry.second.leaving; });
  const bool silent = std::any_of(readers_.begin(), readers_.end(),
                                  [](const auto& entry) { return !entry.second.admitted; });
  if (leaving) return 20;
  return silent ? static_cast<int>(options_.hello_timeout.count() / 2 + 1) : -1;
}

void ShmServerImpl::run() {
  std::array<epoll_event, 64> events;
  while (true) {
    const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), wait_ms());
    {
      const std::lock_guard lock(mutex_);
      if (stop_) break;
    }
    for (int i = 0; i < count; ++i) {
      const auto& event = events[static_cast<std::size_t>(i)];
      handle(event.data.u64, event.events);
    }
    start_drops();
    check_deadlines();
    finish_drops();
  }
  readers_.clear();
}

void ShmServerImpl::accept_new() {
  UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!socket) {
    // No descriptor is left. The peer waits in the backlog until its deadline and takes tcp
    // instead.
    if (errno == EMFILE || errno == ENFILE)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return;
  }
  if (readers_.size() >= options_.max_connections || !peer_is_trusted(socket.get())) return;
  const Id id = next_id_++;
  epoll_event event{.events = EPOLLIN | EPOLLRDHUP, .data = {.u64 = id}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket.get(), &event) != 0) return;
  Reader& reader = readers_[id];
  reader.socket = std::move(socket);
  reader.opened_at = std::chrono::steady_clock::now();
}

void ShmServerImpl::handle(Id id, std::uint32_t events) {
  if (id == kListenerId) return accept_new();
  if (id == kWakeId) {
    std::uint64_t value = 0;
    (void)!::read(wake_fd_.get(), &value, sizeof value);
    return;
  }
  const auto found = readers_.find(id);
  if (found == readers_.end()) return;
  if ((events & (EPOLLERR | EPOLLHUP)) != 0 || !handle_packet(found->second)) {
    readers_.erase(found);
  }
}

bool ShmServerImpl::handle_packet(Reader& reader) {
  return reader.admitted ? handle_request(reader) : handle_hello(reader);
}

HelloStatus ShmServerImpl::judge(const ClientHello& hello) const {
  if (hello.version != kProtocolVersion) return HelloStatus::kVersion;
  if (hello.incarnation != incarnation_) return HelloStatus::kStale;
  if (!registry_.session_rate(hello.token)) return HelloStatus::kDenied;
  return HelloStatus::kOk;
}

bool ShmServerImpl::handle_hello(Reader& reader) {
  ClientHello hello;
  UniqueFd none;
  const Io io = receive_message(reader.socket.get(), hello, none);
  if (io != Io::kDone) return io == Io::kAgain;
  const HelloStatus status = judge(hello);
  const int fd = status == HelloStatus::kOk ? counter_.get() : -1;
  const ServerHello answer{.status = status, .incarnation = incarnation_};
  if (send_message(reader.socket.get(), answer, fd) != Io::kDone) return false;
  reader.token = hello.token;
  reader.admitted = status == HelloStatus::kOk;
  return reader.admitted;
}

bool ShmServerImpl::handle_request(Reader& reader) {
  RegionRequest request;
  UniqueFd none;
  const Io io = receive_message(reader.socket.get(), request, none);
  if (io != Io::kDone) return io == Io::kAgain;
  if (reader.leaving) return true;  // waits for its end, gets nothing any more
  RegionReply reply{.key = request.key};
  UniqueFd fd;
  auto region = registry_.lookup(reader.token, request.key);
  if (!region) {
    const bool stale = region.error().code() == ErrorCode::kStale;
    reply.status = static_cast<std::uint32_t>(stale ? OpStatus::kStale : OpStatus::kDenied);
    if (stale) reader.regions.erase(request.key);  // the reader unmaps it on this answer
  } else {
    reply.size_bytes = (*region)->bytes.size();
    reply.fd_offset = (*region)->fd_offset;
    if (request.want_fd != 0) fd = reopen_read_only((*region)->fd);
    if (request.want_fd != 0 && !fd) {
      reply.status = static_cast<std::uint32_t>(OpStatus::kFault);
    } else {
      reader.regions.insert_or_assign(request.key, std::move(*region));
    }
  }
  return send_message(reader.socket.get(), reply, fd.get()) == Io::kDone;
}

void ShmServerImpl::start_drops() {
  const std::lock_guard lock(mutex_);
  for (auto& [id, drop] : drops_) {
    if (std::exchange(drop.started, true)) continue;
    for (auto& [reader_id, reader] : readers_) {
      if (!reader.admitted || reader.token != drop.token) continue;
      reader.leaving = true;
      (void)::shutdown(reader.socket.get(), SHUT_WR);
    }
  }
}

void ShmServerImpl::finish_drops() {
  const TimePoint now = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  std::erase_if(drops_, [&](const auto& entry) {
    const Drop& drop = entry.second;
    if (!drop.started) return false;
    const auto of_session = [&](const auto& reader) {
      return reader.second.leaving && reader.second.token == drop.token;
    };
    if (std::none_of(readers_.begin(), readers_.end(), of_session)) return true;
    if (now < drop.deadline) return false;
    log::warn("shm.drop.timeout", "why",
              "a reader did not let go of its mapping (stopped?): its pages stay until it ends");
    std::erase_if(readers_, of_session);
    return true;
  });
  dropped_.notify_all();
}

void ShmServerImpl::check_deadlines() {
  const TimePoint now = std::chrono::steady_clock::now();
  std::erase_if(readers_, [&](const auto& entry) {
    return !entry.second.admitted && now - entry.second.opened_at > options_.hello_timeout;
  });
}

}  // namespace

Result<std::unique_ptr<ShmServer>> ShmServer::create(const ServerOptions& options,
                                                     const SegmentRegistry& registry,
                                                     const Incarnation& incarnation) {
  auto server = std::make_unique<ShmServerImpl>(options, registry, incarnation);
  TRY_VOID(server->start());
  return server;
}

}  // namespace rekindle::transport::shm
