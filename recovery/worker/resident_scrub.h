#pragma once

#include <chrono>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/worker/residents.h"
#include "src/async/task.h"
#include "src/async/task_group.h"

namespace rekindle::worker {

// Reads the resident copies of this host again and again, a piece at a time, so that a GPU works
// for about a millisecond and then rests. docs/internals/resident.md. Control thread only.
class ResidentScrub {
 public:
  // `every`: how long a pass over all copies takes. 0: it reads nothing. All outlive this.
  ResidentScrub(Residents& residents, async::TaskGroup& tasks,
                boost::asio::any_io_executor executor, std::chrono::milliseconds every);

  void start();
  void set_interval(std::chrono::milliseconds every);

 private:
  async::Task<void> run();
  async::Task<void> pass();
  async::Task<bool> rest(TimePoint since, std::size_t pieces);

  Residents& residents_;
  async::TaskGroup& tasks_;
  std::chrono::milliseconds every_;
  async::Notifier changed_;
};

}  // namespace rekindle::worker
