#include "transport/verbs/link/run_together.h"

#include <system_error>
#include <utility>
#include <vector>

namespace rekindle::transport::verbs {

std::future<void> start_thread(std::function<void()> work) {
  return std::async(std::launch::async, std::move(work));
}

void run_together(std::size_t count, const std::function<void(std::size_t)>& body,
                  const StartThread& start) {
  std::vector<std::future<void>> running;
  running.reserve(count);
  try {
    while (running.size() + 1 < count) {
      running.push_back(start([&body, i = running.size()] { body(i); }));
    }
  } catch (const std::system_error&) {
    // The caller runs the others.
  }
  for (std::size_t i = running.size(); i < count; ++i) body(i);
  for (auto& one : running) one.get();
}

}  // namespace rekindle::transport::verbs
