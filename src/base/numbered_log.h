#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

namespace rekindle {

// Keeps the newest events and numbers them from 1 on, without gaps.
template <typename Event>
class NumberedLog {
 public:
  explicit NumberedLog(std::size_t most) : most_(most) {}

  // Sets the event's number. The result is valid until the next call.
  const Event& add(Event event) {
    event.number = ++last_;
    if (events_.size() == most_) events_.pop_front();
    return events_.emplace_back(std::move(event));
  }
  // The events after `number` that are still kept, oldest first, at most `most`.
  std::vector<Event> after(std::uint64_t number, std::size_t most) const {
    const auto first = std::ranges::upper_bound(events_, number, {}, &Event::number);
    const auto left = static_cast<std::size_t>(events_.end() - first);
    return {first, first + static_cast<std::ptrdiff_t>(std::min(left, most))};
  }
  std::uint64_t last() const { return last_; }

 private:
  const std::size_t most_;
  std::deque<Event> events_;
  std::uint64_t last_ = 0;
};

}  // namespace rekindle
