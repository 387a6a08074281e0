#include "recovery/device/session.h"

#include <exception>
#include <system_error>
#include <utility>

#include <pthread.h>
#include <sys/prctl.h>

namespace rekindle::device {

namespace {
constexpr unsigned long kTimerSlackNs = 1000;  // pauses are microseconds
}

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
    if (end.device_lost) (void)serving.release();  // the process ends without it
  } catch (const std::exception& error) {
    end.error = Error(ErrorCode::kInternal, error.what());
  }
  on_over(std::move(end));
}

}  // namespace rekindle::device
