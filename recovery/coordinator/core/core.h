#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "recovery/coordinator/core/catalog.h"
#include "recovery/coordinator/core/instances.h"
#include "recovery/coordinator/core/membership.h"
#include "recovery/coordinator/core/messages.h"
#include "recovery/coordinator/core/replicas.h"
#include "recovery/coordinator/core/rounds.h"
#include "recovery/coordinator/core/types.h"

// The coordinator as a deterministic state machine: every call takes the time and returns its
// answer. Its only effects are batches of durable changes: the driver takes one with take_batch(),
// writes it, and says with committed() what became of it. Calls that change what is durable return
// the commit that their answer waits for. One thread.
namespace rekindle::coordinator {

class Core {
 public:
  // `durable` as read from disk; start() must succeed before anything else.
  Core(const Timing& timing, const Limits& limits, DurableState durable,
       std::function<PullId()> new_pull_id);

  // Begins a term: an epoch above the durable one, and one TTL of grace. Nothing else is called
  // before this commit is durable.
  CommitNumber start(TimePoint now);
  // The next batch to write, in the order of their numbers; nothing while one is being written.
  std::optional<CommitBatch> take_batch() { return catalog_.take_batch(); }
  // What became of it. Returns the last commit that has ended so: when a batch fails, what was
  // gathered behind it fails with it.
  CommitNumber committed(CommitNumber number, bool durable, TimePoint now);
  // Time passes: suspicion, death, leases. Call it at least every half second; a longer gap is
  // taken for a pause of this process. It may stage a batch.
  void tick(TimePoint now);

  // With a commit the epoch is being raised first: when that is durable, call again.
  Durably<Registered> enroll(const NodeInfo& info, const std::string& failure_domain,
                             std::uint64_t highest_epoch, const std::string& connection,
                             TimePoint now);
  void disconnected(const std::string& node_id, const Incarnation& incarnation,
                    const std::string& connection, TimePoint now);
  Result<HeartbeatAnswer> heartbeat(const std::string& node_id, const Incarnation& incarnation,
                                    const Heartbeat& heartbeat, TimePoint now);
  // Holdings whose version has another root are left out and returned. One whose version the table
  // does not know counts when its claim is durable; see finish().
  Announced announce(const std::string& node_id, const Incarnation& incarnation,
                     std::uint64_t epoch, bool full, std::vector<Holding> add,
                     const std::vector<HoldingKey>& remove, TimePoint now);
  // The conflicts of an announcement once its commit has ended: what could not be made durable is
  // to be announced again.
  std::vector<AnnounceConflict> finish(Announced announced, const Result<void>& commit) const;
  // node_id "": not a member.
  Durably<std::uint64_t> publish(const std::string& node_id, const Incarnation& incarnation,
                                 const ModelVersion& id, const Digest& root,
                                 const Digest& tensor_set, std::uint64_t checkpoint_bytes,
                                 TimePoint now, std::optional<std::uint32_t> replicas = {});
  // The newest version that has been READY and is not retired. kUnavailable: nobody alive holds all
  // of it now.
  Result<ModelVersion> latest(const std::string& model, TimePoint now);
  Result<OpenedPull> open_pull(const OpenPullRequest& request, TimePoint now);
  // Live nodes, without the puller, that have a whole copy of what is asked for and have yet to
  // verify it: a pull that finds no source waits for them.
  std::vector<std::string> yet_to_verify(const OpenPullRequest& request) const;
  Result<PullProgressAnswer> pull_progress(const PullProgress& progress, TimePoint now);
  // kDenied: another process opened it.
  Result<void> close_pull(const PullId& pull_id, const Incarnation& puller, TimePoint now);
  // How many live nodes will be told. Readers have until `deadline` (nullopt: as before, at first
  // Timing::retire_deadline) to end; then the holders end them.
  Durably<std::uint32_t> retire(const ModelVersion& id, TimePoint now,
                                std::optional<Duration> deadline = {});
  // May this node let go of its copies to make room? Only while another node that is alive, neither
  // drained nor quarantined and without such leave itself has a whole copy, or when the version is
  // retired. The leave lasts a minute, and ends when the node announces without it or registers.
  // kDenied: who else holds it, and why that does not count.
  Result<void> let_go(const std::string& node_id, const Incarnation& incarnation,
                      const ModelVersion& id, TimePoint now);
  // A drained node gets no new plans and no copies; pulls that read there finish. Durable.
  Durably<Draining> drain(const std::string& node_id, bool drained, TimePoint now);
  Draining draining(const std::string& node_id) const;
  Result<InstanceAnswer> report_rank(const RankReport& report, TimePoint now);
  // Brings a READY version to the workers of a group ("" = of every group). kNotFound: no such
  // version, or no such worker. kUnavailable: nobody alive holds all of it, it is being retired, a
  // round of the group runs, or it is the grace: not every member is known.
  Result<RoundId> begin_update(const ModelVersion& id, const std::string& group,
                               std::optional<Duration> gather, TimePoint now);
  // kUnavailable: not registered (again) yet.
  Result<void> report_round(const RoundReport& report, TimePoint now);

  std::uint64_t epoch() const { return catalog_.epoch(); }
  bool in_grace(TimePoint now) const { return now < grace_until_; }
  TimePoint grace_until() const { return grace_until_; }
  TimePoint started() const { return started_; }
  const Membership& members() const { return members_; }
  const Catalog& catalog() const { return catalog_; }
  const std::map<PullId, Pull>& pulls() const { return pulls_; }
  const Replicas& replicas() const { return replicas_; }
  const Instances& instances() const { return instances_; }
  const Rounds& rounds() const { return rounds_; }
  const std::vector<Waiting>& waiting() const { return waiting_; }
  // Pulls that have a share of this source.
  std::size_t pullers_of(const Incarnation& source) const;
  // Pulls of this version that read there.
  std::size_t readers_of(const Incarnation& source, const ModelVersion& id) const;
  static std::uint64_t clock_ms(TimePoint now);

 private:
  struct Candidate;

  Result<Member*> hear(const std::string& node_id, const Incarnation& incarnation,
                       std::uint64_t epoch, TimePoint now);
  Result<ModelVersion> resolve(const OpenPullRequest& request, TimePoint now) const;
  Failure no_source(const std::string& what, const std::string& model, TimePoint now) const;
  Failure nobody_usable(const ModelVersion& id, const Incarnation& puller, TimePoint now) const;
  // The puller needs no source but itself.
  bool holds_all_itself(const ModelVersion& id, const Digest& root,
                        const Incarnation& puller) const;
  // Nobody's copy can be read, and these have yet to verify theirs. Nothing: nobody has to.
  std::optional<Error> yet_to_verify(const ModelVersion& id, const Incarnation& puller) const;
  std::string why_not_kept_by(const Member& holder, const ModelVersion& id, TimePoint now) const;
  void accept_holding(Member& member, Holding holding, const std::map<HoldingKey, Holding>& before,
                      Announced& announced);
  void mark_ready(const ModelVersion& id, Announced* announced);
  // The marks that failed with their batch, and those that nobody's word has brought.
  void mark_all_ready(TimePoint now);
  void settle_unclaimed(Member& member);
  bool is_overdue(const ModelVersion& id, TimePoint now) const;

  // Sources for `pull`, those it has first; gives it shares of the new ones.
  std::vector<SourceOffer> offer_sources(Pull& pull, TimePoint now, std::size_t max_new,
                                         bool& all_busy);
  std::vector<Candidate> candidates(const Pull& pull, TimePoint now, bool& all_busy) const;
  std::vector<Candidate> ranked(const Pull& pull, TimePoint now, bool& all_busy) const;
  std::optional<Candidate> consider(const Pull& pull, const Member& member, TimePoint now) const;
  // New shares that the pull may take now, those that wait longer considered.
  std::size_t fair_count(const Pull& pull, bool runs, TimePoint now) const;
  void wait(const Pull& pull, Duration retry_after, TimePoint now);
  void stop_waiting(const Incarnation& puller, const ModelVersion& id, const std::string& shard);
  SourceOffer make_offer(const Pull& pull, const Member& member, const Holding& holding,
                         TimePoint now);
  std::size_t puller_limit(const Member& source, const ModelVersion& id) const;
  Duration queue_hint(const ModelVersion& id, TimePoint now) const;
  void take_reports(Pull& pull, const std::vector<SourceReport>& reports, TimePoint now);
  // Compares the sources of one puller with each other, before the reports are taken.
  void judge_sources(const Pull& pull, const std::vector<SourceReport>& reports, TimePoint now);
  void expire_pulls(TimePoint now);
  void keep_shares(Pull& pull, const std::vector<SourceReport>& reports);
  void drop_pulls_like(const OpenPullRequest& request, const ModelVersion& id);
  Result<Pull*> find_or_adopt(const PullProgress& progress, TimePoint now);

  const Timing timing_;
  const Limits limits_;
  std::function<PullId()> new_pull_id_;
  Catalog catalog_;
  Membership members_;
  Replicas replicas_;
  Instances instances_;
  Rounds rounds_;
  std::map<PullId, Pull> pulls_;
  struct Closed {
    TimePoint at;
    Incarnation by;
  };
  std::map<PullId, Closed> closed_;  // a late word of theirs brings them not back
  std::vector<Waiting> waiting_;     // the longest first
  // How many open pulls have a share of each source; kept with `Pull::sources`.
  std::map<Incarnation, std::size_t> shares_;
  void take_share(Pull& pull, const Incarnation& source);
  void drop_share(Pull& pull, const Incarnation& source);
  void drop_shares(Pull& pull);

  // Until when readers of a retired version may go on. Soft: what was retired before this start has
  // no entry, and `retired_before_` holds.
  std::map<ModelVersion, TimePoint> retire_deadlines_;
  TimePoint retired_before_{};

  TimePoint started_{};
  TimePoint last_tick_{};
  TimePoint grace_until_{};
  TimePoint next_expiry_{};
  TimePoint next_marks_{};
  std::uint64_t next_serial_ = 1;
  std::uint64_t rotation_ = 0;
};

}  // namespace rekindle::coordinator
