#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "src/base/clock.h"
#include "src/bucket/device.h"
#include "src/bucket/plan.h"

namespace rekindle::client {

struct FilledBucket {
  bucket::DeviceAddress at = 0;
  std::uint64_t bytes = 0;  // that it may have
  std::vector<bucket::Part> parts;
};

// Where a session's buckets come from. One thread at a time; nothing here waits. A bucket is handed
// out when it has been filled, not before: a stream that waits for a process which dies meanwhile
// would wait for ever. To be destroyed when what reads the buckets has been done.
class BucketFeed {
 public:
  virtual ~BucketFeed() = default;
  // Tiles that have verified since.
  virtual Result<void> mark_ready(const bucket::TileRuns& runs, bool all) = 0;
  // nullopt: none yet, or ended(). The bucket before this one has been given back.
  virtual Result<std::optional<FilledBucket>> poll(TimePoint now) = 0;
  // What reads the bucket that poll() returned last is on the session's stream.
  virtual Result<void> give_back() = 0;
  // Every bucket was handed out and read; what they lay in has been let go.
  virtual bool ended() const = 0;

  // When to poll() again: when this is readable (-1: nothing is), or after so long.
  virtual int fd() const = 0;
  virtual Duration patience() const = 0;
};

// Looking for an event that is about to come; short against the time that a bucket takes.
inline constexpr Duration kEventPatience = std::chrono::microseconds(50);

}  // namespace rekindle::client
