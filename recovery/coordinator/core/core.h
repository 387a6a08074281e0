#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "recovery/coordinator/core/catalog.h"
#include "recovery/coordinator/core/membership.h"
#include "recovery/coordinator/core/types.h"

// The coordinator as a deterministic state machine: every call takes the time and returns its
// answer; the only effect is `persist`, called before an answer relies on it. One thread.
namespace rekindle::coordinator {

struct Registered {
  std::uint64_t epoch = 0;
};
struct HeartbeatAnswer {
  std::uint64_t epoch = 0;
  std::uint64_t coordinator_time_ms = 0;
  std::vector<ModelVersion> retire;
};
struct OpenPullRequest {
  NodeInfo puller;
  std::string model;
  std::optional<std::uint64_t> version;  // nullopt: the newest READY one
  std::string shard;
};
struct OpenedPull {
  PullId pull_id;  // nil when queued
  ModelVersion id;
  DurableVersion version;
  std::uint64_t epoch = 0;
  Duration lease{};
  std::vector<SourceOffer> sources;
  Duration retry_after{};  // > 0: no source has a free share now
};
struct PullProgress {
  PullId pull_id;
  NodeInfo puller;
  ModelVersion id;
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_total = 0;
  std::vector<SourceReport> sources;
};
struct PullProgressAnswer {
  std::vector<SourceOffer> sources;
  bool grace = false;
};
struct Pull {
  NodeInfo puller;
  ModelVersion id;
  Digest128 root;
  std::string shard;
  TimePoint opened;
  TimePoint last_progress;
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_total = 0;
  double bytes_per_second = 0;
  std::vector<SourceReport> reports;
  std::vector<Incarnation> sources;  // sorted; each has a share of its source
};
struct AnnounceConflict {
  ModelVersion id;
  std::string why;
};

class Core {
 public:
  // `durable` as read from disk; start() must succeed before anything else.
  Core(const Timing& timing, const Limits& limits, DurableState durable, Persist persist,
       std::function<PullId()> new_pull_id);

  // Begins a reign: an epoch above the durable one, and one TTL of grace.
  Result<void> start(TimePoint now);
  // Time passes: suspicion, death, leases. Call it at least every half second; a longer gap is
  // taken for a pause of this process.
  void tick(TimePoint now);

  Result<Registered> enroll(const NodeInfo& info, const std::string& failure_domain,
                            std::uint64_t highest_epoch, const std::string& connection,
                            TimePoint now);
  void disconnected(const std::string& node_id, const Incarnation& incarnation,
                    const std::string& connection, TimePoint now);
  Result<HeartbeatAnswer> heartbeat(const std::string& node_id, const Incarnation& incarnation,
                                    std::uint64_t epoch, std::uint64_t progress, TimePoint now);
  // Holdings whose version has another root are left out and returned.
  Result<std::vector<AnnounceConflict>> announce(
      const std::string& node_id, const Incarnation& incarnation, std::uint64_t epoch, bool full,
      std::vector<Holding> add, const std::vector<HoldingKey>& remove, TimePoint now);
  // node_id "": not a member.
  Result<std::uint64_t> publish(const std::string& node_id, const Incarnation& incarnation,
                                const ModelVersion& id, const Digest128& root,
                                const Digest128& tensor_set, std::uint64_t checkpoint_bytes,
                                TimePoint now);
  Result<OpenedPull> open_pull(const OpenPullRequest& request, TimePoint now);
  Result<PullProgressAnswer> pull_progress(const PullProgress& progress, TimePoint now);
  void close_pull(const PullId& pull_id, TimePoint now);
  // How many live nodes will be told.
  Result<std::uint32_t> retire(const ModelVersion& id, TimePoint now);

  std::uint64_t epoch() const { return catalog_.epoch(); }
  bool in_grace(TimePoint now) const { return now < grace_until_; }
  TimePoint started() const { return started_; }
  const Membership& members() const { return members_; }
  const Catalog& catalog() const { return catalog_; }
  const std::map<PullId, Pull>& pulls() const { return pulls_; }
  static std::uint64_t clock_ms(TimePoint now);

 private:
  struct Candidate;

  Result<Member*> hear(const std::string& node_id, const Incarnation& incarnation,
                       std::uint64_t epoch, TimePoint now);
  Result<ModelVersion> resolve(const OpenPullRequest& request, TimePoint now) const;
  Failure no_source(const std::string& what, const std::string& model, TimePoint now) const;
  Failure nobody_usable(const ModelVersion& id, TimePoint now) const;
  Result<void> accept_holding(Member& member, Holding holding,
                              std::vector<AnnounceConflict>& conflicts);

  // Sources for `pull`, those it has first; gives it shares of the new ones.
  std::vector<SourceOffer> offer_sources(Pull& pull, TimePoint now, bool& all_busy);
  std::vector<Candidate> candidates(const Pull& pull, TimePoint now, bool& all_busy) const;
  SourceOffer make_offer(const Pull& pull, const Member& member, const Holding& holding,
                         TimePoint now);
  Duration queue_hint(TimePoint now) const;
  void take_reports(Pull& pull, const std::vector<SourceReport>& reports, TimePoint now);
  void expire_pulls(TimePoint now);
  void drop_pulls_like(const OpenPullRequest& request, const ModelVersion& id);
  Result<Pull*> find_or_adopt(const PullProgress& progress, TimePoint now);

  const Timing timing_;
  const Limits limits_;
  std::function<PullId()> new_pull_id_;
  Catalog catalog_;
  Membership members_;
  std::map<PullId, Pull> pulls_;
  // How many open pulls have a share of each source; kept with `Pull::sources`.
  std::map<Incarnation, std::size_t> shares_;
  void take_share(Pull& pull, const Incarnation& source);
  void drop_shares(Pull& pull);

  TimePoint started_{};
  TimePoint last_tick_{};
  TimePoint grace_until_{};
  std::uint64_t next_serial_ = 1;
  std::uint64_t rotation_ = 0;
};

}  // namespace rekindle::coordinator
