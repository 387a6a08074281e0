#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "src/base/ids.h"
#include "transport/rate_limiter.h"
#include "transport/registry.h"

namespace rekindle::transport::tcp {

// What the streams of one session share: their number and their egress cap.
struct SessionShare {
  explicit SessionShare(std::uint64_t bytes_per_second) : limiter(bytes_per_second) {}
  RateLimiter limiter;
  std::size_t streams = 0;  // guarded by the table's mutex
};

// Sessions with open streams at this server. Thread-safe.
class SessionTable {
 public:
  explicit SessionTable(std::size_t max_streams) : max_streams_(max_streams) {}

  // Null when the session has its fill of streams.
  std::shared_ptr<SessionShare> open_stream(const SessionToken& token,
                                            std::uint64_t bytes_per_second);
  void close_stream(const SessionToken& token);

 private:
  const std::size_t max_streams_;
  std::mutex mutex_;
  std::unordered_map<SessionToken, std::shared_ptr<SessionShare>> shares_;  // guarded by mutex_
};

}  // namespace rekindle::transport::tcp
