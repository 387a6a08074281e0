#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "recovery/worker/core/phases.h"
#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/tensor/tile.h"

namespace rekindle::worker {

using SessionId = std::uint64_t;
using TileRuns = std::vector<std::pair<TileIndex, TileIndex>>;

enum class Rung { kLocal, kAdopted, kPeers, kFallback };
std::string_view to_string(Rung rung);

enum class SessionState { kResolving, kServing, kLoaded, kCommitted, kEnded };
std::string_view to_string(SessionState state);

struct SessionTimes {
  // From the last byte's arrival: a worker that has not taken everything in by then fails its rank.
  std::chrono::milliseconds load{600'000};
};

// What one rank of a worker is given: from its attach to its end. Pure: events and time in, what to
// tell the worker out. Once it has ended nothing changes it.
//
//   resolving ──serve──▶ serving ──loaded──▶ loaded ──commit──▶ committed
//       └────────────────────┴──────── end ──────┴──────────────────┴──▶ ended {why}
class WorkerSession {
 public:
  // `resolve_by`: when the worker gives up on its attach.
  WorkerSession(SessionId id, TimePoint now, TimePoint resolve_by, SessionTimes times = {});

  struct Offer {
    ModelVersion id;
    Rung rung = Rung::kLocal;
    TileSet held;                     // tiles that the layout touches
    std::uint64_t payload_bytes = 0;  // of the layout
  };
  // --- what the agent has found
  void enter(Phase phase, TimePoint now) { phases_.enter(phase, now); }
  // The worker is told where its bytes are; none of them are ready yet. kStale when it has ended.
  Result<void> serve(TimePoint now, Offer offer);
  // These have verified. Returns those that the worker was not told of, to tell it now: each tile
  // of the layout goes out once, and no other.
  TileRuns ready(const TileSet& verified);
  // All of the layout has verified and is committed. Returns what the worker was not told of. (It
  // may have loaded all of it already: a commit takes a while.)
  TileRuns complete(TimePoint now);
  // A rung failed and the next one brings the rest; what was told stays true.
  void fall_to(Rung rung) { rung_ = rung; }

  // --- a broadcast round, which may bring what has not verified here, or bring it later than that:
  // the worker's time to load begins when the round is over for it. `all`: was given every byte.
  void enter_round() { in_round_ = true; }
  void leave_round(TimePoint now, bool all);

  // --- what the worker says. kInvalid: before it was told of all tiles or given all bytes, or not
  // all. Again is fine.
  Result<void> loaded(TimePoint now, std::uint64_t bytes);

  // --- what its instance decides
  void commit(TimePoint now);  // of a loaded one
  void end(TimePoint now, Error why);

  // Its deadline has passed: why its rank fails. Checked by `next_deadline`.
  std::optional<Error> overdue(TimePoint now) const;
  std::optional<TimePoint> next_deadline() const;
  // This process did not run for so long: that is not the worker's fault.
  void excuse(Duration pause) {
    resolve_by_ += pause;
    load_by_ += pause;
  }

  SessionId id() const { return id_; }
  SessionState state() const { return state_; }
  bool ended() const { return state_ == SessionState::kEnded; }
  const std::optional<Error>& why_ended() const { return why_; }
  const ModelVersion& version() const { return version_; }
  Rung rung() const { return rung_; }
  bool is_complete() const { return complete_; }
  bool given_all() const { return given_all_; }  // by a round or its device process
  // It may say that it has loaded.
  bool has_all() const;
  std::uint64_t payload_bytes() const { return payload_bytes_; }
  std::uint64_t tiles_told() const { return told_count_; }
  std::uint64_t tiles_held() const { return held_count_; }
  PhaseTimes& phases() { return phases_; }
  const PhaseTimes& phases() const { return phases_; }

 private:
  void begin_install(TimePoint now);

  const SessionId id_;
  const SessionTimes times_;
  TimePoint resolve_by_;
  SessionState state_ = SessionState::kResolving;
  std::optional<Error> why_;
  ModelVersion version_;
  Rung rung_ = Rung::kLocal;
  TileSet untold_;  // of the layout, not yet told
  std::uint64_t held_count_ = 0;
  std::uint64_t told_count_ = 0;
  std::uint64_t payload_bytes_ = 0;
  bool complete_ = false;
  bool given_all_ = false;
  bool in_round_ = false;
  TimePoint load_by_{};
  PhaseTimes phases_;
};

}  // namespace rekindle::worker
