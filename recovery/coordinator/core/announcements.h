#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "recovery/coordinator/core/fleet_state.h"
#include "recovery/coordinator/core/version_readiness.h"

namespace rekindle::coordinator {

struct AnnounceConflict {
  ModelVersion id;
  std::string why;
  // The root is no problem: the claim could not be made durable now, or no trusted publisher has
  // signed it yet. Announce it again later.
  bool again = false;
};
struct Announced {
  Result<std::vector<AnnounceConflict>> answer;
  // 0: the answer holds now.
  CommitNumber commit = 0;
  // The versions that wait for the commit, with their roots.
  std::map<ModelVersion, Digest> waiting;
};

// Takes the announced copies of a node into its holdings. A verified copy makes its version known
// where the table does not have it, if the member may do so, and counts once that is durable. Such
// a version is not `latest` where a publisher has claimed one, and a party can have
// Limits::max_announced_versions of them. A copy whose root contradicts the table is left out and
// named in the answer. An announcement may make a version READY.
class Announcements {
 public:
  Announcements(FleetState& fleet, VersionReadiness& readiness)
      : fleet_(fleet), readiness_(readiness) {}

  // May this member make the version known? Without a check, any member may.
  using MayClaim = std::function<Result<void>(const Member& member, const ModelVersion& id)>;
  void set_may_claim(MayClaim may_claim) { may_claim_ = std::move(may_claim); }
  // May this member have copies of known versions of the model? Without a check, any member may.
  using MayHold = std::function<Result<void>(const Member& member, const std::string& model)>;
  void set_may_hold(MayHold may_hold) { may_hold_ = std::move(may_hold); }
  // The rights have changed: copies of members that may no longer have them are gone. Such a member
  // must register again, and so announces all of its copies anew.
  void check_holders();
  // Whether the member may make versions of the model known.
  Result<void> may_claim(const Member& member, const ModelVersion& id) const;
  // `full`: `add` is everything that the node holds.
  Announced take(Member& member, bool full, std::vector<Holding> add,
                 const std::vector<HoldingKey>& remove);
  // The conflicts of an announcement once its commit has ended.
  std::vector<AnnounceConflict> finish(Announced announced, const Result<void>& commit) const;
  // A batch has ended; it may have held claims.
  void batch_ended(bool durable);

 private:
  // kExhausted: the party of the member has announced too many versions that nobody has claimed.
  Result<void> make_room(const std::string& party, const ModelVersion& id);

  // `before`: the holdings that a full announcement replaces.
  void accept(Member& member, Holding holding, const Holdings::Map& before, Announced& announced);

  FleetState& fleet_;
  VersionReadiness& readiness_;
  MayClaim may_claim_;
  MayHold may_hold_;
  // By the party that announced them first, as far as this coordinator has heard it.
  std::map<std::string, std::set<ModelVersion>> announced_;
};

}  // namespace rekindle::coordinator
