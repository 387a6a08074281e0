#include "src/client/connection.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <system_error>
#include <thread>

#include <sys/eventfd.h>
#include <unistd.h>

#include "src/base/version.h"
#include "src/ipc/peer.h"
#include "src/ipc/unix_socket.h"

namespace rekindle::client {

namespace {

constexpr std::uint32_t kProtocol = 1;
constexpr std::size_t kMaxBacklogBytes = 8u << 20;
constexpr std::chrono::milliseconds kLook{20};  // whether an agent that is away is back
// The agent's answer says why a call failed; it may come a moment after the deadline.
constexpr std::chrono::milliseconds kAnswerGrace{250};

std::string socket_path(const std::string& store) { return store + "/agent/worker.sock"; }

// Root's agent may serve us: root can do what it likes anyway.
constexpr std::array<uid_t, 1> kAlsoTrusted{0};

// kUnavailable: nobody listens.
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

}  // namespace

Result<std::shared_ptr<Connection>> Connection::open(const std::string& store, TimePoint deadline) {
  const std::string path = socket_path(store);
  auto connected = connect_to(store, deadline);
  while (!connected && connected.error().code() == ErrorCode::kUnavailable &&
         std::chrono::steady_clock::now() + kLook < deadline) {
    std::this_thread::sleep_for(kLook);
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
  TRY_VOID(connection->begin());
  return connection;
}

Connection::~Connection() { close(Error(ErrorCode::kStale, "the connection was closed")); }

Result<void> Connection::greet(TimePoint deadline) {
  const HelloRequest hello{kProtocol, kProtocol, fmt::format("librekindle {}", version()),
                           static_cast<std::uint32_t>(owner_)};
  const auto sent = channel_.send(encode({.call = ++last_call_}, hello), {}, deadline);
  auto received = channel_.receive(deadline);
  // An agent that refuses us says why and closes, maybe before it was sent anything.
  if (!received) return fail(sent ? std::move(received).error() : sent.error());
  ipc::Frame frame = std::move(*received);
  TRY(AgentMessage answer, decode(frame.body));
  if (answer.error) return fail(*answer.error);
  const auto* const reply = std::get_if<HelloReply>(&answer.reply);
  if (reply == nullptr || answer.call != last_call_) {
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
  if (!frame.descriptors.empty()) {
    // Without it the agent sees our death by the pidfd and the socket: later, but it does.
    if (auto page = ipc::LifePage::open(std::move(frame.descriptors.front()))) {
      if (auto hold = ipc::LifeHold::start(std::move(*page))) life_ = std::move(*hold);
    }
  }
  return {};
}

Result<std::uint64_t> Connection::queue(const Request& request, std::uint64_t session,
                                        std::chrono::milliseconds deadline,
                                        const std::shared_ptr<Inbox>& inbox) {
  if (closed_) return fail(*closed_);
  if (outgoing_bytes_ + backlog_bytes_.load() > kMaxBacklogBytes) {
    return fail(ErrorCode::kUnavailable, "the agent does not read what it is sent");
  }
  const std::uint64_t call = ++last_call_;
  const auto ms = std::clamp<std::chrono::milliseconds::rep>(
      deadline.count(), 0, std::numeric_limits<std::uint32_t>::max());
  std::string body = encode({call, session, static_cast<std::uint32_t>(ms)}, request);
  if (body.size() > ipc::kMaxSpilledBytes) {
    return fail(ErrorCode::kInvalid, "a request of {} bytes, {} are allowed", body.size(),
                ipc::kMaxSpilledBytes);
  }
  outgoing_bytes_ += body.size();
  outgoing_.push_back(std::move(body));
  if (inbox) calls_[call] = inbox;
  return call;
}

Result<std::uint64_t> Connection::send(const Request& request, std::uint64_t session,
                                       std::chrono::milliseconds deadline,
                                       std::shared_ptr<Inbox> inbox) {
  Result<std::uint64_t> call = [&] {
    const std::lock_guard lock(mutex_);
    return queue(request, session, deadline, inbox);
  }();
  if (call) wake();
  return call;
}

Result<Message> Connection::call(const Request& request, std::uint64_t session,
                                 std::chrono::milliseconds timeout, std::shared_ptr<Inbox> inbox) {
  // On the wire 0 is no deadline.
  const auto deadline_ms = std::max(timeout, std::chrono::milliseconds(1));
  TRY(const std::uint64_t call, send(request, session, deadline_ms, inbox));
  const TimePoint deadline = SteadyClock().now() + timeout + kAnswerGrace;
  const auto take = [&](Message& message) -> Result<Message> {
    if (message.agent.error) return fail(std::move(*message.agent.error));
    return std::move(message);
  };
  {
    std::unique_lock lock(inbox->mutex);
    while (true) {
      const auto found = std::find_if(inbox->messages.begin(), inbox->messages.end(),
                                      [&](const Message& m) { return m.agent.call == call; });
      if (found != inbox->messages.end()) {
        Message message = std::move(*found);
        inbox->messages.erase(found);
        return take(message);
      }
      if (inbox->closed) return fail(*inbox->closed);
      if (inbox->changed.wait_until(lock, deadline) == std::cv_status::timeout &&
          SteadyClock().now() >= deadline) {
        break;
      }
    }
  }
  if (auto late = forget_call(call, *inbox)) return take(*late);
  return fail(ErrorCode::kTimeout, "the agent did not answer within {} ms", timeout.count());
}

// The answer may have come between the deadline and now.
std::optional<Message> Connection::forget_call(std::uint64_t call, Inbox& inbox) {
  {
    const std::lock_guard lock(mutex_);
    if (calls_.erase(call) != 0) return std::nullopt;
  }
  const std::lock_guard lock(inbox.mutex);
  for (auto at = inbox.messages.begin(); at != inbox.messages.end(); ++at) {
    if (at->agent.call != call) continue;
    Message message = std::move(*at);
    inbox.messages.erase(at);
    return message;
  }
  return std::nullopt;
}

void Connection::forget_session(std::uint64_t session, const std::shared_ptr<Inbox>& inbox) {
  const std::lock_guard lock(mutex_);
  sessions_.erase(session);
  std::erase_if(calls_, [&](const auto& call) { return call.second == inbox; });
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
  fail_all(why);
}

void Connection::fail_all(const Error& why) {
  std::vector<std::shared_ptr<Inbox>> inboxes;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) closed_ = why;
    for (auto* const map : {&calls_, &sessions_}) {
      for (auto& [number, inbox] : *map) inboxes.push_back(std::move(inbox));
      map->clear();
    }
    outgoing_.clear();
  }
  for (const auto& inbox : inboxes) inbox->close(why);
}

bool Connection::is_owner() const { return ::getpid() == owner_; }

void Connection::abandon() { ::close(channel_.fd()); }

}  // namespace rekindle::client
