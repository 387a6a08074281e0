#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "src/base/clock.h"
#include "src/bucket/bucket_plan.h"
#include "src/bucket/device.h"

namespace rekindle::client {

struct FilledBucket {
  bucket::DeviceAddress at = 0;
  // The parts lie within these.
  std::uint64_t bytes = 0;
  std::vector<bucket::Part> parts;
};

// Tiles of a session that have verified.
struct VerifiedTiles {
  TileRuns ready;
  bool all = false;
};

// The source of a session's buckets. One thread at a time; nothing here waits. A bucket is handed
// out after it is filled: a stream that waits for a process that dies would wait for ever. It is
// destroyed after everything that reads the buckets has ended.
class BucketFeed {
 public:
  virtual ~BucketFeed() = default;
  // Tiles that have verified since the last call.
  virtual Result<void> mark_ready(const VerifiedTiles& tiles) = 0;
  // nullopt: none yet, or ended(). The caller has given the last bucket back.
  virtual Result<std::optional<FilledBucket>> poll(TimePoint now) = 0;
  // The reads of the last bucket are queued on the session's stream.
  virtual Result<void> give_back() = 0;
  // Every bucket was handed out and read, and their memory is free again.
  virtual bool ended() const = 0;

  // poll() again when fd() is readable (-1: never), or after patience().
  virtual int fd() const = 0;
  virtual Duration patience() const = 0;
};

// How often to ask for an event that is about to come. A bucket takes much longer.
inline constexpr Duration kEventPatience = std::chrono::microseconds(50);

// Buckets that were taken before their targets were known. They are copied to memory of their own
// on the device, so that the producer can go on filling buckets. That memory is freed all at once,
// after the last of them was read. One thread at a time.
class BucketStash {
 public:
  // Both live longer. The work that is queued on `stream` must end before the stash is destroyed.
  BucketStash(bucket::Device& device, bucket::Stream& stream) : device_(device), stream_(stream) {}

  // Queues a copy of the bucket. False: the device has no memory for it.
  Result<bool> put(const FilledBucket& bucket);
  std::uint64_t bytes() const { return bytes_; }

  bool empty() const { return waiting_.empty(); }
  // The oldest bucket, after its copy is done; as with a feed, the reader need not wait. It stays
  // in place until let_go() frees all.
  Result<std::optional<FilledBucket>> take();
  // After take(): the reads of that bucket are queued on the stream.
  Result<void> give_back();
  // Frees the memory when all buckets were taken, given back and read by the device. Does not wait.
  Result<bool> let_go();
  // Gives the memory up without freeing it: the device may still read it.
  void leak();

 private:
  bucket::Device& device_;
  bucket::Stream& stream_;
  std::uint64_t bytes_ = 0;
  std::vector<std::unique_ptr<bucket::Memory>> memory_;
  struct Kept {
    FilledBucket bucket;
    std::unique_ptr<bucket::Event> moved;
  };
  std::deque<Kept> waiting_;
  // Behind the reads of the last bucket. Null: they are not queued yet.
  std::unique_ptr<bucket::Event> read_;
};

}  // namespace rekindle::client
