#include "recovery/worker/event_log.h"

#include <algorithm>
#include <utility>

namespace rekindle::worker {

void EventLog::add(Event event) {
  event.number = ++last_;
  event.at = std::chrono::system_clock::now();
  if (events_.size() == kMost) events_.pop_front();
  events_.push_back(std::move(event));
  changed.notify();
}

std::vector<Event> EventLog::after(std::uint64_t number, std::size_t most) const {
  const auto first = std::ranges::upper_bound(events_, number, {}, &Event::number);
  const auto left = static_cast<std::size_t>(events_.end() - first);
  return {first, first + static_cast<std::ptrdiff_t>(std::min(left, most))};
}

}  // namespace rekindle::worker
