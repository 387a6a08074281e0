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
#include "transport/session_hello.h"

namespace rekindle::transport {

// A token bucket over bytes that the streams of one session share. The caller passes the time.
// Thread-safe.
class RateLimiter {
 public:
  explicit RateLimiter(std::uint64_t bytes_per_second) { set_rate(bytes_per_second); }

  void set_rate(std::uint64_t bytes_per_second);  // 0 = no cap
  std::uint64_t rate() const;

  // Takes up to `wanted` bytes and returns how many: 0, or at least min(wanted, a useful minimum).
  std::uint64_t take(std::uint64_t wanted, TimePoint now);
  // Returns bytes that were taken and not sent.
  void give_back(std::uint64_t bytes);
  // When take() will return a useful minimum.
  TimePoint ready_at(TimePoint now) const;

 private:
  void refill(TimePoint now);

  mutable std::mutex mutex_;
  // Guarded by mutex_, as are the others.
  std::uint64_t rate_ = 0;
  // The size of the bucket: 10 ms of the rate, at least kSmallestBurst.
  std::uint64_t burst_ = 0;
  // The smallest grant. To wake up for less costs more than it moves.
  std::uint64_t minimum_ = 0;
  double tokens_ = 0;
  TimePoint last_{};
};

// A registered region of this process: bytes that peers may read. `keep_alive` owns the mapping. It
// is released only after remove(), when the last reader (socket page, queue pair) has let go.
struct Region {
  RegionKey key;
  std::span<const std::byte> bytes;
  // The file behind the mapping, for sendfile; -1: none. `fd_offset` is the place of bytes[0] in
  // it.
  int fd = -1;
  std::uint64_t fd_offset = 0;
  // For peers on the same host. Empty: none.
  std::filesystem::path path;
  std::shared_ptr<const void> keep_alive;
};

// The rights of one puller. The control plane makes a session when it accepts a grant.
struct Session {
  SessionToken token;
  std::string puller;              // for messages and status
  std::vector<RegionKey> regions;  // sorted
  // The session's share of this source; 0: no cap.
  std::uint64_t max_bytes_per_second = 0;
  // The puller is of a release before protocol 3: its streams send the token.
  bool sends_token = false;
  // The addresses, without ports, from which its data streams may come. Empty: from any.
  std::vector<std::string> stream_hosts = {};
};

// A counter in a separate page, which processes on the same host can watch.
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

// Gets the changes of a registry, on the thread that makes them. Its methods must not block.
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
  // Later lookups are kStale. Returns at once; `keep_alive` is released when the last reader lets
  // go.
  void remove(RegionKey key);

  // Admitting a token again replaces its session: more regions, another rate.
  void admit(Session session);
  // Later lookups are kDenied. Call Server::drop_session() of every server after it.
  void revoke(const SessionToken& token);
  std::optional<Session> find_session(const SessionToken& token) const;
  std::optional<SessionToken> token_of(const SessionHandle& handle) const;
  // The session's max_bytes_per_second, if there is such a session.
  std::optional<std::uint64_t> session_rate(const SessionToken& token) const;

  // The region; the result holds it. kStale: it was removed, or registered again since. kDenied: no
  // such session, or the session may not read the region.
  Result<std::shared_ptr<const Region>> lookup(RegionKey key) const;
  Result<std::shared_ptr<const Region>> lookup(const SessionToken& token, RegionKey key) const;

  // Tells the observer of every region there is, and of every change from now on. There is one
  // observer. nullptr ends the calls, and returns when none is under way.
  void observe(RegionObserver* observer);

  // Grows with every remove(), admit() and revoke(). Servers check their caches again when it has
  // moved.
  std::uint64_t change_count() const { return changes_.value(); }
  const SharedCounter& changes() const { return changes_; }
  // How many lookups of this region are held, also after remove(). 0: it has drained.
  std::size_t reader_count(RegionKey key) const;

 private:
  struct Slot {
    std::uint32_t generation = 0;
    std::shared_ptr<const Region> region;  // null when free
  };
  Result<std::shared_ptr<const Region>> lookup_locked(RegionKey key) const;

  // Held while the observer is called. Taken before mutex_.
  std::mutex observer_mutex_;
  RegionObserver* observer_ = nullptr;  // guarded by observer_mutex_
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;                // guarded by mutex_
  std::vector<std::uint32_t> free_slots_;  // guarded by mutex_
  // Removed regions that still have readers; guarded by mutex_.
  mutable std::map<RegionKey, std::weak_ptr<const Region>> draining_;
  std::unordered_map<SessionToken, Session> sessions_;  // guarded by mutex_
  // The tokens of sessions_; guarded by mutex_.
  std::unordered_map<SessionHandle, SessionToken> handles_;
  SharedCounter changes_;
};

// The serving end of one transport: accepts paths of admitted sessions, answers reads.
class Server {
 public:
  virtual ~Server() = default;  // stops, drains, joins
  virtual std::string_view transport() const = 0;
  // The PathTarget::endpoint for a peer that reaches this host as `host` (an IP address or name).
  virtual std::string endpoint(std::string_view host) const = 0;
  // The answer to a Handshake's request, for transports that have one. Blocks for system calls:
  // call it on a blocking pool. kDenied: no such session.
  virtual Result<std::string> accept(const SessionToken& token, std::string_view request);
  // Ends the connections of a revoked session; returns when none of its reads can touch memory.
  virtual void drop_session(const SessionToken& token) = 0;
};

}  // namespace rekindle::transport
