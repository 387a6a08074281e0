#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/clock.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/tensor/joint_plan.h"
#include "src/tensor/tile.h"

namespace rekindle::joint {

// The phases of a joint publication, as its lead sees them.
enum class Phase {
  // Some agents have yet to send their declarations.
  kDeclaring,
  // The table can be read. Leaves come.
  kWriting,
  // Every leaf is there. The lead claims the root at the coordinator.
  kClaiming,
  // The root is claimed. The leaves can be read.
  kCommitting,
  // Every agent has confirmed.
  kComplete,
  // why() has the reason.
  kEnded,
};

// What the lead of a joint publication collects (docs/internals/joint-publication.md). Sans I/O. A
// host is its place in the roster.
class JointLead {
 public:
  struct Host {
    std::string name;
    std::vector<std::uint32_t> ranks;
  };

  JointLead(ModelVersion id, std::vector<Host> hosts, TimePoint now);

  Phase phase() const { return phase_; }
  const std::optional<Error>& why() const { return why_; }
  std::size_t host_count() const { return hosts_.size(); }
  const Digest& root() const { return root_; }

  // The host is alive.
  void heard(std::uint32_t host, TimePoint now) { hosts_[host].heard = now; }
  // Ends the publication if a host was silent for too long. A complete one goes on.
  void advance(TimePoint now);
  // The lead itself slept.
  void forgive(Duration pause);
  void end(Error why);

  // A page of the host's declarations. kInvalid: pages do not fit together. kExhausted: those of
  // all hosts together are too large.
  Result<void> put_declarations(std::uint32_t host, std::uint64_t offset, std::uint64_t total_bytes,
                                std::string_view page);
  const std::string& declarations(std::uint32_t host) const { return hosts_[host].declarations; }

  // The plan of the table, and the layout of each host's copy that follows from it. Before it is
  // here, leaves are refused (kUnavailable).
  void set_plan(std::shared_ptr<const JointPlan> plan, std::vector<std::optional<Digest>> layouts);
  // Leaves that the host has computed. Ends the publication if another host has sent another leaf
  // of the same tile. kInvalid: no tiles of the plan.
  Result<void> put_leaves(std::uint32_t host,
                          std::span<const std::pair<TileIndex, TileIndex>> tiles,
                          std::span<const Digest> leaves);
  // The host has sent all its leaves. nullopt: its ranks have no elements, so it has no copy. Ends
  // the publication if the layout is not the one that follows from the plan.
  Result<void> put_layout(std::uint32_t host, std::optional<Digest> layout);

  // In kClaiming: what the lead claims.
  std::span<const Digest> leaves() const { return leaves_; }
  std::vector<Digest> layouts() const;
  void claimed(const Digest& root);

  Result<void> confirm(std::uint32_t host);

  // "a (ranks 0 and 1), b (rank 2)".
  std::string name_hosts(const std::vector<std::uint32_t>& hosts) const;

 private:
  struct HostState {
    Host host;
    TimePoint heard;
    std::string declarations;
    std::uint64_t declared_bytes = 0;
    bool declared = false;
    bool sent_all = false;
    std::optional<Digest> layout;  // with the plan
    bool confirmed = false;
  };
  void check_leaves();

  const ModelVersion id_;
  std::vector<HostState> hosts_;
  std::uint64_t declared_bytes_ = 0;  // of all hosts, announced
  Phase phase_ = Phase::kDeclaring;
  std::optional<Error> why_;
  std::shared_ptr<const JointPlan> plan_;
  std::vector<Digest> leaves_;
  TileSet have_;
  // Per tile, the first host that sent its leaf.
  std::vector<std::uint32_t> leaf_of_;
  Digest root_;
};

}  // namespace rekindle::joint
