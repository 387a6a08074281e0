#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include <boost/asio/any_io_executor.hpp>

#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/log.h"
#include "src/base/result.h"

namespace rekindle::joint {

// How far one agent has come with a joint publication: under way, complete or ended. All its steps
// wait here. Control thread only.
class Course {
 public:
  Course(boost::asio::any_io_executor executor, ModelVersion id)
      : id_(std::move(id)), changed_(std::move(executor)) {}

  // Complete or ended.
  bool over() const { return root_ || error_; }
  const std::optional<Digest>& root() const { return root_; }
  const std::optional<Error>& error() const { return error_; }
  // The error of an ended publication.
  Result<void> check() const {
    if (error_) return fail(*error_);
    return {};
  }
  // The first end stays.
  void complete(const Digest& root) {
    if (!over()) root_ = root;
    changed_.notify();
  }
  void end(Error why) {
    if (over()) return;
    log::warn("joint.end", "version", id_.to_string(), "error", why);
    error_ = std::move(why);
    changed_.notify();
  }

  // Something has changed that a wait_for() may wait for.
  void notify() { changed_.notify(); }
  // Until the next notify(), at most until `until`.
  async::Task<void> wait_until(TimePoint until) { return changed_.wait_until(until); }
  // Until `holds()`. False: it did not hold at `give_up`. An error: the publication has ended, or
  // this agent stops. A wait without `give_up` ends with the publication at the latest: the lead
  // ends it if an agent is silent, and each agent ends it if its ranks, whose calls have deadlines,
  // have left.
  template <typename Condition>
  async::Task<Result<bool>> wait_for(Condition holds, TimePoint give_up = TimePoint::max()) {
    while (!holds()) {
      CO_TRY_VOID(check());
      if (co_await async::is_cancelled()) {
        co_return fail(ErrorCode::kUnavailable, "this agent stops");
      }
      const TimePoint now = steady_now();
      if (now >= give_up) co_return false;
      co_await changed_.wait_until(std::min(give_up, now + kTick));
    }
    co_return true;
  }

  // For conditions whose change nobody reports.
  static constexpr Duration kTick = std::chrono::milliseconds(500);

 private:
  const ModelVersion id_;
  std::optional<Digest> root_;
  std::optional<Error> error_;
  async::Notifier changed_;
};

}  // namespace rekindle::joint
