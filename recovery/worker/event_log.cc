#include "recovery/worker/event_log.h"

#include <utility>

#include "src/async/task.h"

namespace rekindle::worker {

void EventLog::add(Event event) {
  event.at = std::chrono::system_clock::now();
  const Event& added = events_.add(std::move(event));
  if (watcher_) watcher_(added);
  changed_.notify();
}

async::Task<void> EventLog::wait_after(std::uint64_t number, TimePoint give_up) {
  while (last() <= number && !closed_ && steady_now() < give_up) {
    const bool cancelled = co_await async::is_cancelled();
    if (cancelled) co_return;
    co_await changed_.wait_until(give_up);
  }
}

void EventLog::close() {
  closed_ = true;
  changed_.notify();
}

}  // namespace rekindle::worker
