#include "src/client/connection.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/base/version.h"
#include "src/base/worker_pool.h"
#include "src/ipc/unix_socket.h"

namespace rekindle::client {

namespace {

constexpr std::uint32_t kProtocol = 1;
// How often an agent that is away is looked for.
constexpr std::chrono::milliseconds kConnectAgain{20};
// The agent's answer says why a call failed; it may come a moment after the deadline.
constexpr std::chrono::milliseconds kAnswerGrace{250};

std::string socket_path(const std::string& store) { return store + "/agent/worker.sock"; }

// An agent of root may serve us: root can do anything here already.
constexpr std::array<uid_t, 1> kAlsoTrusted{0};

// kUnavailable: no agent listens.
Result<UniqueFd> connect_to(const std::string& store, TimePoint deadline) {
  const std::string path = socket_path(store);
  TRY_VOID(ipc::unix_address(path));
  if (auto ok = ipc::check_unix_path(path, kAlsoTrusted); !ok) {
    if (ok.error().code() != ErrorCode::kNotFound) return fail(std::move(ok).error());
    return fail(ErrorCode::kUnavailable,
                "no agent serves {}: there is no {}; start one with: rekindle agent --store {}",
                store, path, store);
  }
  return ipc::connect_unix_socket(path, deadline);
}

// 0 without /proc.
std::uint64_t own_pid_namespace() {
  struct stat found {};
  return ::stat("/proc/self/ns/pid", &found) == 0 ? found.st_ino : 0;
}

}  // namespace

Result<std::shared_ptr<Connection>> Connection::open(const std::string& store, TimePoint deadline) {
  const std::string path = socket_path(store);
  auto connected = connect_to(store, deadline);
  while (!connected && connected.error().code() == ErrorCode::kUnavailable &&
         steady_now() + kConnectAgain < deadline) {
    std::this_thread::sleep_for(kConnectAgain);
    connected = connect_to(store, deadline);
  }
  if (!connected) return fail(std::move(connected).error());
  UniqueFd socket = std::move(*connected);
  TRY(const ipc::Peer peer, ipc::peer_of(socket.get()));
  TRY_VOID(ipc::check_peer(peer, kAlsoTrusted, path));
  TRY(ipc::Channel channel, ipc::Channel::adopt(std::move(socket), ipc::kMaxFrameDescriptors));
  std::shared_ptr<Connection> connection(new Connection(std::move(channel)));
  if (auto ok = connection->greet(deadline); !ok) {
    return fail(std::move(ok).error().with_context(path));
  }
  TRY_VOID(connection->start_thread());
  return connection;
}

Connection::~Connection() { close(Error(ErrorCode::kStale, "the connection was closed")); }

Result<void> Connection::greet(TimePoint deadline) {
  const HelloRequest hello{kProtocol, kProtocol, fmt::format("librekindle {}", version()),
                           static_cast<std::uint32_t>(owner_), own_pid_namespace()};
  const auto sent = channel_.send(encode({.call = kHelloCall}, hello), {}, deadline);
  auto received = channel_.receive(deadline);
  // An agent that refuses us sends the reason and closes, maybe before our hello is sent.
  if (!received) return fail(sent ? std::move(received).error() : sent.error());
  ipc::Frame frame = std::move(*received);
  TRY(AgentMessage answer, decode(frame.body));
  if (answer.error) return fail(*answer.error);
  const auto* const reply = std::get_if<HelloReply>(&answer.reply);
  if (reply == nullptr || answer.call != kHelloCall) {
    return fail(ErrorCode::kInternal, "the agent answered a hello with something else");
  }
  if (reply->protocol != kProtocol) {
    return fail(ErrorCode::kInvalid,
                "the agent speaks version {} of the workers' protocol, this library {}: use the "
                "library of the agent's release",
                reply->protocol, kProtocol);
  }
  using std::chrono::milliseconds;
  if (reply->ping_interval_ms > 0) {
    ping_interval_ =
        std::clamp(milliseconds(reply->ping_interval_ms), milliseconds(10), milliseconds(60'000));
  }
  if (reply->silence_ms > 0) silence_ = milliseconds(reply->silence_ms);
  silence_ = std::max(silence_, 2 * ping_interval_);
  keeps_residents_ = reply->keeps_residents;
  gives_orders_ = reply->gives_orders;
  if (!frame.descriptors.empty()) {
    // Without the page the agent still sees our death by the pidfd and the socket, but later.
    if (auto page = ipc::LifePage::open(std::move(frame.descriptors.front()))) {
      if (auto hold = ipc::LifeHold::start(std::move(*page))) life_ = std::move(*hold);
    }
  }
  return {};
}

Result<std::uint64_t> Connection::send(const Request& request, std::uint64_t session,
                                       std::chrono::milliseconds deadline,
                                       std::shared_ptr<Inbox> inbox,
                                       std::vector<UniqueFd> descriptors) {
  Result<std::uint64_t> call =
      calls_.begin(request, session, deadline, inbox, std::move(descriptors));
  if (call) wake();
  return call;
}

Result<Message> Connection::call(const Request& request, std::uint64_t session,
                                 std::chrono::milliseconds timeout, std::shared_ptr<Inbox> inbox,
                                 std::vector<UniqueFd> descriptors) {
  // On the wire 0 means no deadline.
  const auto deadline_ms = std::max(timeout, std::chrono::milliseconds(1));
  TRY(const std::uint64_t call, send(request, session, deadline_ms, inbox, std::move(descriptors)));
  const TimePoint deadline = steady_now() + timeout + kAnswerGrace;
  std::optional<Message> answer;
  {
    std::unique_lock lock(inbox->mutex);
    while (!(answer = inbox->take_answer_locked(call))) {
      if (inbox->closed) return fail(*inbox->closed);
      if (inbox->changed.wait_until(lock, deadline) == std::cv_status::timeout &&
          steady_now() >= deadline) {
        break;
      }
    }
  }
  // The answer may have come between the deadline and now.
  if (!answer) answer = calls_.forget_call(call, *inbox);
  if (!answer) {
    return fail(ErrorCode::kTimeout, "the agent did not answer within {} ms", timeout.count());
  }
  if (answer->agent.error) return fail(std::move(*answer->agent.error));
  return std::move(*answer);
}

// --- the connection's thread

Result<void> Connection::start_thread() {
  wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) return fail_errno(errno, "create an eventfd");
  const SignalsBlocked blocked;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return fail(ErrorCode::kExhausted, "start a thread: {}", error.what());
  }
  return {};
}

void Connection::run() {
  ::pthread_setname_np(::pthread_self(), "rk-client");
  Error why(ErrorCode::kStale, "the connection was closed");
  try {
    if (auto ended = loop(); !ended) why = std::move(ended).error();
  } catch (const std::exception& error) {
    why = Error(ErrorCode::kPeerLost, fmt::format("the connection has failed: {}", error.what()));
  }
  calls_.close(why);
  // A child may have a copy of the descriptor; the agent still sees the end now.
  ::shutdown(channel_.fd(), SHUT_RDWR);
}

Result<void> Connection::loop() {
  last_heard_ = last_turn_ = steady_now();
  next_ping_ = last_heard_ + ping_interval_;
  while (!stopping_.load()) {
    TRY_VOID(send_outgoing());
    const TimePoint before = steady_now();
    const auto out = static_cast<short>(channel_.wants_to_send() ? POLLOUT : 0);
    pollfd entries[2] = {{channel_.fd(), static_cast<short>(POLLIN | out), 0},
                         {wake_.get(), POLLIN, 0}};
    const int timeout = ipc::poll_timeout_ms(before, next_deadline(before));
    if (::poll(entries, 2, timeout) < 0 && errno != EINTR) return fail_errno(errno, "poll");
    std::uint64_t count;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);

    // Before deadlines are checked: this thread may have been stopped.
    TRY_VOID(read_frames());
    const TimePoint now = steady_now();
    TRY_VOID(channel_.check_deadline(now));
    TRY_VOID(keep_alive(now));
  }
  // The last requests (a detach, an abandon) go out if the socket takes them at once.
  return send_outgoing();
}

Result<void> Connection::send_outgoing() {
  for (CallTable::Outgoing& frame : calls_.take_outgoing()) {
    TRY_VOID(channel_.push(std::move(frame.body), std::move(frame.descriptors)));
  }
  TRY_VOID(channel_.send_some(steady_now()));
  calls_.set_backlog(channel_.queued_bytes());
  return {};
}

Result<void> Connection::read_frames() {
  const TimePoint now = steady_now();
  auto received =
      channel_.receive_frames(now, [this](ipc::Frame frame) { return dispatch(std::move(frame)); });
  if (!received && received.error().code() == ErrorCode::kInvalid) {
    return fail(ErrorCode::kPeerLost, "the agent broke the protocol: {}",
                received.error().message());
  }
  if (!received) return fail(std::move(received).error());
  if (*received == ipc::Received::kEnd) {
    return fail(ErrorCode::kPeerLost,
                "the agent has closed the connection: it was stopped or killed; connect again");
  }
  if (*received == ipc::Received::kSomething) last_heard_ = now;
  return {};
}

Result<void> Connection::dispatch(ipc::Frame frame) {
  auto body = std::make_unique<const std::string>(std::move(frame.body));
  TRY(AgentMessage agent, decode(*body));
  if (agent.descriptors != frame.descriptors.size()) {
    return fail(ErrorCode::kInvalid, "{} descriptors came with a message that names {}",
                frame.descriptors.size(), agent.descriptors);
  }
  calls_.deliver({std::move(agent), std::move(body), std::move(frame.descriptors)});
  return {};
}

Result<void> Connection::keep_alive(TimePoint now) {
  // A turn that took this long was a stop of this process, which sent no pings meanwhile.
  if (now - std::exchange(last_turn_, now) > 2 * ping_interval_) last_heard_ = now;
  if (now - last_heard_ >= silence_) {
    return fail(ErrorCode::kPeerLost, "the agent has been silent for {} ms; connect again",
                silence_.count());
  }
  if (now < next_ping_) return {};
  next_ping_ = now + ping_interval_;
  // Fails, and is skipped, while the agent does not read.
  (void)calls_.begin(PingRequest{}, 0, ping_interval_, nullptr);
  return {};
}

TimePoint Connection::next_deadline(TimePoint now) const {
  TimePoint first = std::min(next_ping_, last_heard_ + silence_);
  if (const auto frame = channel_.deadline()) first = std::min(first, *frame);
  return std::max(now, first);
}

void Connection::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
}

void Connection::close(const Error& why) {
  stopping_.store(true);
  if (thread_.joinable()) {
    wake();
    thread_.join();
  }
  calls_.close(why);
}

bool Connection::is_owner() const { return ::getpid() == owner_; }

void Connection::abandon() { ::close(channel_.fd()); }

}  // namespace rekindle::client
