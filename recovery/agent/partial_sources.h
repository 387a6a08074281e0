#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string_view>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/agent/agent_parts.h"
#include "recovery/pull/pull_environment.h"
#include "recovery/swarm/have_feed.h"
#include "src/async/task.h"
#include "src/async/task_group.h"

namespace rekindle::agent {

// Makes a puller a source while it still pulls: the copy of a pull or a publication is served from
// its first verified tile on, and as a whole once the store has committed it. Announces the tiles
// that growing copies hold. Control thread only.
class PartialSources {
 public:
  // `is_leaving`: the version is on its way out of this host, so that no copy of it may be served.
  PartialSources(boost::asio::any_io_executor executor, AgentParts parts,
                 std::function<bool(const ModelVersion&)> is_leaving);

  // Serves what `held` lists of a copy that is being filled, also after its commit.
  void begin(const store::PendingVersion& pending, std::shared_ptr<const swarm::HeldTiles> held,
             bool for_round);
  // The copy will not be committed. On return nobody reads it any more.
  async::Task<void> abandon(CopyKey key);
  // Serves a committed copy and announces it. kStale: its version was retired meanwhile, and the
  // copy is removed; `how` is "pulled" or "published".
  async::Task<Result<void>> commit(std::shared_ptr<const store::StoredVersion> stored,
                                   std::string_view how);

  bool is_being_filled(const ModelVersion& id) const;
  async::Task<void> close(std::chrono::milliseconds deadline);

 private:
  bool serve(const std::shared_ptr<const store::StoredVersion>& stored,
             std::shared_ptr<const swarm::TileRuns> covers);
  async::Task<void> announce_growth();

  const AgentParts parts_;
  const std::function<bool(const ModelVersion&)> is_leaving_;
  // Copies that are being filled, and when the coordinator hears of them.
  std::map<CopyKey, swarm::AnnouncePolicy> growing_;
  async::TaskGroup announcing_;
};

}  // namespace rekindle::agent
