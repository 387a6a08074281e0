#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "recovery/pull/environment.h"
#include "recovery/pull/placing.h"
#include "recovery/pull/silence.h"
#include "recovery/pull/source_finder.h"
#include "recovery/pull/transfer.h"
#include "recovery/pull/types.h"
#include "recovery/pull/wanted.h"
#include "recovery/pull/watch.h"

namespace rekindle::pull {

inline constexpr int kLossesToBan = 3;                        // of one source, in one pull
inline constexpr std::uint32_t kWrongSlicesToQuarantine = 2;  // likewise

struct PullTimes {
  std::chrono::milliseconds resolve{4500};  // for a coordinator to answer
  std::chrono::milliseconds silence{4000};  // nobody sends a byte: how long to look for sources
  // For holders to verify copies that they have just found: terabytes, from a disk.
  std::chrono::milliseconds verifying{600'000};
};

// One pull, from a model's name to a committed copy in the store: resolve → plan → transfer →
// commit, planning again with fresh sources when the old ones are gone. What has verified is never
// fetched again, also not by a later job for the same thing. Control thread only.
class PullJob {
 public:
  PullJob(const PullEnvironment& environment, PullRequest request, OnProgress progress,
          PullTimes times = {}, PullWatch watch = {});

  struct Outcome {
    TransferSummary summary;
    std::shared_ptr<const store::StoredVersion> stored;
  };
  async::Task<Result<Outcome>> run();
  async::Task<Result<PlanSummary>> plan_only();

 private:
  // pull.cc: the phases
  async::Task<Result<Outcome>> run_phases();
  async::Task<Result<void>> resolve();
  // kCorrupt: the version is not the one that was asked for by its root.
  Result<void> check_root() const;
  async::Task<Result<void>> find_wanted();
  Result<void> take_layout(const store::SetAside& copy);
  async::Task<Result<void>> begin();
  async::Task<Result<void>> begin_copy();
  void leave_pending();
  async::Task<Result<void>> transfer_all();
  async::Task<Result<void>> find_more_sources(const planner::Plan& plan);
  async::Task<void> wait_to_ask_again(std::chrono::milliseconds delay);
  async::Task<Result<std::shared_ptr<const store::StoredVersion>>> commit();
  async::Task<Result<void>> transfer_once(std::shared_ptr<const planner::Plan> plan);
  async::Task<void> unshare();
  async::Task<Result<std::shared_ptr<const store::StoredVersion>>> verified_here();
  std::shared_ptr<const store::StoredVersion> already_here() const;
  bool has_been_asked(const Error& answer) const;  // somebody, who gave this answer
  Result<TransferSummary> summarize(const store::StoredVersion& stored);

  // held.cc
  async::Task<bool> wait_while_held();
  async::Task<void> take_placed(Placing::TileRuns landed);

  // metadata.cc: what the version consists of, from the first source that can say
  async::Task<Result<void>> learn_checkpoint();
  async::Task<Result<void>> learn_from(std::shared_ptr<SourcePeer> peer);
  SourcePeer::Paging paging();
  async::Task<Result<std::string>> read_config();

  // sources.cc: who is asked
  async::Task<void> connect_peers();
  async::Task<void> look_for_sources();
  async::Task<void> ask_then_dial();
  async::Task<void> dial_peers();
  async::Task<void> dial_peer(proto::Source source);
  async::Task<void> learn_layouts();
  async::Task<Result<void>> learn_layout_of(ActiveSource& source);
  void add_local_sources();
  async::Task<Result<void>> add_fallback();
  void lose(ActiveSource& source, const Error& cause);
  void judge_sources();
  void forget_lost_sources();
  Result<std::unique_ptr<planner::Plan>> make_plan();
  Result<std::unique_ptr<planner::Plan>> plan_over(const TileSet* growing_hold) const;
  Error no_source_error(const planner::Plan& plan) const;

  // recruit.cc: sources that are being filled, and sources that come while a transfer runs
  bool any_growing() const;
  std::vector<planner::MissingBox> held_by_nobody(const planner::Plan& plan, bool& all) const;
  void take_news_of_sources(Transfer* transfer = nullptr);
  async::Task<Result<void>> transfer_and_recruit(Transfer& transfer);
  async::Task<void> recruit(Transfer& transfer);
  async::Task<void> recruit_peer(proto::Source record, Transfer& transfer);

  void use_memory(transport::HandshakeConnector& connector);
  async::Task<void> release_memory();
  void enter_phase(std::string name);
  void show(const transport::BatchProgress& batch, std::string note);
  void add_stats(const transport::BatchProgress& batch);
  std::vector<proto::SourceReport> source_reports() const;

  const PullEnvironment& environment_;
  const PullRequest request_;
  const WantedSpec wanted_spec_;
  const OnProgress on_progress_;
  const PullTimes times_;
  const PullWatch watch_;
  SourceFinder finder_;
  Silence silence_;

  Resolved resolved_;
  std::shared_ptr<const Checkpoint> checkpoint_;
  std::vector<TensorBox> wanted_;
  std::optional<PackedLayout> packed_;
  std::shared_ptr<std::unique_ptr<store::PendingVersion>> pending_;  // shared with verifications
  using Landing = std::vector<std::shared_ptr<const void>>;          // the destination, registered
  std::shared_ptr<Landing> landing_ = std::make_shared<Landing>();
  std::set<const transport::HandshakeConnector*> landing_used_by_;
  std::shared_ptr<VerifiedTiles> verified_;
  const std::shared_ptr<Placing> placing_ = std::make_shared<Placing>();
  std::shared_ptr<SourceTable> sources_;
  std::map<Digest, std::shared_ptr<const Layout>> layouts_;
  std::map<Incarnation, int> losses_;                  // of sources of this pull
  std::set<Incarnation> banned_;                       // served wrong bytes, or failed too often
  std::set<std::string> failed_transports_;            // shown to the user once
  std::map<std::string, std::uint32_t> wrong_slices_;  // by source
  std::map<std::string, std::string> quarantined_;     // by source: why
  std::string wrong_together_;                         // what several sources brought, last time
  using PeerKey = std::pair<Incarnation, Digest>;      // and its layout
  std::set<PeerKey> dialled_;                          // since it was begun to look for sources
  std::map<PeerKey, TimePoint> recruited_;             // when last, while a transfer runs
  bool fallback_used_ = false;
  bool grants_denied_ = false;  // in the last transfer
  bool queue_shown_ = false;
  std::uint32_t suspicion_ = 0;  // see PlanSliceSource
  std::shared_ptr<PullCounters> counters_ = std::make_shared<PullCounters>();

  TransferSummary summary_;
  std::string phase_ = "resolve";
  std::map<std::string, SourceLine> lines_;         // by source and transport, over all transfers
  std::map<std::string, SourceLine> lines_before_;  // when the current transfer began
  TimePoint started_{};
  TimePoint phase_started_{};
  std::uint64_t bytes_total_ = 0;
  std::uint64_t bytes_done_ = 0;   // of bytes_total_, verified before the current transfer
  std::uint64_t batch_bytes_ = 0;  // and in it
};

}  // namespace rekindle::pull
