#include "recovery/device/process/device_sessions.h"

#include <exception>
#include <system_error>
#include <utility>

#include <pthread.h>
#include <sys/prctl.h>

#include "recovery/device/device_wire.h"
#include "src/base/log.h"

namespace rekindle::device {

namespace {

proto::DevicesToAgent frame_of(const SpreadOver& over) {
  proto::DevicesToAgent frame;
  *frame.mutable_spread_over() = to_proto(over);
  return frame;
}

proto::DevicesToAgent frame_of(const DeviceJoined& joined) {
  proto::DevicesToAgent frame;
  *frame.mutable_joined() = to_proto(joined);
  return frame;
}

proto::DevicesToAgent frame_of(const ShareWanted& wanted) {
  proto::DevicesToAgent frame;
  *frame.mutable_share_wanted() = to_proto(wanted);
  return frame;
}

proto::DevicesToAgent frame_of(const SpreadProgress& progress) {
  proto::DevicesToAgent frame;
  frame.mutable_progress()->set_session(progress.session);
  frame.mutable_progress()->set_bytes(progress.bytes);
  return frame;
}

proto::DevicesToAgent frame_of(const SlotsOffered& offered) {
  proto::DevicesToAgent frame;
  *frame.mutable_slots() = to_proto(offered);
  return frame;
}

proto::DevicesToAgent frame_of(const BucketWanted& wanted) {
  proto::DevicesToAgent frame;
  *frame.mutable_wanted() = to_proto(wanted);
  return frame;
}

proto::DevicesToAgent frame_of(const ReadsEnded& ended) {
  proto::DevicesToAgent frame;
  *frame.mutable_reads_ended() = to_proto(ended);
  return frame;
}

SpreadOver over_with(std::uint64_t number, Error why) {
  SpreadOver over;
  over.session = number;
  over.error = std::move(why);
  return over;
}

// The pauses of a session's thread are microseconds.
constexpr unsigned long kTimerSlackNs = 1000;

}  // namespace

Result<std::unique_ptr<Session>> Session::start(SessionOrder order, OnOver on_over) {
  TRY(auto bell, Bell::create());
  std::unique_ptr<Session> session(new Session(std::move(bell)));
  try {
    session->thread_ = std::thread(
        [raw = session.get(), order = std::move(order), on_over = std::move(on_over)]() mutable {
          raw->run(std::move(order), on_over);
        });
  } catch (const std::system_error& error) {
    return fail(ErrorCode::kExhausted, "start a session's thread: {}", error.what());
  }
  return session;
}

Session::~Session() {
  mailbox_.stop("the session has ended");
  mailbox_.end(Error(ErrorCode::kStale, "the session has ended"), true);
  if (thread_.joinable()) thread_.join();
}

void Session::run(SessionOrder order, const OnOver& on_over) {
  (void)::pthread_setname_np(::pthread_self(), "rk-device");
  (void)::prctl(PR_SET_TIMERSLACK, kTimerSlackNs, 0, 0, 0);
  SessionEnd end;
  try {
    auto serving = std::make_unique<Serving>(std::move(order), mailbox_);
    end = serving->run();
    // A process with a lost device ends without the destructor.
    if (end.device_lost) (void)serving.release();
  } catch (const std::exception& error) {
    end.error = Error(ErrorCode::kInternal, error.what());
  }
  on_over(std::move(end));
}

void Sessions::post(proto::DevicesToAgent frame) {
  {
    const std::lock_guard lock(mutex_);
    frames_.push_back({std::move(frame)});
  }
  bell_.ring();
}

// Called on a session's thread.
void Sessions::say(SessionNews news) {
  Outgoing out{std::visit([](const auto& item) { return frame_of(item); }, news)};
  if (auto* const offered = std::get_if<SlotsOffered>(&news)) {
    out.descriptors.push_back(std::move(offered->memory));
  }
  {
    const std::lock_guard lock(mutex_);
    if (const auto* const over = std::get_if<SpreadOver>(&news)) {
      if (spreading_.erase(over->session) == 0) return;
    }
    frames_.push_back(std::move(out));
  }
  bell_.ring();
}

Result<void> Sessions::begin(SessionOrder order) {
  const std::uint64_t number = order.number;
  const bool in_round = order.in_round;
  order.say = [this](SessionNews news) { say(std::move(news)); };
  TRY(auto session, Session::start(std::move(order), [this, number](SessionEnd end) {
        const std::lock_guard lock(mutex_);
        ended_.push_back({number, std::move(end)});
        bell_.ring();
      }));
  sessions_[number] = {std::move(session), in_round ? One::Round::kAwaitsOrder : One::Round::kNone};
  return {};
}

void Sessions::tell(std::uint64_t number, const TileRuns& runs, bool complete) {
  const auto found = sessions_.find(number);
  if (found != sessions_.end()) found->second.session->tell(runs, complete);
}

void Sessions::end(std::uint64_t number, bool gone) {
  const auto found = sessions_.find(number);
  if (found == sessions_.end()) return;
  found->second.session->end(Error(ErrorCode::kStale, "the worker's session has ended"), gone);
}

void Sessions::refuse(std::uint64_t number, Error why) {
  log::warn("device.spread_refused", "session", number, "why", why.message());
  post(frame_of(over_with(number, std::move(why))));
}

void Sessions::spread(const proto::BeginSpread& order) {
  const std::uint64_t number = order.session();
  const auto found = sessions_.find(number);
  if (found == sessions_.end() || found->second.round == One::Round::kNone) {
    return refuse(number, Error(ErrorCode::kNotFound,
                                fmt::format("session {} does not wait for a round", number)));
  }
  One& one = found->second;
  if (one.round == One::Round::kOrdered) {
    log::warn("device.spread_again", "session", number);
    return;
  }
  one.round = One::Round::kOrdered;
  auto parsed = from_proto(order);
  if (!parsed) {
    one.session->stop("its order to spread is not valid");
    return refuse(number, std::move(parsed).error().with_context("an order to spread"));
  }
  {
    const std::lock_guard lock(mutex_);
    spreading_.insert(number);
  }
  one.session->spread(std::move(*parsed));
}

void Sessions::stop(std::uint64_t number, std::string why) {
  const auto found = sessions_.find(number);
  if (found != sessions_.end()) found->second.session->stop(std::move(why));
}

void Sessions::landed(std::uint64_t number, std::uint64_t bucket) {
  const auto found = sessions_.find(number);
  if (found != sessions_.end()) found->second.session->landed(bucket);
}

void Sessions::reads_over(std::uint64_t number, std::string why) {
  const auto found = sessions_.find(number);
  if (found != sessions_.end()) found->second.session->reads_over(std::move(why));
}

// A session that ended before it read its order to spread is answered for here.
Sessions::News Sessions::take() {
  News news;
  const std::lock_guard lock(mutex_);
  news.frames.swap(frames_);
  news.ended.swap(ended_);
  for (const Ended& ended : news.ended) {
    // A lost device may still write; the end of the process answers for it.
    if (ended.end.device_lost) continue;
    if (spreading_.erase(ended.number) == 0) continue;
    Error why = ended.end.error.value_or(Error(ErrorCode::kStale, "the session is over"));
    news.frames.push_back({frame_of(over_with(ended.number, std::move(why)))});
  }
  return news;
}

void Sessions::bury(std::uint64_t number) { sessions_.erase(number); }

std::optional<Error> Sessions::end_all(const Error& why) {
  for (const auto& [number, one] : sessions_) {
    one.session->stop(why.message());
    // It must know of its end before it may use its slots again: the agent may live, and its queue
    // pairs with it.
    one.session->end(why, true);
    one.session->reads_over(why.message());
  }
  sessions_.clear();
  for (auto& [number, end] : take().ended) {
    if (end.device_lost) return std::move(end.error);
  }
  return std::nullopt;
}

}  // namespace rekindle::device
