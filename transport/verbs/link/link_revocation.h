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

// The source's end of one link of one session, read directly or staged. The destructor revokes it.
class SourceLink {
 public:
  virtual ~SourceLink() = default;
  virtual const LinkResponse& response() const = 0;
  virtual std::uint32_t source_rail() const = 0;  // index here
  virtual std::uint32_t puller_rail() const = 0;  // index there
  // The link is of no use any more, as its rail moved or its puller broke the rules. Or it keeps a
  // region from being deregistered that is not in `regions` any more.
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
