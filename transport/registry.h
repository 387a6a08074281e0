#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "transport/read_op.h"

namespace rekindle::transport {

// A registered region of this process: bytes that peers may read. `keep_alive` owns the mapping; it
// is released only after remove() and after the last reader (socket page, queue pair) has let go.
struct Region {
  RegionKey key;
  std::span<const std::byte> bytes;
  int fd = -1;                  // file behind the mapping, for sendfile; -1 when none
  std::uint64_t fd_offset = 0;  // of bytes[0] in that file
  std::filesystem::path path;   // for same-host peers; empty when none
  std::shared_ptr<const void> keep_alive;
};

// Who may read what: one puller's session, made by the control plane when it accepted a grant.
struct Session {
  SessionToken token;
  std::string puller;                      // for messages and status
  std::vector<RegionKey> regions;          // sorted
  std::uint64_t max_bytes_per_second = 0;  // share of this source; 0 = no cap
};

// A counter in a page of its own, so that a process on the same host can watch it.
class SharedCounter {
 public:
  SharedCounter();
  ~SharedCounter();
  SharedCounter(const SharedCounter&) = delete;
  SharedCounter& operator=(const SharedCounter&) = delete;

  void bump() { value_->fetch_add(1, std::memory_order_release); }
  std::uint64_t value() const { return value_->load(std::memory_order_acquire); }
  int fd() const { return fd_.get(); }  // -1 when the kernel gave no page to share

 private:
  UniqueFd fd_;
  void* page_ = nullptr;  // null: own_ is used
  std::atomic<std::uint64_t> own_ = 0;
  std::atomic<std::uint64_t>* value_ = &own_;
};

// Hears of regions, on the thread that adds or removes them: hand on, do not block.
class RegionObserver {
 public:
  virtual ~RegionObserver() = default;
  virtual void region_added(const std::shared_ptr<const Region>& region) = 0;
  virtual void region_removed(RegionKey key) = 0;
};

// Registered regions by id and generation, and the sessions that may read them. Thread-safe.
class SegmentRegistry {
 public:
  RegionKey add(std::span<const std::byte> bytes, int fd, std::uint64_t fd_offset,
                std::filesystem::path path, std::shared_ptr<const void> keep_alive);
  // Later lookups are kStale. Returns at once; `keep_alive` goes when the last reader lets go.
  void remove(RegionKey key);

  // Admitting a token again replaces its session: more regions, another rate.
  void admit(Session session);
  // Later lookups are kDenied. Follow it with Server::drop_session() of every server.
  void revoke(const SessionToken& token);
  std::optional<Session> find_session(const SessionToken& token) const;
  // Its max_bytes_per_second; nothing when there is no such session.
  std::optional<std::uint64_t> session_rate(const SessionToken& token) const;

  // The region, held as long as the pointer lives. kStale: gone, or registered again since;
  // kDenied: no such session, or the region is not one of its.
  Result<std::shared_ptr<const Region>> lookup(RegionKey key) const;
  Result<std::shared_ptr<const Region>> lookup(const SessionToken& token, RegionKey key) const;

  // Tells it of every region there is, and of every change from now on; nullptr ends that, and
  // returns when no call is under way. One observer.
  void observe(RegionObserver* observer);

  // Changes with every remove(), admit() and revoke(): servers re-check what they cached when it
  // moved.
  std::uint64_t change_count() const { return changes_.value(); }
  const SharedCounter& changes() const { return changes_; }
  // Readers of this region right now (held lookups), also after remove(): 0 means drained.
  std::size_t reader_count(RegionKey key) const;

 private:
  struct Slot {
    std::uint32_t generation = 0;
    std::shared_ptr<const Region> region;  // null when free
  };
  Result<std::shared_ptr<const Region>> lookup_locked(RegionKey key) const;

  std::mutex observer_mutex_;           // held during calls; taken before mutex_
  RegionObserver* observer_ = nullptr;  // guarded by observer_mutex_
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;                // guarded by mutex_
  std::vector<std::uint32_t> free_slots_;  // guarded by mutex_
  // Removed regions that still have readers; guarded by mutex_.
  mutable std::map<RegionKey, std::weak_ptr<const Region>> draining_;
  std::unordered_map<SessionToken, Session> sessions_;  // guarded by mutex_
  SharedCounter changes_;
};

// The serving end of one transport: accepts paths of admitted sessions, answers reads.
class Server {
 public:
  virtual ~Server() = default;  // stops, drains, joins
  virtual std::string_view transport() const = 0;
  // What PathTarget::endpoint must be for a peer that reaches us as `host` (an IP address or name).
  virtual std::string endpoint(std::string_view host) const = 0;
  // The answer to a Handshake's request, for transports that have one. Blocks for system calls: on
  // a blocking pool. kDenied: no such session.
  virtual Result<std::string> accept(const SessionToken& token, std::string_view request);
  // Ends the connections of a revoked session; returns when none of its reads can touch memory.
  virtual void drop_session(const SessionToken& token) = 0;
};

}  // namespace rekindle::transport
