#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "transport/verbs/device/memory_window.h"
#include "transport/verbs/link/verbs_connection.h"
#include "transport/verbs/link/verbs_wire.h"
#include "transport/verbs/memory/memory_registrar.h"

namespace rekindle::transport::verbs {

// The memory windows (type 2B) of one served link. A puller reads a piece of a region only through
// the window that its queue pair has for it. Invalidating the windows is the first step of revoking
// a link: reads fail from then on, even while queue pairs take their time
// to stop. One thread at a time.
class MemoryWindows {
 public:
  // `connection` outlives this.
  explicit MemoryWindows(Connection& connection)
      : connection_(connection), posted_(connection.queue_pair_count()) {}

  // Posts the binding of a window for each queue pair and adds their keys to `out`.
  Result<void> bind(const Piece& piece, RemoteWindow& out, TimePoint deadline);
  // Posts the invalidation of all windows.
  void post_invalidations(TimePoint deadline);
  // Waits for all that was posted and returns the first failure. Polls at least once.
  Result<void> settle(TimePoint deadline);
  void deallocate() { windows_.clear(); }

 private:
  struct Window {
    MemoryWindow window;
    std::size_t queue_pair = 0;
  };
  // Waits for room while the send queue is full.
  Result<void> post(std::size_t queue_pair, ibv_send_wr request, TimePoint deadline);

  Connection& connection_;
  std::vector<Window> windows_;
  // Requests that have not completed yet, per queue pair.
  std::vector<std::size_t> posted_;
};

// Registered regions by key.
using ServedRegions = std::map<RegionKey, std::shared_ptr<RegisteredMemory>>;

// The source's end of one link of one session, read directly or staged. The destructor revokes it.
class SourceLink {
 public:
  virtual ~SourceLink() = default;
  virtual const LinkResponse& response() const = 0;
  virtual std::uint32_t source_rail() const = 0;  // index here
  virtual std::uint32_t puller_rail() const = 0;  // index there
  // The link is useless, as its rail moved or its puller broke the rules; or it holds a region that
  // is not in `regions` any more and cannot be deregistered before.
  virtual bool over(const ServedRegions& regions) const = 0;

  // Takes all rights away. When it returns, the link touches no memory any more. Idempotent.
  void revoke();
  // Revokes all of these at once: a NIC that hangs is waited for once, not once for each link.
  static void revoke_all(std::span<SourceLink* const> links);

 private:
  // The steps of a revocation. One thread takes them in this order, and none waits beyond its
  // deadline. begin_revoke() returns false if the link was revoked before. stop() waits for the
  // invalidations and moves the queue pairs to ERR. release() waits for the flush and destroys
  // them.
  virtual bool begin_revoke() = 0;
  virtual void post_invalidations(TimePoint deadline) = 0;
  virtual void stop(TimePoint deadline) = 0;
  virtual void release(TimePoint deadline) = 0;
};

}  // namespace rekindle::transport::verbs
