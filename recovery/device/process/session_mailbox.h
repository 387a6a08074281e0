#pragma once

#include <cerrno>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include <sys/eventfd.h>
#include <unistd.h>

#include "recovery/device/device_order.h"
#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/bucket/contents.h"

namespace rekindle::device {

// Wakes a thread that polls. Any thread rings it; however often it rang, the thread wakes once.
class Bell {
 public:
  static Result<Bell> create() {
    UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!fd) return fail_errno(errno, "create an eventfd");
    return Bell(std::move(fd));
  }
  int fd() const { return fd_.get(); }
  void ring() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(fd_.get(), &one, sizeof one);
  }
  void hear() const {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto got = ::read(fd_.get(), &count, sizeof count);
  }

 private:
  explicit Bell(UniqueFd fd) : fd_(std::move(fd)) {}
  UniqueFd fd_;
};

// Messages of the control thread to a session's thread.
class Mailbox {
 public:
  struct News {
    // Tiles that have verified since the last take().
    TileRuns ready;
    bool complete = false;
    std::optional<SpreadOrder> spread;
    // Why the session takes no part in a round, or leaves it.
    std::optional<std::string> stop;
    std::optional<Error> ended;
    // The last bucket that a NIC has brought.
    std::optional<std::uint64_t> landed;
    // Why no NIC writes to the session's slots any more.
    std::optional<std::string> reads_over;
    // The session has ended, and nobody can read its buckets any more.
    bool gone = false;
  };
  explicit Mailbox(Bell bell) : bell_(std::move(bell)) {}
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  void tell(const TileRuns& runs, bool complete) {
    change([&](News& news) {
      news.ready.insert(news.ready.end(), runs.begin(), runs.end());
      news.complete = news.complete || complete;
    });
  }
  void spread(SpreadOrder order) {
    change([&](News& news) { news.spread = std::move(order); });
  }
  void landed(std::uint64_t bucket) {
    change([&](News& news) { news.landed = bucket; });
  }
  void reads_over(std::string why) {
    change([&](News& news) { news.reads_over = std::move(why); });
  }
  void stop(std::string why) {
    change([&](News& news) {
      if (!news.stop) news.stop = std::move(why);
    });
  }
  void end(Error why, bool gone) {
    change([&](News& news) {
      if (!news.ended) news.ended = std::move(why);
      news.gone = news.gone || gone;
    });
  }

  // Wakes the session without news.
  void wake() const { bell_.ring(); }
  // Readable when there is news.
  int fd() const { return bell_.fd(); }
  // Returns the news since the last call. `stop`, `reads_over`, `ended` and `gone` stay set.
  News take() {
    bell_.hear();
    const std::lock_guard lock(mutex_);
    News news = std::move(news_);
    news_ = {};
    news_.stop = news.stop;
    news_.reads_over = news.reads_over;
    news_.ended = news.ended;
    news_.gone = news.gone;
    return news;
  }
  bool told_to_stop() const {
    const std::lock_guard lock(mutex_);
    return news_.stop.has_value();
  }

 private:
  template <typename Change>
  void change(Change apply) {
    {
      const std::lock_guard lock(mutex_);
      apply(news_);
    }
    bell_.ring();
  }

  const Bell bell_;
  mutable std::mutex mutex_;
  News news_;
};

}  // namespace rekindle::device
