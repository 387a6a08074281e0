#pragma once

#include <string>
#include <vector>

#include "recovery/coordinator/core/pull_table.h"

namespace rekindle::coordinator {

// The pulls that found every source busy, the longest waiting first. A puller keeps its place as
// long as it asks again in time; free shares go to the front of the queue.
class PullQueue {
 public:
  explicit PullQueue(std::size_t max_waiting) : max_waiting_(max_waiting) {}

  // The number of other pulls of the same version before and behind this one. All are before a pull
  // that does not wait.
  struct Place {
    std::size_t ahead = 0;
    std::size_t behind = 0;
  };
  Place place_of(const Pull& pull) const;
  // Enters the pull, or renews its place. It is to ask again after `retry_after`.
  void enter(const Pull& pull, Duration retry_after, TimePoint now);
  void leave(const Pull& pull);
  void expire(TimePoint now);
  // Excuses the time for which the coordinator slept.
  void shift(Duration by);
  std::size_t size() const { return waiting_.size(); }

 private:
  struct Waiting {
    Incarnation puller;
    ModelVersion id;
    std::string shard;
    TimePoint expires;

    bool is(const Pull& pull) const {
      return puller == pull.puller.incarnation && id == pull.id && shard == pull.shard;
    }
  };

  const std::size_t max_waiting_;
  std::vector<Waiting> waiting_;
};

}  // namespace rekindle::coordinator
