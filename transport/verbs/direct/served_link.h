#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "transport/verbs/link/link_revocation.h"
#include "transport/verbs/link/verbs_connection.h"
#include "transport/verbs/link/verbs_wire.h"

namespace rekindle::transport::verbs {

// The source's end of one link that is read directly: queue pairs that answer READs, and the
// windows through which they may. Blocking pools make, use and destroy it; one thread at a time.
class ServedLink final : public SourceLink {
 public:
  // Connected, windows bound: the puller may read as soon as it knows the answer.
  static Result<std::unique_ptr<ServedLink>> create(Rail& rail, const LinkRequest& request,
                                                    std::size_t max_queue_pairs,
                                                    ServedRegions regions);
  ~ServedLink() override { revoke(); }
  ServedLink(const ServedLink&) = delete;
  ServedLink& operator=(const ServedLink&) = delete;

  const LinkResponse& response() const override { return response_; }
  std::uint32_t source_rail() const override { return connection_->rail().index(); }
  std::uint32_t puller_rail() const override { return puller_rail_; }
  bool over(const ServedRegions& regions) const override;

 private:
  ServedLink(std::unique_ptr<Connection> connection, ServedRegions regions,
             std::uint32_t puller_rail)
      : regions_(std::move(regions)),
        puller_rail_(puller_rail),
        connection_(std::move(connection)),
        windows_(*connection_) {}

  Result<void> open_regions();
  bool begin_revoke() override { return !std::exchange(revoked_, true); }
  void post_invalidations(TimePoint deadline) override { windows_.post_invalidations(deadline); }
  void stop(TimePoint deadline) override;
  void release(TimePoint deadline) override;

  ServedRegions regions_;  // first: registered as long as a queue pair may read it
  const std::uint32_t puller_rail_;
  LinkResponse response_;
  std::unique_ptr<Connection> connection_;
  MemoryWindows windows_;
  bool revoked_ = false;
};

}  // namespace rekindle::transport::verbs
