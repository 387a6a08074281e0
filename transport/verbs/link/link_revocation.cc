#include "transport/verbs/link/link_revocation.h"

#include <chrono>
#include <vector>

namespace rekindle::transport::verbs {
namespace {

constexpr std::chrono::milliseconds kInvalidateDeadline{200};

}  // namespace

void SourceLink::revoke() {
  SourceLink* const self = this;
  revoke_all({&self, 1});
}

// Memory windows go first: reads fail from then on, even while the queue pairs take their time.
// Windows that could not be invalidated are deallocated before their queue pair is destroyed, as
// soft-RoCE needs a minute for that otherwise. Destroying the queue pair ends every access.
void SourceLink::revoke_all(std::span<SourceLink* const> links) {
  std::vector<SourceLink*> open;
  for (auto* link : links) {
    if (link->begin_revoke()) open.push_back(link);
  }
  const TimePoint invalidated_by = std::chrono::steady_clock::now() + kInvalidateDeadline;
  for (auto* link : open) link->post_invalidations(invalidated_by);
  for (auto* link : open) link->stop(invalidated_by);
  const TimePoint flushed_by = std::chrono::steady_clock::now() + kInvalidateDeadline;
  for (auto* link : open) link->release(flushed_by);
}

}  // namespace rekindle::transport::verbs
