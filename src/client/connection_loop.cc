#include <algorithm>
#include <cerrno>
#include <system_error>

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "src/client/connection.h"
#include "src/client/signals.h"

// What the connection's own thread does.
namespace rekindle::client {

Result<void> Connection::begin() {
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
  fail_all(why);
  // Also for a child that has a copy of the descriptor: the agent sees the end now.
  ::shutdown(channel_.fd(), SHUT_RDWR);
}

Result<void> Connection::loop() {
  last_heard_ = last_turn_ = SteadyClock().now();
  next_ping_ = last_heard_ + ping_interval_;
  while (!stopping_.load()) {
    TRY_VOID(send_outgoing());
    const TimePoint before = SteadyClock().now();
    const auto out = static_cast<short>(channel_.wants_to_send() ? POLLOUT : 0);
    pollfd entries[2] = {{channel_.fd(), static_cast<short>(POLLIN | out), 0},
                         {wake_.get(), POLLIN, 0}};
    const int timeout = ipc::poll_timeout_ms(before, next_deadline(before));
    if (::poll(entries, 2, timeout) < 0 && errno != EINTR) return fail_errno(errno, "poll");
    std::uint64_t count;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);

    TRY_VOID(read_frames());  // before time is judged: this thread may have been stopped
    const TimePoint now = SteadyClock().now();
    TRY_VOID(channel_.check_deadline(now));
    TRY_VOID(keep_alive(now));
  }
  // What was said last (a detach, an abandon) goes out as far as the socket takes it at once.
  return send_outgoing();
}

Result<void> Connection::send_outgoing() {
  std::vector<std::string> frames;
  {
    const std::lock_guard lock(mutex_);
    frames.swap(outgoing_);
    // Counted until the channel's own count takes over.
    backlog_bytes_.fetch_add(std::exchange(outgoing_bytes_, 0));
  }
  for (std::string& frame : frames) TRY_VOID(channel_.push(std::move(frame)));
  TRY_VOID(channel_.send_some(SteadyClock().now()));
  backlog_bytes_.store(channel_.queued_bytes());
  return {};
}

Result<void> Connection::read_frames() {
  const TimePoint now = SteadyClock().now();
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
  TRY(AgentMessage agent, decode(frame.body));
  if (agent.descriptors != frame.descriptors.size()) {
    return fail(ErrorCode::kInvalid, "{} descriptors came with a message that names {}",
                frame.descriptors.size(), agent.descriptors);
  }
  deliver({std::move(agent), std::move(frame.descriptors)});
  return {};
}

void Connection::deliver(Message message) {
  const std::uint64_t session = message.agent.session;
  const bool begins = std::holds_alternative<AttachedReply>(message.agent.reply) ||
                      std::holds_alternative<PublishBegunReply>(message.agent.reply);
  std::shared_ptr<Inbox> inbox;
  {
    const std::lock_guard lock(mutex_);
    if (message.agent.call == 0) {
      const auto found = sessions_.find(session);
      if (found == sessions_.end()) return;  // detached meanwhile
      inbox = found->second;
    } else {
      const auto found = calls_.find(message.agent.call);
      if (found == calls_.end()) return undo_late(message.agent);
      inbox = std::move(found->second);
      calls_.erase(found);
      if (begins && !message.agent.error) sessions_[session] = inbox;
    }
  }
  inbox->put(std::move(message));
}

// Nobody waits any more for what the agent has begun. Under mutex_.
void Connection::undo_late(const AgentMessage& message) {
  using std::chrono::milliseconds;
  if (std::holds_alternative<AttachedReply>(message.reply)) {
    (void)queue(DetachRequest{}, message.session, milliseconds(0), nullptr);
  } else if (std::holds_alternative<PublishBegunReply>(message.reply)) {
    (void)queue(PublishAbandonRequest{}, message.session, milliseconds(0), nullptr);
  }
}

Result<void> Connection::keep_alive(TimePoint now) {
  // A turn that took this long was a stop of this process, during which nobody pinged.
  if (now - std::exchange(last_turn_, now) > 2 * ping_interval_) last_heard_ = now;
  if (now - last_heard_ >= silence_) {
    return fail(ErrorCode::kPeerLost, "the agent has been silent for {} ms; connect again",
                silence_.count());
  }
  if (now < next_ping_) return {};
  next_ping_ = now + ping_interval_;
  const std::lock_guard lock(mutex_);
  (void)queue(PingRequest{}, 0, ping_interval_, nullptr);  // not when the agent does not read
  return {};
}

TimePoint Connection::next_deadline(TimePoint now) const {
  TimePoint first = std::min(next_ping_, last_heard_ + silence_);
  if (const auto frame = channel_.deadline()) first = std::min(first, *frame);
  return std::max(now, first);
}

}  // namespace rekindle::client
