#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <ranges>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "recovery/coordinator/core/source_standing.h"
#include "recovery/coordinator/core/types.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/tensor/version_signature.h"

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
  // The node can prove the parts of tiles that the layout has.
  bool proves_parts = false;
  // Tiles that the node has, of a holding that is not complete.
  TileRuns held;
  // Tiles that lie in the layout as a whole, of a layout that does not cover every tensor. The node
  // may list fewer than there are.
  TileRuns covers;
  // Tiles of the checkpoint; 0 when the node does not say.
  std::uint32_t checkpoint_tiles = 0;
  // Of a joint publication: see DurableVersion::parts. Empty: the node does not say.
  std::vector<Digest> part_layouts = {};
  // As the node sends them. VersionSigners keeps the valid ones, once for all holders.
  std::vector<VersionSignature> signatures = {};

  // In memory.
  std::size_t size_bytes() const {
    return sizeof *this + id.model.size() +
           (held.size() + covers.size()) * sizeof(TileRuns::value_type) +
           part_layouts.size() * sizeof(Digest);
  }
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
  // Include the pending ones.
  std::size_t size() const { return all_.size() + pending_.size(); }
  std::size_t size_bytes() const;

  void put(Holding holding);
  void put_pending(Holding holding);
  void erase(const HoldingKey& key);
  // Also of the pending ones. Returns whether there was one.
  bool erase_models(const std::function<bool(const std::string& model)>& gone);
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

enum class NodeState { kAlive, kSuspect, kDead };

// The deaths of a node id over all its lives. After two deaths within a minute it is left out of
// plans from its return on, for 10 s at first and twice as long each time.
class Flapping {
 public:
  void died(const Timing& timing, TimePoint now);
  void returned(TimePoint now);
  TimePoint left_out_until() const { return left_out_until_; }
  bool left_out(TimePoint now) const { return left_out_until_ > now; }

 private:
  TimePoint left_out_until_{};
  TimePoint last_death_{};
  std::uint32_t deaths_ = 0;
  std::uint32_t strikes_ = 0;
  // The time to be left out at the next return.
  Duration owed_{};
};

struct Member {
  NodeInfo info;
  std::string failure_domain;
  // Names the connection that registered the node; "" once that has closed.
  std::string connection;
  NodeState state = NodeState::kAlive;
  TimePoint last_heard;
  // The last time that a puller reported new bytes from this node.
  TimePoint last_vouched{};
  // Of the working threads.
  std::uint64_t progress = 0;
  Holdings holdings;
  // From the last heartbeat; 0 also when the node does not say.
  std::uint64_t store_free_bytes = 0;
  // Sessions that still read each retiring version, from the last heartbeat. The node admits no new
  // readers of these versions.
  std::map<ModelVersion, std::uint32_t> readers;
  Flapping flapping;
  SourceStanding standing;

  bool is_dead() const { return state == NodeState::kDead; }
  bool alive(TimePoint now) const {
    return state == NodeState::kAlive && !connection.empty() && !standing.is_lost(now);
  }
  // Nodes of one failure domain fail together. Without a configured domain that is the host.
  std::string domain() const;
};

// As in the answer for `rekindle status`.
std::string_view state_name(const Member& member, TimePoint now);

// The nodes of the fleet and how alive each is. A node id belongs to one incarnation until that is
// dead or its connection has closed. Then a new process of the same party may have it at once, and
// others once the holder is suspect. So nobody takes the copies of a live member away. A silent
// node from which pullers still read is cut off from the coordinator, not dead: it stays suspect.
class Membership {
 public:
  Membership(const Timing& timing, std::size_t max_members)
      : timing_(timing), max_members_(max_members) {}

  // Returns true when this incarnation is new here; the holdings of an earlier one are gone.
  // kDenied: a live process uses the id.
  Result<bool> enroll(const NodeInfo& info, const std::string& failure_domain,
                      const std::string& connection, TimePoint now);
  // Notes that the node was heard. kStale: it is not the live incarnation of its id and must
  // register again.
  Result<Member*> hear(const std::string& node_id, const Incarnation& incarnation, TimePoint now);
  // The connection ended. Ignored when the node has registered over a newer one.
  void disconnect(const std::string& node_id, const Incarnation& incarnation,
                  const std::string& connection);
  // Updates the states; cheap while nobody is due. Nobody dies before `no_death_before`.
  void advance(TimePoint now, TimePoint no_death_before);
  // Excuses the time for which the coordinator itself slept.
  void shift(Duration by);

  Member* find(const std::string& node_id, const Incarnation& incarnation);
  const Member* find(const std::string& node_id, const Incarnation& incarnation) const;
  // By node id.
  const std::map<std::string, Member>& all() const { return members_; }
  std::map<std::string, Member>& all() { return members_; }

 private:
  // May this process have the id of the holder, which may live?
  static Result<void> check_owner(const Member& holder, const NodeInfo& info);
  TimePoint advance_one(Member& member, TimePoint now, TimePoint no_death_before) const;

  const Timing timing_;
  const std::size_t max_members_;
  // No state changes before it.
  TimePoint next_due_{};
  std::map<std::string, Member> members_;
};

}  // namespace rekindle::coordinator
