#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "recovery/coordinator/core/fleet_state.h"
#include "recovery/coordinator/core/pull_table.h"
#include "recovery/coordinator/core/replicas.h"
#include "recovery/coordinator/core/rounds.h"

namespace rekindle::coordinator {

struct GrantTerms {
  Incarnation puller;
  Incarnation source;
  Digest root;
  // On the coordinator's monotonic clock.
  std::uint64_t expiry_ms = 0;
  // Never reused in one life of the coordinator.
  std::uint64_t serial = 0;
  // The epoch of the coordinator that gives it.
  std::uint64_t epoch = 0;
  // 0: no cap.
  std::uint64_t max_bytes_per_second = 0;
};
struct SourceOffer {
  NodeInfo node;
  Digest layout;
  bool complete = false;
  TileRuns held;
  std::uint64_t payload_bytes = 0;
  // See Holding.
  bool proves_parts = false;
  GrantTerms grant;
};

// Chooses the sources of a pull, the best first, and counts their shares. Every live node that has
// announced readable tiles of the version is a candidate: complete holders, and pullers that are
// still filling up (a puller becomes a source with its first announcement of verified tiles).
// Flapping, quarantined and drained nodes are a last resort. Where no node has all of a joint
// publication, a pull gets a holder of each part.
class SourceSelection {
 public:
  SourceSelection(const FleetState& fleet, const Replicas& replicas, const Rounds& rounds,
                  PullTable& pulls)
      : fleet_(fleet), replicas_(replicas), rounds_(rounds), pulls_(pulls) {}

  struct Offers {
    std::vector<SourceOffer> sources;
    // Nobody is offered because no candidate has a free share.
    bool all_busy = false;
  };
  // Gives the pull shares of at most `max_new` sources that it does not read from yet. All parts
  // that it needs count as one.
  Offers offer(Pull& pull, std::size_t max_new, TimePoint now);
  // Shares that the candidates for this pull have left, all together. If it needs several parts:
  // how often all of them can be given.
  std::size_t free_shares(const Pull& pull, TimePoint now) const;
  // How many pulls may read this version there at a time.
  std::size_t puller_limit(const Member& source, const ModelVersion& id) const;
  // How many sources a pull without a whole copy may have.
  std::size_t source_limit(const ModelVersion& id) const;

 private:
  struct Candidate;
  struct Candidates;

  std::optional<Candidate> consider(const Pull& pull, const Member& member, TimePoint now) const;
  Candidates candidates(const Pull& pull, TimePoint now) const;
  Candidates ranked(const Pull& pull, TimePoint now) const;
  void gather_parts(const Pull& pull, Candidates& found) const;
  std::vector<const Holding*> layouts_to_offer(const Pull& pull, const Candidate& candidate) const;
  SourceOffer make_offer(const Pull& pull, const Member& member, const Holding& holding,
                         TimePoint now);
  void cap_rates(const Pull& pull, std::vector<SourceOffer>& offers) const;

  const FleetState& fleet_;
  const Replicas& replicas_;
  const Rounds& rounds_;
  PullTable& pulls_;
  std::uint64_t next_serial_ = 1;
  // Candidates of equal standing take turns.
  std::uint64_t rotation_ = 0;
};

}  // namespace rekindle::coordinator
