#pragma once

#include <cstddef>
#include <functional>
#include <future>

namespace rekindle::transport::verbs {

using StartThread = std::function<std::future<void>(std::function<void()>)>;
std::future<void> start_thread(std::function<void()> work);

// body(0) … body(count - 1), each on a thread of its own but the last, which is the caller's; waits
// for all. What no thread can be had for (std::system_error) the caller does, too, one by one.
void run_together(std::size_t count, const std::function<void(std::size_t)>& body,
                  const StartThread& start = start_thread);

}  // namespace rekindle::transport::verbs
