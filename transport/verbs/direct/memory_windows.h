#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "transport/verbs/link/remote_windows.h"
#include "transport/verbs/link/verbs_connection.h"
#include "transport/verbs/memory/memory_registrar.h"

namespace rekindle::transport::verbs {

// The memory windows (type 2B) of one served link. A puller reads a piece of a region only through
// the window that its queue pair has for it. Invalidating the windows is the first step of revoking
// a link (link/link_revocation.h): reads fail from then on, even while queue pairs take their time
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
    MwHandle handle;
    std::size_t queue_pair = 0;
    std::uint32_t key = 0;
  };
  // Waits for room while the send queue is full.
  Result<void> post(std::size_t queue_pair, ibv_send_wr& request, TimePoint deadline);

  Connection& connection_;
  std::vector<Window> windows_;
  // Requests that have not completed yet, per queue pair.
  std::vector<std::size_t> posted_;
};

}  // namespace rekindle::transport::verbs
