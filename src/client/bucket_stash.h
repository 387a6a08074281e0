#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "src/client/bucket_feed.h"

namespace rekindle::client {

// Buckets that were taken before it was known where they shall go: moved to memory of their own on
// the device, so that what fills buckets goes on meanwhile. That memory is let go all at once, when
// the last of them has been read. One thread at a time.
class BucketStash {
 public:
  // Both live longer. What is queued on `stream` must be done before the stash is destroyed.
  BucketStash(bucket::Device& device, bucket::Stream& stream) : device_(device), stream_(stream) {}

  // Queues the move of what `bucket` has. False: the device has no memory for that.
  Result<bool> put(const FilledBucket& bucket);
  std::uint64_t bytes() const { return bytes_; }

  bool empty() const { return waiting_.empty(); }
  // The oldest one, when it has been moved: as with a feed, who reads it need not wait. Where it
  // is, it stays until all are let go.
  Result<std::optional<FilledBucket>> take();
  // After take(): what reads that bucket is on the stream.
  Result<void> give_back();
  // Lets the memory go when all have been taken, given back, and read by the device. Does not wait.
  Result<bool> let_go();
  // Never, then: the device may still read it.
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
  std::unique_ptr<bucket::Event> read_;  // behind what reads the last one; null: it is not queued
};

}  // namespace rekindle::client
