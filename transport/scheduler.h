#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "transport/engine.h"
#include "transport/types.h"

// The engine's policy, without threads, sockets or a clock: events in, actions out. One per batch.
//
// Open slices are not assigned in advance. A source with room in its window takes the next open
// slice that it holds, so that a fast source takes work from a slow one by itself. Windows follow
// the measured goodput: a source at 1 % of the others' speed has one slice outstanding. Near the
// end a source is given no slice that the others would finish sooner, and a slice that is stuck at
// a slow source while a fast one idles is stolen: its path is aborted, and it is open again when
// that path has drained. So a slice never has two writers.
namespace rekindle::transport {

using PathId = std::uint32_t;  // of one batch, never reused

class Scheduler {
 public:
  using InfoOf = std::function<SliceInfo(SliceIndex)>;

  Scheduler(SliceIndex slice_count, InfoOf info_of, const BatchOptions& options, TimePoint now);

  // --- events
  PathId add_path(SourceIndex source, std::string description, TimePoint now,
                  std::string home = {});
  void remove_source(SourceIndex source, const Error& cause, TimePoint now);
  // All ops of a slice on this path have been reported: kOk, or the worst status. A local fault,
  // here or as a verdict, comes after fail_batch().
  // `why`: of a path that broke, when it said so.
  void slice_done(PathId path, SliceIndex slice, OpStatus status, TimePoint now,
                  const std::string& why = {});
  // No op of this path is in flight and none will be: after an abort, or because it broke.
  void path_closed(PathId path, const std::string& why, TimePoint now);
  void path_progress(PathId path, std::uint64_t bytes_landed, TimePoint now);
  // A posted slice could not be expanded for want of staging memory: it is open again. Until a
  // slice is resolved or dropped, or the next tick when none is under way, only those are posted
  // whose group has its memory already: they free it.
  void unpost(PathId path, SliceIndex slice, TimePoint now);
  void resolve(SliceIndex slice, Verdict verdict, TimePoint now);
  // A source that is being filled, and the slices that have it as a new candidate (see Batch).
  void add_neighbour(SourceIndex source, std::uint64_t salt);
  void candidates_added(SourceIndex source, std::span<const SliceIndex> slices, TimePoint now);
  void cancel();
  void fail_batch(Error error);
  void tick(TimePoint now);

  // --- actions; ask until there are none
  struct Post {
    SliceIndex slice = 0;
    SourceIndex source = 0;
    PathId path = 0;
  };
  std::optional<Post> next_post(TimePoint now);
  std::vector<PathId> take_aborts();
  struct Lost {
    SourceIndex source = 0;
    Error cause;
  };
  std::vector<Lost> take_lost();
  // How many open slices nobody holds: when it begins, and after each path that did not change it.
  std::optional<std::uint64_t> take_starved();
  // Set once everything has drained.
  std::optional<Result<void>> outcome() const;

  BatchProgress progress() const;
  SourceIndex source_of(PathId path) const { return paths_[path].source; }
  bool idle() const { return in_flight_slices_ == 0; }

 private:
  enum class State : std::uint8_t { kOpen, kPosted, kLanded, kDone };
  struct Slice {
    State state = State::kOpen;
    std::uint8_t attempts = 0;
    std::uint8_t source = 0;  // where it is posted, or landed from
  };
  struct PathState {
    SourceIndex source = 0;
    std::string description;
    bool alive = true;    // takes slices
    bool closed = false;  // drained
    bool slow = false;    // aborted for want of speed: its slices go to other sources first
    std::string why;      // it is being aborted
    ErrorCode why_code = ErrorCode::kPeerLost;
    std::vector<SliceIndex> slices;  // in flight here
    std::uint64_t bytes_in_flight = 0;
    std::uint64_t bytes_landed = 0;
    std::uint64_t last_posted = 0;  // when: counted in posts of the batch
    TimePoint last_progress{};
    PathStats stats;
  };
  struct SourceState {
    bool known = false;
    bool lost = false;
    std::vector<PathId> paths;   // alive
    std::size_t draining = 0;    // aborted, not closed yet
    SliceIndex cursor = 0;       // position in the batch's order up to which nothing is open for it
    SliceIndex rare_cursor = 0;  // and up to which neighbours hold what is open
    SliceIndex mine_cursor = 0;  // and up to which what they do not hold is theirs to fetch
    std::uint64_t salt = 0;      // of a neighbour, as is the next:
    std::vector<SliceIndex> offered;  // gained, perhaps taken meanwhile
    std::uint64_t bytes_in_flight = 0;
    TimePoint last_progress{};  // a byte from it, or its first slice in flight
    bool suspect = false;       // a path was cut for its silence, and nothing has come since
    std::uint64_t landed_since_sample = 0;
    Duration busy_since_sample{0};
    double goodput = 0;  // bytes per second, 0 = not measured yet
    int strikes = 0;
    std::optional<Error> cause;
    bool condemned = false;  // the cause is a verdict on the source, not the end of one path
    SourceStats stats;
  };

  SliceIndex slice_at(SliceIndex position) const;
  SliceInfo info(SliceIndex slice) const;
  SourceMask living() const;
  std::optional<SliceIndex> pick(SourceIndex source);
  std::optional<SliceIndex> pick_of_begun_group(SourceIndex source);
  std::optional<SliceIndex> pick_retry(SourceIndex source);
  std::optional<SliceIndex> pick_offered(SourceIndex source);
  std::optional<SliceIndex> pick_rare(SourceIndex source);
  std::optional<SliceIndex> pick_unheld(SourceIndex source, bool only_mine);
  std::optional<SliceIndex> pick_in_order(SourceIndex source);
  std::optional<Post> post_from(SourceIndex source, TimePoint now);
  int holders_of(const SliceInfo& slice_info) const {
    return (slice_info.candidates & neighbours_).count();
  }
  bool is_mine(const SliceInfo& slice_info) const;
  void neighbour_gone(SourceIndex source);
  bool may_serve(SourceIndex source, SliceIndex slice, const SliceInfo& slice_info) const;
  bool worth_waiting_for_others(SourceIndex source, SliceIndex slice,
                                const SliceInfo& slice_info) const;
  std::uint64_t window_of(const SourceState& source) const;
  std::optional<PathId> path_for(const SourceState& source, std::uint64_t bytes) const;
  void reopen(SliceIndex slice, SourceIndex source, bool exclude, bool count_attempt,
              const std::string& cause);
  void strike(SourceIndex source, const std::string& cause);
  void abort_path(PathId path, ErrorCode code, const std::string& why);
  void lose_source(SourceIndex source, const Error& cause);
  void maybe_report_lost(SourceIndex source);
  void detach(PathState& path, SliceIndex slice);
  void sample_goodput(Duration elapsed);
  double rate_now(const SourceState& source) const;
  void check_staging(TimePoint now);
  void count_starving(TimePoint now);
  bool may_steal(PathId victim, SourceIndex thief) const;
  void forgive_pause(Duration pause);
  void set_open(SliceIndex slice);
  void note_group(const SliceInfo& slice_info);
  void staging_freed();
  void check_deadlines(TimePoint now);
  bool is_silent(const SourceState& source, TimePoint now) const;
  void begin_waiting(SourceState& source, TimePoint now) const;
  void check_starvation(TimePoint now);
  void check_prospects(TimePoint now);
  void steal();
  void finish(Result<void> outcome);

  const SliceIndex slice_count_;
  const InfoOf info_of_;
  const BatchOptions options_;
  std::vector<Slice> slices_;
  std::deque<SliceIndex> retry_;                         // open again, first to be taken
  std::unordered_map<SliceIndex, SourceMask> excluded_;  // of the few slices that failed somewhere
  std::vector<SourceState> sources_;
  std::vector<PathState> paths_;
  SliceIndex done_ = 0;
  std::uint64_t open_bytes_ = 0;
  std::uint64_t open_slices_ = 0;
  std::uint64_t done_bytes_ = 0;
  std::uint64_t landed_bytes_ = 0;  // not resolved yet
  std::uint64_t in_flight_slices_ = 0;
  std::uint64_t landed_slices_ = 0;
  TimePoint last_byte_{};
  std::uint64_t posts_ = 0;
  std::uint64_t retried_ = 0;
  std::uint64_t stolen_ = 0;
  bool no_staging_ = false;
  std::set<SliceIndex> no_staging_for_;           // since then
  std::set<SliceIndex> begun_groups_;             // by first slice: some of it is open, some is not
  std::optional<TimePoint> staging_stuck_since_;  // no staging, and nothing of ours that holds any
  SourceIndex next_source_ = 0;
  SourceMask filling_;                      // sources that are being filled
  SourceMask neighbours_;                   // those of them that have paths
  std::optional<TimePoint> waiting_since_;  // for prospects, with nothing under way
  TimePoint last_tick_;
  bool look_for_starving_ = true;
  SourceMask starving_looked_at_;  // the living when it was looked for
  std::optional<TimePoint> starving_since_;
  std::uint64_t starving_slices_ = 0;
  bool starved_pending_ = false;
  std::string last_cause_ = "no source was connected";
  std::vector<PathId> aborts_;
  std::vector<Lost> lost_;
  std::optional<Result<void>> verdict_;  // decided; outcome() once drained
};

}  // namespace rekindle::transport
