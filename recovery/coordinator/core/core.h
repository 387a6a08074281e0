#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "recovery/coordinator/core/announcements.h"
#include "recovery/coordinator/core/fleet_state.h"
#include "recovery/coordinator/core/instances.h"
#include "recovery/coordinator/core/joint_rosters.h"
#include "recovery/coordinator/core/open_claims.h"
#include "recovery/coordinator/core/pull_leases.h"
#include "recovery/coordinator/core/replicas.h"
#include "recovery/coordinator/core/retirement.h"
#include "recovery/coordinator/core/rounds.h"
#include "recovery/coordinator/core/version_readiness.h"

namespace rekindle::coordinator {

struct Registered {
  std::uint64_t epoch = 0;
  // The process was no member before.
  bool is_new = true;
};
// The contents of an agent's heartbeat.
struct Heartbeat {
  std::uint64_t epoch = 0;
  // Of the working threads.
  std::uint64_t progress = 0;
  std::uint64_t store_free_bytes = 0;
  // Readers that are left of each retiring version that admits no new ones.
  std::map<ModelVersion, std::uint32_t> readers = {};
  std::vector<ModelVersion> failed_fetches = {};
  std::vector<ModelVersion> fetching = {};
};
struct HeartbeatAnswer {
  struct Fetch {
    ModelVersion id;
    Digest root;
    // 0: no cap.
    std::uint64_t max_bytes_per_second = 0;
  };
  std::uint64_t epoch = 0;
  std::uint64_t coordinator_time_ms = 0;
  // Admit no new reader of these versions, and report the readers that are left.
  std::vector<ModelVersion> retiring;
  // Let go of these copies.
  std::vector<ModelVersion> retire;
  // Pull all of it and keep it.
  std::vector<Fetch> fetch;
  bool drained = false;
};
struct Draining {
  // Pulls that still read there.
  std::size_t readers = 0;
  // READY versions that only drained nodes hold.
  std::vector<ModelVersion> sole_copies;
};
struct Publication {
  ModelVersion id;
  Digest root;
  Digest tensor_set;
  std::uint64_t checkpoint_bytes = 0;
  std::optional<std::uint32_t> replicas = {};
  // The layouts of a joint publication, in any order.
  std::vector<Digest> parts = {};
  // See OpenClaims.
  std::string claimant = {};
  std::vector<VersionSignature> signatures = {};
};

// The coordinator as a deterministic state machine: every call takes the time and returns its
// answer. Core routes calls and time to the units that own the state. Its only effects are batches
// of durable changes: the driver takes one with take_batch(), writes it, and reports the outcome
// with committed(). Calls that change durable state return the commit that their answer waits for.
// One thread.
class Core {
 public:
  // `durable` as read from disk; start() must succeed before anything else.
  Core(const Timing& timing, const Limits& limits, DurableState durable,
       std::function<PullId()> new_pull_id);

  // Begins a term: an epoch above the durable one, and one TTL of grace. Nothing else is called
  // before this commit is durable.
  CommitNumber start(TimePoint now);
  // The next batch to write, in the order of their numbers; nothing while one is being written.
  std::optional<CommitBatch> take_batch() { return fleet_.table.take_batch(); }
  // The batch has ended. Returns the last commit that ended with it: when a batch fails, the
  // changes gathered behind it fail, too.
  CommitNumber committed(CommitNumber number, bool durable, TimePoint now);
  // Time passes: suspicion, death, leases. Call it at least every half second; a longer gap is
  // taken for a pause of this process. It may stage a batch.
  void tick(TimePoint now);
  // Other limits of pulls and copies, from here on. The sizes of tables stay.
  void set_limits(const Limits& limits) { fleet_.limits = limits; }
  void trust(PublisherTrust trust) { fleet_.signers.trust(std::move(trust)); }

  // With a commit the epoch is being raised first: when that is durable, call again.
  Durably<Registered> enroll(const NodeInfo& info, const std::string& failure_domain,
                             std::uint64_t highest_epoch, const std::string& connection,
                             TimePoint now);
  void disconnected(const std::string& node_id, const Incarnation& incarnation,
                    const std::string& connection, TimePoint now);
  Result<HeartbeatAnswer> heartbeat(const std::string& node_id, const Incarnation& incarnation,
                                    const Heartbeat& heartbeat, TimePoint now);
  // See Announcements. Pass the answer through finish() once its commit has ended.
  Announced announce(const std::string& node_id, const Incarnation& incarnation,
                     std::uint64_t epoch, bool full, std::vector<Holding> add,
                     const std::vector<HoldingKey>& remove, TimePoint now);
  std::vector<AnnounceConflict> finish(Announced announced, const Result<void>& commit) const {
    return announcements_.finish(std::move(announced), commit);
  }
  // Returns the epoch. node_id "": the publisher is not a member.
  Durably<std::uint64_t> publish(const std::string& node_id, const Incarnation& incarnation,
                                 const Publication& publication, TimePoint now);
  // See Announcements.
  void set_may_hold(Announcements::MayHold may_hold) {
    announcements_.set_may_hold(std::move(may_hold));
  }
  void set_may_claim(Announcements::MayClaim may_claim) {
    announcements_.set_may_claim(std::move(may_claim));
  }
  // What set_may_hold() and set_may_claim() answer has changed. Copies, and parts in joint
  // publications, of members that may no longer have them do not count from here on.
  void rights_changed();
  // The newest version that has been READY and is not retired. kUnavailable: no live node holds all
  // of it now.
  Result<ModelVersion> latest(const std::string& model, TimePoint now);
  Result<OpenedPull> open_pull(const OpenPullRequest& request, TimePoint now);
  Result<PullProgressAnswer> pull_progress(const PullProgress& progress, TimePoint now);
  // kDenied: another process opened it.
  Result<void> close_pull(const PullId& pull_id, const Incarnation& puller, TimePoint now);
  // See Retirement.
  Durably<std::uint32_t> retire(const ModelVersion& id, TimePoint now,
                                std::optional<Duration> deadline = {});
  // May this node drop its copies to make room? See EvictionPermits.
  Result<void> let_go(const std::string& node_id, const Incarnation& incarnation,
                      const ModelVersion& id, TimePoint now);
  // A drained node gets no new plans and no copies; pulls that read there finish. Durable.
  Durably<Draining> drain(const std::string& node_id, bool drained, TimePoint now);
  Result<InstanceAnswer> report_rank(const RankReport& report, TimePoint now);
  // Brings a READY version to the workers of a group ("" = of every group). kNotFound: no such
  // version, or no such worker. kUnavailable: no live node holds all of it, it is being retired, a
  // round of the group runs, or agents have yet to report their workers.
  // Begins nothing. Errors as begin_update().
  Result<UpdatePlan> plan_update(const ModelVersion& id, const std::string& group, TimePoint now);
  Result<RoundId> begin_update(const ModelVersion& id, const std::string& group,
                               const Gathering& gathering, TimePoint now);
  // kUnavailable: the node is not registered (again) yet.
  Result<void> report_round(const RoundReport& report, TimePoint now);
  // See JointRosters. kUnavailable: the node is not registered (again) yet.
  Result<void> report_joint(const JointReport& report, TimePoint now);

  const FleetState& fleet() const { return fleet_; }
  const VersionReadiness& readiness() const { return readiness_; }
  const VersionResolver& resolver() const { return resolver_; }
  const PullLeases& pulls() const { return pulls_; }
  const Retirement& retirement() const { return retirement_; }
  const Replicas& replicas() const { return replicas_; }
  const Instances& instances() const { return instances_; }
  const Rounds& rounds() const { return rounds_; }
  const JointRosters& joint_rosters() const { return joint_rosters_; }

 private:
  Result<Member*> hear(const std::string& node_id, const Incarnation& incarnation,
                       std::uint64_t epoch, TimePoint now);

  FleetState fleet_;
  VersionReadiness readiness_{fleet_};
  VersionResolver resolver_{fleet_, readiness_};
  Announcements announcements_{fleet_, readiness_};
  OpenClaims open_claims_{fleet_};
  Replicas replicas_{fleet_};
  PullLeases pulls_;
  Retirement retirement_{fleet_, pulls_.table()};
  EvictionPermits permits_{fleet_};
  Instances instances_;
  Rounds rounds_;
  JointRosters joint_rosters_;
};

}  // namespace rekindle::coordinator
