#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "transport/verbs/connection.h"
#include "transport/verbs/memory_registrar.h"
#include "transport/verbs/source_link.h"
#include "transport/verbs/wire.h"

namespace rekindle::transport::verbs {

// The source's end of one link: queue pairs that answer READs, and the windows through which they
// may. Made, used and destroyed on blocking pools; one thread at a time.
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
        connection_(std::move(connection)) {}
  struct Window {
    MwHandle handle;
    std::size_t queue_pair = 0;
    std::uint32_t key = 0;
  };

  Result<void> open_windows();
  Result<void> open_window(RegionKey key, const Piece& piece, RemoteWindow& out);
  bool begin_revoke() override { return !std::exchange(revoked_, true); }
  void post_invalidations(TimePoint deadline) override;
  void stop(TimePoint deadline) override;
  void release(TimePoint deadline) override;
  // Posts a signalled request on a queue pair; waits for room while its send queue is full.
  Result<void> post(std::size_t queue_pair, ibv_send_wr& request, TimePoint deadline);
  // Takes completions until none is missing; what went wrong first. Looks at least once.
  Result<void> collect(TimePoint deadline);

  ServedRegions regions_;  // first: registered as long as a queue pair may read it
  const std::uint32_t puller_rail_;
  std::vector<Window> windows_;
  LinkResponse response_;
  std::unique_ptr<Connection> connection_;
  std::vector<std::size_t> posted_;  // not completed yet, per queue pair
  bool revoked_ = false;
};

}  // namespace rekindle::transport::verbs
