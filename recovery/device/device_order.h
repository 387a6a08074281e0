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
#include "src/bucket/round_plan.h"
#include "src/bucket/segment_keep.h"

// The agent's orders to the device process, and its answers, session by session.
namespace rekindle::device {

struct DeviceOrder {
  std::uint64_t session = 0;
  std::string device;
  // A serialized AgentFrame with Attached.
  std::string attached;
  // The segments that `attached` names.
  std::vector<UniqueFd> segments;
  // Kept until the device process no longer reads the segments.
  std::shared_ptr<const void> keep;
  // 0: the agent's default.
  std::uint64_t bucket_bytes = 0;
  // How long a worker that lives may keep a bucket.
  std::chrono::milliseconds release{600'000};
  // The version's tile digests, in a sealed memfd. Sessions in a round and sessions that verify
  // uploads need them.
  UniqueFd leaves;
  std::uint64_t leaves_bytes = 0;
  // The session waits for spread() or stop_spread() before it uploads anything.
  bool in_round = false;
  // The session compares its own uploads with the leaves, on the device.
  bool verify_upload = false;
  // The session may offer its slots to the NICs of this host. Needs the leaves.
  bool direct = false;
};

// What became of the pages of files that are dropped.
enum class Pages {
  // The next copy may be in the same files.
  kStay,
  // The files were deleted, or may have other pages now.
  kGone,
};

struct DeviceOver {
  std::uint64_t session = 0;
  // nullopt: every bucket was delivered.
  std::optional<Error> error;
  std::uint64_t buckets = 0;
  std::uint64_t bytes = 0;
  // From the first bucket that was queued to the release of the last one.
  std::chrono::microseconds elapsed{};
  // Buckets that did not match and were uploaded once more.
  std::uint64_t refilled = 0;
};

// --- broadcast rounds, docs/internals/rounds.md

// A session in a round has its buckets.
struct DeviceJoined {
  std::uint64_t session = 0;
  // The largest bucket that the device has room for.
  std::uint64_t bucket_bytes = 0;
  // As bucket::digest_of.
  Digest contents;
  std::uint64_t payload_bytes = 0;
  // The communicators that the device keeps.
  std::vector<std::string> communicators;
};
struct SpreadOrder {
  std::uint64_t session = 0;
  std::string communicator;
  // The id by which the ranks meet; "": the communicator is kept from an earlier round.
  std::string id;
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::uint64_t bucket_bytes = 0;
  // Rank owners[i] owns share i.
  std::vector<std::uint32_t> owners;
  // Every keep_count-th bucket, from keep_index on, is written to the session's segments. From this
  // order until SpreadOver nobody else writes there. keep_count 0: none.
  std::uint32_t keep_index = 0;
  std::uint32_t keep_count = 0;
  // Owners fetch their shares from other hosts meanwhile, so a bucket may take longer.
  bool owners_fetch = false;
  // Shares that this host fetches into the session's segments. No rank keeps them there.
  std::vector<std::uint32_t> fetched = {};
  // The session's pieces that the round brings; empty: all of them. The others come after it, from
  // the segments.
  bucket::PieceRuns pieces = {};
  // How many of the ranks are on this host. If not all are, these share the sending of each bucket,
  // over their links to the host.
  std::uint32_t ranks_here = 1;
};
// The tiles of the session's own share that this host has yet to fetch, in the order of its
// buckets.
struct ShareWanted {
  std::uint64_t session = 0;
  TileRuns tiles;
};
struct SpreadOver {
  std::uint64_t session = 0;
  // nullopt: every bucket was spread. Otherwise the remaining buckets come from the segments.
  std::optional<Error> error;
  std::uint64_t buckets = 0;
  // Bytes that the worker was given.
  std::uint64_t bytes = 0;
  // From the communicator's start to the last filled bucket.
  std::chrono::microseconds elapsed{};
  // From the order to the communicator's start.
  std::chrono::microseconds meet{};
  // Tiles that were kept as ordered. Nothing more is written.
  std::vector<bucket::KeptTiles> kept = {};
  std::uint64_t kept_bytes = 0;
  // Why the worker was not given every byte, although all were spread.
  std::optional<Error> worker_lost = {};
  // From the arrival of a bucket on the device until it had verified, of all buckets together.
  std::chrono::microseconds verify{};
  // Every bucket of the round was delivered, and the session's other pieces have yet to come.
  bool more = false;
};

// --- direct reads, docs/internals/devices.md

// A session's slots, for NICs to write to.
struct SlotsOffered {
  std::uint64_t session = 0;
  std::uint64_t bucket_bytes = 0;
  std::uint32_t slots = 0;
  // As bucket::digest_of.
  Digest contents;
  // A dmabuf of the slots, which lie one after the other.
  UniqueFd memory;
};
// Answered by DeviceLink::bucket_landed() or reads_over().
struct BucketWanted {
  std::uint64_t session = 0;
  std::size_t bucket = 0;
  std::uint32_t slot = 0;
  // So many of the buckets that were wanted so far have verified.
  std::uint64_t verified = 0;
  // The bucket has landed before. These tiles are wrong.
  std::vector<TileIndex> wrong = {};
};
// Answered by DeviceLink::reads_over().
struct ReadsEnded {
  std::uint64_t session = 0;
  // The worker was handed every byte, all of it verified on the device.
  bool all = false;
  std::uint64_t buckets = 0;
  // Why the rest comes from this host's copy.
  std::string why;
};

// The device process reports these by itself.
class DeviceEvents {
 public:
  virtual ~DeviceEvents() = default;
  // Only for sessions that the agent has not ended.
  virtual void device_over(const DeviceOver& over) = 0;
  virtual void device_joined(const DeviceJoined& joined) = 0;
  virtual void share_wanted(const ShareWanted& wanted) = 0;
  virtual void spread_progress(std::uint64_t session, std::uint64_t bytes) = 0;
  virtual void spread_over(const SpreadOver& over) = 0;
  virtual void meeting_id(std::uint64_t number, const Result<std::string>& id) = 0;
  // Also for sessions that the agent has ended: their slots stay until reads_over().
  virtual void slots_offered(SlotsOffered offered) = 0;
  virtual void bucket_wanted(const BucketWanted& wanted) = 0;
  virtual void reads_ended(const ReadsEnded& ended) = 0;
};

}  // namespace rekindle::device
