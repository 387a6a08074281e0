#include "recovery/worker/event_log.h"

#include <algorithm>
#include <utility>

#include "src/async/task.h"

namespace rekindle::worker {

void EventLog::add(Event event) {
  event.number = ++last_;
  event.at = std::chrono::system_clock::now();
  if (events_.size() == kMost) events_.pop_front();
  if (watcher_) watcher_(event);
  events_.push_back(std::move(event));
  changed_.notify();
}

std::vector<Event> EventLog::after(std::uint64_t number, std::size_t most) const {
  const auto first = std::ranges::upper_bound(events_, number, {}, &Event::number);
  const auto left = static_cast<std::size_t>(events_.end() - first);
  return {first, first + static_cast<std::ptrdiff_t>(std::min(left, most))};
}

async::Task<void> EventLog::wait_after(std::uint64_t number, TimePoint give_up) {
  while (last_ <= number && !closed_ && steady_now() < give_up) {
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
