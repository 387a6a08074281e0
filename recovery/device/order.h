#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "src/base/digest.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/bucket/segment_keep.h"

// What the agent orders of the device process, session by session.
namespace rekindle::device {

struct DeviceOrder {
  std::uint64_t session = 0;
  std::string device;
  std::string attached;              // AgentFrame with Attached
  std::vector<UniqueFd> segments;    // of it
  std::shared_ptr<const void> keep;  // until the device process reads them no more
  std::uint64_t bucket_bytes = 0;    // 0: the agent's default
  // The version's tile digests, in a sealed memfd. A session in a round needs them, and one that
  // verifies uploads.
  UniqueFd leaves;
  std::uint64_t leaves_bytes = 0;
  bool in_round = false;  // waits for spread() or stop_spread() before it uploads anything
  // The session compares its own uploads with the leaves, on the device.
  bool verify_upload = false;
};

struct DeviceOver {
  std::uint64_t session = 0;
  std::optional<Error> error;  // nullopt: every bucket was delivered
  std::uint64_t buckets = 0;
  std::uint64_t bytes = 0;
  std::chrono::microseconds elapsed{};  // first bucket queued → last one released
  std::uint64_t refilled = 0;           // buckets that did not match and were uploaded once more
};

// --- broadcast rounds, docs/rounds.md

// A session in a round has its buckets.
struct DeviceJoined {
  std::uint64_t session = 0;
  std::uint64_t bucket_bytes = 0;  // that there is room for
  Digest contents;                 // bucket::digest_of
  std::uint64_t payload_bytes = 0;
  std::vector<std::string> communicators;  // that its device keeps
};
struct SpreadOrder {
  std::uint64_t session = 0;
  std::string communicator;  // its name
  std::string id;            // to meet by; "": it is kept
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::uint64_t bucket_bytes = 0;
  std::vector<std::uint32_t> owners;  // ranks; share i is owners[i]'s
  // Every keep_count-th bucket, from keep_index on, may be written to the session's segments: from
  // this order until SpreadOver nobody else writes there. 0: none.
  std::uint32_t keep_index = 0;
  std::uint32_t keep_count = 0;
};
struct SpreadOver {
  std::uint64_t session = 0;
  std::optional<Error>
      error;  // nullopt: every bucket was spread; else the rest comes from segments
  std::uint64_t buckets = 0;
  std::uint64_t bytes = 0;              // given to the worker
  std::chrono::microseconds elapsed{};  // the communicator was there → the last bucket was filled
  std::chrono::microseconds meet{};     // told to spread → the communicator was there
  std::vector<bucket::KeptTiles> kept = {};  // as they were ordered to be; nothing more is written
  std::uint64_t kept_bytes = 0;
  std::optional<Error> worker_lost = {};  // why it was not given all, though all was spread
};

// What the device process says of its sessions, unasked.
class DeviceEvents {
 public:
  virtual ~DeviceEvents() = default;
  // Of sessions that were not ended here.
  virtual void device_over(const DeviceOver& over) = 0;
  virtual void device_joined(const DeviceJoined& joined) = 0;
  virtual void spread_progress(std::uint64_t session, std::uint64_t bytes) = 0;
  virtual void spread_over(const SpreadOver& over) = 0;
  virtual void meeting_id(std::uint64_t number, const Result<std::string>& id) = 0;
};

}  // namespace rekindle::device
