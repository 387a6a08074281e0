#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>

#include "src/base/clock.h"
#include "transport/verbs/link/verbs_wire.h"
#include "transport/verbs/memory/memory_registrar.h"

namespace rekindle::transport::verbs {

// Registered regions by key.
using ServedRegions = std::map<RegionKey, std::shared_ptr<RegisteredMemory>>;

// The source's end of one link of one session, whatever way it serves. The destructor revokes.
class SourceLink {
 public:
  virtual ~SourceLink() = default;
  virtual const LinkResponse& response() const = 0;
  virtual std::uint32_t source_rail() const = 0;  // index here
  virtual std::uint32_t puller_rail() const = 0;  // index there
  // Of no use any more (its rail moved, its puller misbehaved), or in the way of a region that is
  // not in `regions` any more.
  virtual bool over(const ServedRegions& regions) const = 0;

  // Takes all rights away; when it returns, nothing of it touches memory any more. Idempotent.
  void revoke();
  // Of all of these at once: a NIC that hangs is waited for once, not once for each.
  static void revoke_all(std::span<SourceLink* const> links);

 private:
  // The steps of it, in this order, by one thread; none waits beyond its deadline.
  virtual bool begin_revoke() = 0;  // false: that was done before
  virtual void post_invalidations(TimePoint deadline) = 0;
  virtual void stop(TimePoint deadline) = 0;     // waits for these; queue pairs to ERR
  virtual void release(TimePoint deadline) = 0;  // waits for the flush; destroys
};

}  // namespace rekindle::transport::verbs
