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
  // The parts lie within these.
  std::uint64_t bytes = 0;
  std::vector<bucket::Part> parts;
};

// Tiles of a session that have verified.
struct VerifiedTiles {
  bucket::TileRuns ready;
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

}  // namespace rekindle::client
