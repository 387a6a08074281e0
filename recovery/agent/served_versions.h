#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "proto/coordinator.pb.h"
#include "recovery/swarm/have_feed.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/store/segment_store.h"
#include "transport/registry.h"

namespace rekindle::agent {

// Names a copy. Two versions with the same bytes are two copies: each is announced, served and
// removed on its own.
struct CopyKey {
  ModelVersion id;
  Digest root;
  Digest layout;
  auto operator<=>(const CopyKey&) const = default;
};
CopyKey key_of(const Manifest& manifest);
// The tiles that a copy without some tensors holds whole. Null: it has all tensors. Takes long with
// many tensors; any thread.
std::shared_ptr<const swarm::TileRuns> covers_of(const Manifest& manifest);

// A copy whose segments are registered with the transports: committed, or still being filled. Of a
// copy that is being filled only the tiles in `held` are offered; they never change. A commit
// changes neither the mappings nor the regions, so that sessions go on.
struct Served {
  std::shared_ptr<const Manifest> manifest;
  // Null while the copy is being filled.
  std::shared_ptr<const store::StoredVersion> stored;
  std::vector<std::shared_ptr<const store::MappedSegment>> segments;
  // Null when the copy is complete.
  std::shared_ptr<const swarm::HeldTiles> held;
  // Devices may write to the copy while it is incomplete.
  bool for_round = false;
  // In the order of the layout.
  std::vector<transport::RegionKey> regions;
  // Names the copy to the Holder; unique until the agent ends.
  std::uint64_t number = 0;
  // The tiles that a complete copy without some tensors holds whole.
  std::shared_ptr<const swarm::TileRuns> covers;

  bool complete() const { return held == nullptr; }
  // Complete, and known to be right as of now.
  bool verified() const;
  // The copy has every tensor of its checkpoint, or is being filled with all of them.
  bool whole() const;
  const Checkpoint& checkpoint() const { return *manifest->checkpoint; }
  bool holds(TileIndex tile) const { return complete() || held->test(tile); }
  // It keeps proofs of the parts of tiles that it holds.
  bool proves_parts() const { return complete() && !manifest->part_proofs.empty(); }
  // The bytes of one layout entry.
  std::span<const std::byte> array(const LayoutEntry& entry) const;
};

// The announcement of a copy to the coordinator. Of a copy that is being filled it lists the tiles
// that are held now, or most of them.
proto::Holding make_holding(const Served& served);

// Keeps served copies ready for a user beside the transports: the device process.
class Holder {
 public:
  virtual ~Holder() = default;
  // Once for each copy, also for a copy that is being filled.
  virtual void hold(const Served& served) = 0;
  virtual void drop(std::uint64_t number) = 0;
};

// The copies that this agent serves, and their registered regions. Control thread only.
class ServedVersions {
 public:
  explicit ServedVersions(transport::SegmentRegistry& registry) : registry_(registry) {}
  ~ServedVersions();
  ServedVersions(const ServedVersions&) = delete;
  ServedVersions& operator=(const ServedVersions&) = delete;

  // Idempotent. Makes a copy that was being filled complete. `covers`: covers_of() it.
  void add(const std::shared_ptr<const store::StoredVersion>& stored,
           std::shared_ptr<const swarm::TileRuns> covers);
  void add(const std::shared_ptr<const store::StoredVersion>& stored) {
    add(stored, covers_of(stored->manifest));
  }
  void add_pending(const store::PendingVersion& pending,
                   std::shared_ptr<const swarm::HeldTiles> held, bool for_round = false);
  void remove(const ModelVersion& id);
  void remove_copy(const CopyKey& key);
  // Removes a copy that will not be completed, so that nobody finds it any more. The caller removes
  // its regions from the registry when its sessions have ended.
  std::vector<transport::RegionKey> withdraw_pending(const CopyKey& key);

  // Tells the holder of all copies, and from here on of each that comes or goes. Null ends this.
  void hold_with(Holder* holder);

  // Versions that admit no new readers. They are retired when their present readers are done.
  void set_draining(std::set<ModelVersion> ids) { draining_ = std::move(ids); }
  const std::set<ModelVersion>& draining() const { return draining_; }

  const Served* find(const CopyKey& key) const;
  std::vector<const Served*> find(const ModelVersion& id) const;
  std::shared_ptr<const Checkpoint> checkpoint(const Digest& root) const;
  // The canonical bytes of a layout or tensor set that a copy here uses.
  std::optional<std::string> layout_bytes(const Digest& digest) const;
  std::optional<std::string> tensor_set_bytes(const Digest& digest) const;
  // The newest version of which a complete copy is here, in any layout.
  std::optional<std::uint64_t> newest_version(const std::string& model) const;
  const std::map<CopyKey, Served>& all() const { return served_; }

 private:
  void emplace(const CopyKey& key, Served served);
  std::map<CopyKey, Served>::iterator erase(std::map<CopyKey, Served>::iterator at);

  transport::SegmentRegistry& registry_;
  std::map<CopyKey, Served> served_;
  std::set<ModelVersion> draining_;
  Holder* holder_ = nullptr;
  std::uint64_t last_number_ = 0;
};

}  // namespace rekindle::agent
