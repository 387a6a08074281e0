#pragma once

#include <cstddef>
#include <functional>
#include <future>

namespace rekindle::transport::verbs {

using StartThread = std::function<std::future<void>(std::function<void()>)>;
std::future<void> start_thread(std::function<void()> work);

// Runs body(0) … body(count - 1) and waits for all. Each has a thread of its own but the last,
// which runs on the caller's. If no thread can be started (std::system_error), the caller runs the
// rest, one by one.
void run_together(std::size_t count, const std::function<void(std::size_t)>& body,
                  const StartThread& start = start_thread);

}  // namespace rekindle::transport::verbs
