#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "transport/path.h"
#include "transport/registry.h"

// A transport in memory, for tests: a peer that owns byte regions, and paths to it that follow a
// script of faults. It reads the steady clock in poll(); nothing runs by itself.
namespace rekindle::transport::fake {

inline constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

// The script of one path. Ops are counted from 0 in the order in which the path took them.
struct Script {
  std::chrono::microseconds delay{0};  // from post to completion, at least
  std::uint64_t bytes_per_second = 0;  // 0: as fast as memcpy
  std::size_t queue_depth = 1024;      // ops in flight
  std::size_t ops_per_post = 1024;     // a longer post is taken as a prefix
  std::uint64_t fail_at = kNever;      // this op completes with fail_status, the path goes on
  OpStatus fail_status = OpStatus::kFault;
  std::uint64_t corrupt_from = kNever;  // ops in [from, to) land with one byte flipped
  std::uint64_t corrupt_to = kNever;
  // Ops from this one on land nothing and complete only after abort().
  std::uint64_t lose_from = kNever;
  std::uint64_t break_at = kNever;  // taking this op breaks the connection
  // abort() takes this long to drain. Until then the path writes to the destinations, so early
  // reuse corrupts data and shows.
  std::chrono::microseconds drain_delay{0};
  bool pollable = true;  // false: wait_fd() is -1
};

// The destinations of the ops in flight on any number of paths. It counts bytes with two writers.
// Thread-safe.
class WriterLedger {
 public:
  void enter(const ReadOp& op);
  void leave(const ReadOp& op);
  std::uint64_t conflicts() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::uintptr_t, std::uintptr_t> writers_;  // begin -> end; guarded by mutex_
  std::uint64_t conflicts_ = 0;                       // guarded by mutex_
};

// The other end. Thread-safe; outlives its paths.
class FakePeer {
 public:
  explicit FakePeer(std::string name = "peer");
  ~FakePeer();  // kills what is still connected
  FakePeer(const FakePeer&) = delete;
  FakePeer& operator=(const FakePeer&) = delete;

  RegionKey add_region(std::span<const std::byte> bytes);  // `bytes` outlive the peer
  void remove_region(RegionKey key) { registry_.remove(key); }
  SessionToken admit(std::vector<RegionKey> regions);
  void revoke(const SessionToken& token);  // ops that have not begun are kDenied

  // kPeerLost when dead, kDenied when the session is unknown.
  Result<std::unique_ptr<Path>> connect(const SessionToken& token, const Script& script = {},
                                        WriterLedger* ledger = nullptr);
  // Breaks all connections. No new one can be made.
  void kill();
  // Like SIGSTOP and SIGCONT: while it is frozen no byte moves and nothing completes.
  void freeze(bool frozen);

  const std::string& name() const { return name_; }
  bool dead() const { return dead_.load(std::memory_order_acquire); }
  bool frozen() const { return frozen_.load(std::memory_order_acquire); }
  // How many bytes this peer has served.
  std::uint64_t bytes_served() const { return bytes_served_.load(std::memory_order_relaxed); }

 private:
  friend class FakePath;
  void ring_all();  // makes every path's wait_fd readable

  const std::string name_;
  SegmentRegistry registry_;
  std::atomic<bool> dead_ = false;
  std::atomic<bool> frozen_ = false;
  std::atomic<std::uint64_t> bytes_served_ = 0;
  std::mutex mutex_;
  std::vector<int> timers_;  // of the open paths; guarded by mutex_
};

}  // namespace rekindle::transport::fake
