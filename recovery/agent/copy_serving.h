#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string_view>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/agent/agent_parts.h"
#include "recovery/pull/pull_environment.h"
#include "recovery/swarm/have_feed.h"
#include "src/async/task.h"
#include "src/async/task_group.h"

namespace rekindle::agent {

// How the copy of a pull or a publication becomes served: from its first verified tile while it is
// being filled, and as a whole once the store has committed it. Announces what copies that are
// being filled hold. Control thread only.
class CopyServing {
 public:
  // `is_leaving`: the version is on its way out of this host, so that no copy of it may be served.
  CopyServing(boost::asio::any_io_executor executor, AgentParts parts,
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
  bool serve(const std::shared_ptr<const store::StoredVersion>& stored);
  async::Task<void> announce_growth();

  const AgentParts parts_;
  const std::function<bool(const ModelVersion&)> is_leaving_;
  // Copies that are being filled, and when the coordinator hears of them.
  std::map<CopyKey, swarm::AnnouncePolicy> growing_;
  async::TaskGroup announcing_;
};

// Removes versions and copies from this host: first nobody finds a copy here any more, then its
// readers end, then the store deletes it. Once begun, a removal is carried through. Control thread
// only.
class VersionRetirement {
 public:
  struct Hooks {
    // A pull of the version runs here.
    std::function<bool(const ModelVersion&)> is_being_filled;
    // The store has removed copies from its list.
    std::function<void()> copies_removed;
  };
  VersionRetirement(AgentParts parts, Hooks hooks) : parts_(parts), hooks_(std::move(hooks)) {}

  // Removes all copies of the version; returns the bytes that became free.
  async::Task<Result<std::uint64_t>> retire(ModelVersion id);
  // Removes one copy that does not verify. Its workers are not waited for.
  async::Task<Result<std::uint64_t>> drop(std::shared_ptr<const store::StoredVersion> copy);

  bool is_retiring(const ModelVersion& id) const { return retiring_.contains(id); }
  // kUnavailable while a retire() of the version runs, which would delete a copy that came now.
  Result<void> check_not_retiring(const ModelVersion& id) const;

 private:
  async::Task<void> stop_serving_removed(ModelVersion id);

  const AgentParts parts_;
  const Hooks hooks_;
  // One entry for each call of retire() that runs.
  std::multiset<ModelVersion> retiring_;
};

}  // namespace rekindle::agent
