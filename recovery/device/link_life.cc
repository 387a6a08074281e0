#include <algorithm>
#include <utility>

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "recovery/device/link.h"
#include "src/base/clock.h"
#include "src/base/log.h"

// The life of the device process, as DeviceLink looks after it.
namespace rekindle::device {

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kLook{250};
constexpr std::chrono::milliseconds kAsk{1000};
constexpr std::chrono::milliseconds kPause{2000};
constexpr std::chrono::milliseconds kReapLook{5};
constexpr std::chrono::milliseconds kEndsByItself{2000};
constexpr std::chrono::seconds kSayAgain{30};

async::Task<bool> is_cancelled() {
  const auto state = co_await asio::this_coro::cancellation_state;
  co_return state.cancelled() != asio::cancellation_type::none;
}

async::Task<void> sleep_for(std::chrono::milliseconds pause) {  // less when cancelled
  asio::steady_timer timer(co_await asio::this_coro::executor, pause);
  boost::system::error_code woken;
  co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, woken));
}

}  // namespace

async::Task<void> DeviceLink::close(std::chrono::milliseconds deadline) {
  closing_ = true;
  const TimePoint give_up = steady_now() + deadline;
  if (connection_ != nullptr) {
    connection_->close(Error(ErrorCode::kUnavailable, "the agent of this host stops"));
  }
  while (running_ && steady_now() < give_up && !co_await is_cancelled()) {
    co_await sleep_for(kReapLook);
  }
  (void)co_await tasks_.close(std::chrono::milliseconds(500));  // a process that is left is killed
}

// One process after the other, until close() or until it says that there is no GPU.
async::Task<void> DeviceLink::run() {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto pause = options_.first_pause;
  while (!closing_) {
    Error why = co_await live();
    const bool healthy = greeted_ && steady_now() - *greeted_ >= options_.healthy;
    greeted_.reset();
    status_.pid = 0;
    status_.pinned_bytes = 0;
    lose_sessions(why);
    const bool cancelled = co_await is_cancelled();
    if (closing_ || cancelled) break;
    if (none_here_) {
      status_.state = LinkStatus::State::kOff;
      held_.clear();
      break;
    }
    if (healthy) pause = options_.first_pause;
    status_.state = LinkStatus::State::kRestarting;
    status_.problem = why.message();
    ++status_.restarts;
    log::warn("device.restart", "why", why.message(), "pause_ms", pause.count());
    co_await sleep_for(pause);
    pause = std::min(pause * 2, options_.longest_pause);
  }
  running_ = false;
}

// One life of the process; why it is over.
async::Task<Error> DeviceLink::live() {
  co_await asio::this_coro::throw_if_cancelled(false);
  life_began_ = steady_now();
  auto child = Child::start(command());
  if (!child) co_return std::move(child).error();
  auto channel = ipc::Channel::adopt((*child)->take_socket(), 0);
  if (!channel) co_return std::move(channel).error();
  status_.pid = static_cast<std::uint32_t>((*child)->pid());
  connection_ = std::make_shared<ipc::FramedSocket>(
      executor_, std::move(*channel), ipc::FramedSocketOptions{.max_queued_bytes = 64u << 20});
  ipc::FramedSocket::OnFrame on_frame = [this](const ipc::Frame& frame) {
    return this->on_frame(frame.body);
  };
  Error why = co_await connection_->run(std::move(on_frame));
  connection_.reset();
  status_.state = LinkStatus::State::kRestarting;
  status_.problem = why.message();
  const std::string how = co_await reap(**child);
  // By itself, or because of what we saw: then that is the reason.
  if (why.code() == ErrorCode::kPeerLost) co_return Error(why.code(), "it " + how);
  co_return std::move(why).with_context("it " + how);
}

// A GPU process that was killed may be in its driver for long, and its GPU may use what it was lent
// until it is gone; another is not started meanwhile.
async::Task<std::string> DeviceLink::reap(Child& child) {
  co_await asio::this_coro::throw_if_cancelled(false);
  const TimePoint began = steady_now();
  TimePoint say_at = began + kSayAgain;
  for (;;) {
    if (auto how = child.ended()) {
      lent_.clear();
      co_return *how;
    }
    const bool cancelled = co_await is_cancelled();
    if (cancelled) break;
    if (steady_now() - began > kEndsByItself) child.kill();
    if (steady_now() > say_at) {
      say_at += kSayAgain;
      log::warn("device.ending", "pid", child.pid(), "why", "it was killed and is in its driver");
    }
    co_await sleep_for(kReapLook);
  }
  child.kill();
  co_return "does not end";
}

async::Task<void> DeviceLink::look() {
  co_await asio::this_coro::throw_if_cancelled(false);
  TimePoint last = steady_now();
  while (running_ && !closing_) {
    const TimePoint now = steady_now();
    if (now - last > kPause) {  // we were stopped, or starved
      heard_ = now;
      for (auto& [session, told] : stopping_) told = now;
    }
    last = now;
    look_once(now);
    const bool cancelled = co_await is_cancelled();
    if (cancelled) break;
    co_await sleep_for(kLook);
  }
}

// A process that hangs in a driver keeps its socket open: it is asked.
void DeviceLink::look_once(TimePoint now) {
  if (connection_ == nullptr) return;
  connection_->check(now);
  if (!greeted_) {
    if (now - life_began_ <= options_.hello) return;
    return connection_->close(Error(ErrorCode::kTimeout, "did not say which GPUs it has"));
  }
  if (now - heard_ > options_.silence) {
    return connection_->close(Error(
        ErrorCode::kTimeout, fmt::format("has not answered for {} ms: it hangs, or is stopped",
                                         options_.silence.count())));
  }
  // It may still write to a copy that is to be fetched: its end is waited for.
  for (const auto& [session, told] : stopping_) {
    if (now - told <= options_.stop) continue;
    return connection_->close(Error(
        ErrorCode::kTimeout,
        fmt::format("has not ended a round in {} ms: its device hangs", options_.stop.count())));
  }
  if (now - asked_ < kAsk) return;
  asked_ = now;
  proto::AgentToDevices frame;
  frame.mutable_ping();
  (void)send(frame);
}

}  // namespace rekindle::device
