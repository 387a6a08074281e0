#pragma once

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "recovery/device/bell.h"
#include "recovery/device/order.h"
#include "src/bucket/contents.h"

namespace rekindle::device {

// What the control thread tells a session's thread.
class Mailbox {
 public:
  struct News {
    bucket::TileRuns ready;
    bool complete = false;
    std::optional<SpreadOrder> spread;
    std::optional<std::string> stop;  // why it shall take no part in a round, or no more
    std::optional<Error> ended;
    bool gone = false;  // and nobody can read its buckets any more
  };
  explicit Mailbox(Bell bell) : bell_(std::move(bell)) {}
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  void tell(const bucket::TileRuns& runs, bool complete) {
    {
      const std::lock_guard lock(mutex_);
      news_.ready.insert(news_.ready.end(), runs.begin(), runs.end());
      news_.complete = news_.complete || complete;
    }
    bell_.ring();
  }
  void spread(SpreadOrder order) {
    {
      const std::lock_guard lock(mutex_);
      news_.spread = std::move(order);
    }
    bell_.ring();
  }
  void stop(std::string why) {
    {
      const std::lock_guard lock(mutex_);
      if (!news_.stop) news_.stop = std::move(why);
    }
    bell_.ring();
  }
  void end(Error why, bool gone) {
    {
      const std::lock_guard lock(mutex_);
      if (!news_.ended) news_.ended = std::move(why);
      news_.gone = news_.gone || gone;
    }
    bell_.ring();
  }

  int fd() const { return bell_.fd(); }
  // What was told since the last time; that it has ended, or shall stop, stays.
  News take() {
    bell_.hear();
    const std::lock_guard lock(mutex_);
    News news = std::move(news_);
    news_ = {};
    news_.stop = news.stop;
    news_.ended = news.ended;
    news_.gone = news.gone;
    return news;
  }
  bool told_to_stop() const {
    const std::lock_guard lock(mutex_);
    return news_.stop.has_value();
  }

 private:
  const Bell bell_;
  mutable std::mutex mutex_;
  News news_;
};

}  // namespace rekindle::device
