#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "src/async/task.h"
#include "src/bucket/direct_stages.h"
#include "transport/path.h"

namespace rekindle::pull {

// The slots of a worker's session in GPU memory, for NICs of this host to write to.
struct DirectSlots {
  transport::DeviceLanding landing;
  std::uint64_t bucket_bytes = 0;
  std::uint32_t slots = 0;
  // The session's direct buckets, in the order in which it will want them. Any thread.
  std::function<Result<std::vector<bucket::DirectBucket>>()> buckets;
};

// The session wants a bucket in a slot.
struct DirectWish {
  std::size_t bucket = 0;
  std::uint32_t slot = 0;
  // So many buckets, of those that were wanted before, have verified on the device.
  std::uint64_t verified = 0;
  // The bucket has landed before. These tiles are wrong.
  std::vector<TileIndex> wrong = {};
};

// Between a session that wants its buckets read straight into GPU memory, and the pull that reads
// them before it fetches anything into host memory. It decides nothing. Control thread only.
class DirectReads {
 public:
  struct Answers {
    std::function<void(std::size_t bucket)> landed;
    // Called once. Nothing writes to the slots any more.
    std::function<void(const std::string& why)> over;
  };
  DirectReads(boost::asio::any_io_executor executor, Answers answers)
      : changed(std::make_shared<async::Notifier>(std::move(executor))),
        answers_(std::move(answers)) {}

  // --- the session
  void offer(DirectSlots slots) {
    if (over_) return;
    slots_ = std::move(slots);
    changed->notify();
  }
  void want(DirectWish wish) {
    if (over_) return;
    wishes_.push_back(std::move(wish));
    if (wishes_.size() > kMostWishes)
      return end("the session wants more buckets than it has slots");
    changed->notify();
  }
  // It wants no more. over() follows.
  void end(std::string why) {
    if (!ended_) ended_ = std::move(why);
    changed->notify();
  }
  bool is_over() const { return over_; }

  // --- the pull
  std::optional<DirectSlots> take_slots() { return std::exchange(slots_, std::nullopt); }
  std::optional<DirectWish> take_wish() {
    if (wishes_.empty()) return std::nullopt;
    DirectWish wish = std::move(wishes_.front());
    wishes_.pop_front();
    return wish;
  }
  const std::optional<std::string>& ended() const { return ended_; }
  void landed(std::size_t bucket) { answers_.landed(bucket); }
  void finish(const std::string& why) {
    if (std::exchange(over_, true)) return;
    slots_.reset();
    answers_.over(why);
  }

  // Notified of each word of the session.
  const std::shared_ptr<async::Notifier> changed;

 private:
  // A session wants a bucket for each of its slots.
  static constexpr std::size_t kMostWishes = 64;

  const Answers answers_;
  std::optional<DirectSlots> slots_;
  std::deque<DirectWish> wishes_;
  std::optional<std::string> ended_;
  bool over_ = false;
};

}  // namespace rekindle::pull
