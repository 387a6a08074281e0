#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/base/result.h"
#include "src/base/unique_fd.h"

// What the agent orders of the device process, session by session.
namespace rekindle::device {

struct DeviceOrder {
  std::uint64_t session = 0;
  std::string device;
  std::string attached;            // AgentFrame with Attached
  std::vector<UniqueFd> segments;  // of it
  std::uint64_t bucket_bytes = 0;  // 0: the agent's default
};

struct DeviceOver {
  std::uint64_t session = 0;
  std::optional<Error> error;  // nullopt: every bucket was delivered
  std::uint64_t buckets = 0;
  std::uint64_t bytes = 0;
  std::chrono::microseconds elapsed{};  // first bucket queued → last one released
};

}  // namespace rekindle::device
