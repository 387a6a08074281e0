#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <ranges>
#include <utility>
#include <vector>

#include "src/base/digest.h"
#include "src/base/ids.h"

namespace rekindle::coordinator {

// Half-open runs of tile indices.
using TileRuns = std::vector<std::pair<std::uint32_t, std::uint32_t>>;

// One (version, layout) that a node holds.
struct Holding {
  ModelVersion id;
  Digest root;
  Digest tensor_set;
  Digest layout;
  std::uint64_t payload_bytes = 0;
  std::uint64_t checkpoint_bytes = 0;
  // The node has every tile of the layout.
  bool complete = false;
  // The layout covers every tensor.
  bool whole = false;
  // The node has compared the bytes with their digests.
  bool verified = false;
  // Tiles that the node has, of a holding that is not complete.
  TileRuns held;
  // Tiles that lie in the layout as a whole, of a layout that does not cover every tensor. The node
  // may list fewer than there are.
  TileRuns covers;
  // Tiles of the checkpoint; 0 when the node does not say.
  std::uint32_t checkpoint_tiles = 0;

  // Readers may be sent to it, and others may rely on it.
  bool counts() const { return complete && verified; }
  // A pull of this root may read it. An incomplete holding is verified tile by tile.
  bool readable(const Digest& wanted_root) const {
    return root == wanted_root && (!complete || verified);
  }
};
struct HoldingKey {
  ModelVersion id;
  Digest layout;
  auto operator<=>(const HoldingKey&) const = default;
};

// The holdings of one node. Those that wait for the claim of their version to become durable
// (pending) are kept apart: nothing relies on them.
class Holdings {
 public:
  using Map = std::map<HoldingKey, Holding>;

  const Map& all() const { return all_; }
  // Every layout of one version.
  std::ranges::subrange<Map::const_iterator> of(const ModelVersion& id) const;
  bool holds(const ModelVersion& id) const { return !of(id).empty(); }
  // A verified copy of every tensor.
  bool holds_whole(const ModelVersion& id, const Digest& root) const;
  // Verified tiles that make one layout complete, whatever the layout covers.
  bool holds_a_complete_layout(const ModelVersion& id) const;
  // Includes the pending ones.
  std::size_t size() const { return all_.size() + pending_.size(); }

  void put(Holding holding);
  void put_pending(Holding holding);
  void erase(const HoldingKey& key);
  void clear();
  void clear_pending() { pending_.clear(); }
  // `root_of` is asked for each version with a pending holding and returns its durable root, or
  // nullptr while there is none. Holdings of that root count from now on; others are dropped.
  template <typename RootOf>
  void settle_pending(const RootOf& root_of);

 private:
  Map all_;
  Map pending_;
};

template <typename RootOf>
void Holdings::settle_pending(const RootOf& root_of) {
  for (auto it = pending_.begin(); it != pending_.end();) {
    const Digest* root = root_of(it->first.id);
    if (root == nullptr) {
      ++it;
      continue;
    }
    if (*root == it->second.root) {
      all_[it->first] = std::move(it->second);
    } else {
      all_.erase(it->first);
    }
    it = pending_.erase(it);
  }
}

}  // namespace rekindle::coordinator
