#pragma once

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "src/async/task.h"

namespace rekindle::async {

// Coroutines that run on their own and are awaited together. A coroutine that throws is logged;
// cancellation is not an error. The destructor cancels the coroutines that still run, and does not
// wait for them.
class TaskGroup {
 public:
  explicit TaskGroup(boost::asio::any_io_executor executor);
  TaskGroup(const TaskGroup&) = delete;
  TaskGroup& operator=(const TaskGroup&) = delete;
  ~TaskGroup() { cancel(); }

  // `name` is for logs; a literal. After close() nothing is started any more.
  void spawn(std::string_view name, Task<void> task);

  std::size_t size() const;
  void cancel();

  // Waits until no coroutine runs, without cancelling any; false when some still run at the
  // deadline.
  Task<bool> join(Duration deadline);
  // Cancels and joins. Coroutines that still run at the deadline keep everything that they
  // captured.
  Task<bool> close(Duration deadline);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Runs all tasks at once on the current executor and returns when each has ended. Each task bounds
// its own time; a cancelled caller cancels them, and they are not torn down by it
// (throw_if_cancelled(false)). Whatever the tasks refer to must live in the caller's frame or
// longer.
Task<void> run_all(std::vector<Task<void>> tasks);

}  // namespace rekindle::async
