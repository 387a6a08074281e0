#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "recovery/agent/coordinator_link.h"
#include "recovery/agent/peer_sessions.h"
#include "recovery/agent/publisher_keys.h"
#include "recovery/agent/served_versions.h"
#include "recovery/rpc/rpc.h"
#include "src/async/task.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"

namespace rekindle::agent {

// The readers of versions on this host: sessions of peers, and workers. The daemon sets both when
// they exist; the embedded agent of a command has neither.
class VersionReaders {
 public:
  struct Workers {
    // Sessions of workers that use the version.
    std::function<std::uint32_t(const ModelVersion&)> count;
    // Waits for the workers that use the version, or ends their sessions.
    std::function<async::Task<void>(ModelVersion)> end;
  };
  void set_peers(PeerSessions& peers) { peers_ = &peers; }
  void set_workers(Workers workers) { workers_ = std::move(workers); }

  std::uint32_t workers(const ModelVersion& id) const {
    return workers_.count ? workers_.count(id) : 0;
  }
  std::uint32_t count(const ModelVersion& id) const {
    return workers(id) + (peers_ != nullptr ? peers_->count(id) : 0);
  }
  // Ends the sessions of peers that read the version, in this layout or in any.
  async::Task<void> end_peers(ModelVersion id, std::optional<Digest> layout = std::nullopt) {
    if (peers_ != nullptr) co_await peers_->end_all_of(std::move(id), layout);
  }
  async::Task<void> end_workers(ModelVersion id) {
    if (workers_.end) co_await workers_.end(std::move(id));
  }

 private:
  PeerSessions* peers_ = nullptr;
  Workers workers_;
};

// The objects that the units of one agent share. AgentCore owns them, and they outlive the units.
struct AgentParts {
  const rpc::Identity& identity;
  store::SegmentStore& store;
  WorkerPool& blocking_pool;
  WorkerPool& digest_pool;
  transport::SegmentRegistry& registry;
  ServedVersions& served;
  CoordinatorLink& link;
  VersionReaders& readers;
  const PublisherKeys& publishers;
};

}  // namespace rekindle::agent
