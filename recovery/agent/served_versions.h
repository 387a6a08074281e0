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

#include "recovery/swarm/have_feed.h"
#include "recovery/swarm/held_tiles.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/store/segment_store.h"
#include "transport/registry.h"

namespace rekindle::agent {

// Two versions with the same bytes are two copies: each is announced, served and let go of on its
// own.
struct CopyKey {
  ModelVersion id;
  Digest root;
  Digest layout;
  auto operator<=>(const CopyKey&) const = default;
};
CopyKey key_of(const Manifest& manifest);

// A copy whose segments are registered with the transports: committed, or still being filled. Of
// the latter only what `held` lists is ever offered, and that is final. Committing changes neither
// the mappings nor the regions, so that sessions go on.
struct Served {
  std::shared_ptr<const Manifest> manifest;
  std::shared_ptr<const store::StoredVersion> stored;  // null while it is being filled
  std::vector<std::shared_ptr<const store::MappedSegment>> segments;
  std::shared_ptr<const swarm::HeldTiles> held;  // null: complete
  bool for_round = false;                        // devices may write to it while it is incomplete
  std::vector<transport::RegionKey> regions;     // as in the layout
  std::uint64_t number = 0;                      // of this agent's life, for its Holder
  // Of a complete copy that lacks tensors: the tiles that lie in it as a whole.
  std::shared_ptr<const swarm::TileRuns> covers;

  bool complete() const { return held == nullptr; }
  bool verified() const;  // complete, and known to be right as of now
  const Checkpoint& checkpoint() const { return *manifest->checkpoint; }
  bool holds(TileIndex tile) const { return complete() || held->test(tile); }
  // The bytes of one layout entry.
  std::span<const std::byte> array(const LayoutEntry& entry) const;
};

// Keeps the copies that are served at hand for something else than the transports.
class Holder {
 public:
  virtual ~Holder() = default;
  virtual void hold(const Served& served) = 0;  // once; those that are being filled, too
  virtual void drop(std::uint64_t number) = 0;
};

// What this agent serves, and the registered regions. Control thread only.
class ServedVersions {
 public:
  explicit ServedVersions(transport::SegmentRegistry& registry) : registry_(registry) {}
  ~ServedVersions();
  ServedVersions(const ServedVersions&) = delete;
  ServedVersions& operator=(const ServedVersions&) = delete;

  // Idempotent. A copy that was being filled is complete from here on.
  void add(const std::shared_ptr<const store::StoredVersion>& stored);
  void add_pending(const store::PendingVersion& pending,
                   std::shared_ptr<const swarm::HeldTiles> held, bool for_round = false);
  void remove(const ModelVersion& id);
  void remove_copy(const CopyKey& key);
  // A copy that will not be completed: nobody finds it any more. Its regions are the caller's, to
  // be removed from the registry when its sessions have ended.
  std::vector<transport::RegionKey> withdraw_pending(const CopyKey& key);

  // Told of all that is here, and from here on of what comes and goes; null: nobody is any more.
  void hold_with(Holder* holder);

  // Versions that nobody new may read: they are let go when those that do are done.
  void set_draining(std::set<ModelVersion> ids) { draining_ = std::move(ids); }
  const std::set<ModelVersion>& draining() const { return draining_; }

  const Served* find(const CopyKey& key) const;
  std::vector<const Served*> find(const ModelVersion& id) const;
  std::shared_ptr<const Checkpoint> checkpoint(const Digest& root) const;
  // Canonical bytes of a layout or tensor set that some copy here uses.
  std::optional<std::string> layout_bytes(const Digest& digest) const;
  std::optional<std::string> tensor_set_bytes(const Digest& digest) const;
  // That is complete here in some layout.
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
