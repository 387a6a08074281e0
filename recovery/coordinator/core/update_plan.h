#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "recovery/coordinator/core/durable_table.h"
#include "recovery/coordinator/core/membership.h"
#include "recovery/coordinator/core/round_place.h"

namespace rekindle::coordinator {

// What a round would do if it began now (docs/internals/rounds.md): who uploads, who fetches, and
// how many bytes cross each link. All sizes are bytes.
struct UpdatePlan {
  struct Rank {
    std::string node_id;
    std::string instance;
    std::uint32_t rank = 0;
    std::string device;
    bool owner = false;
    // Over its own PCIe link, with `rest`.
    std::uint64_t uploads = 0;
    // What it wants beyond the bytes of its party.
    std::uint64_t rest = 0;
  };
  // Ranks that want the same, or have these bytes in common. One rank alone uploads everything.
  struct Party {
    std::uint64_t bytes = 0;
    bool owners_fetch = false;
    std::vector<Rank> ranks;
  };
  // Over the network of a host.
  struct Host {
    std::string node_id;
    // From other hosts, into its memory.
    std::uint64_t fetches = 0;
    // By NCCL, as parts of rings that cross each host once.
    std::uint64_t receives = 0;
    std::uint64_t sends = 0;
    // To pullers, from its memory.
    std::uint64_t gives = 0;
    // Over the PCIe link of its busiest GPU.
    std::uint64_t busiest_upload = 0;
  };
  std::vector<Party> parties;
  // By node id. Also hosts that only give.
  std::vector<Host> hosts;
  // Ranks that have the version, and ranks whose agents do not say what they want.
  std::uint32_t ready = 0;
  std::uint32_t unknown = 0;
};

// A member of the group on a living node. `member` outlives the call.
struct UpdateMember {
  std::string node_id;
  const RoundMember* member = nullptr;
};

// The members want the same boxes of this version as of the one that they have. A host with the
// whole version fetches nothing; any other one is taken to have nothing of it. Holders give equal
// shares, or, of a version in parts, shares as large as their parts.
UpdatePlan plan_update(const ModelVersion& id, const DurableVersion& version,
                       const std::vector<UpdateMember>& members, const KnownPieces& pieces,
                       const Membership& nodes);

}  // namespace rekindle::coordinator
