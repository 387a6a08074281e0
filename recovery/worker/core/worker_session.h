#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/tensor/tile.h"

namespace rekindle::worker {

using SessionId = std::uint64_t;

// The stages of an attach, in this order. A session never goes back to an earlier one.
enum class Phase : std::size_t {
  kDetect,    // from the last sign of life of the rank's predecessor until its death was seen
  kPlan,      // from the attach until the version and its sources are known
  kRegister,  // until the sources are connected and memory is registered
  kWire,      // until every byte is here and verified
  kInstall,   // until the worker has loaded every byte
  kReady,     // until every rank of the instance has loaded
};
inline constexpr std::size_t kPhaseCount = 6;
std::string_view to_string(Phase phase);

// Measures how long each phase takes. The time of the current phase counts up to `now`.
class PhaseTimes {
 public:
  void begin(Phase phase, TimePoint now) {
    phase_ = phase;
    since_ = now;
    running_ = true;
  }
  // Ignores earlier phases: that time stays with the current one.
  void enter(Phase phase, TimePoint now) {
    if (!running_ || phase <= phase_) return;
    add(now);
    begin(phase, now);
  }
  void end(TimePoint now) {
    if (!running_) return;
    add(now);
    running_ = false;
  }
  Phase current() const { return phase_; }
  // The current phase, if it has not been reported yet. Each phase is reported once.
  std::optional<Phase> to_report() {
    if (phase_ <= reported_) return std::nullopt;
    reported_ = phase_;
    return phase_;
  }
  void set(Phase phase, Duration took) { took_[static_cast<std::size_t>(phase)] = took; }
  std::array<Duration, kPhaseCount> at(TimePoint now) const {
    auto took = took_;
    if (running_ && now > since_) took[static_cast<std::size_t>(phase_)] += now - since_;
    return took;
  }

 private:
  void add(TimePoint now) {
    if (now > since_) took_[static_cast<std::size_t>(phase_)] += now - since_;
  }
  std::array<Duration, kPhaseCount> took_{};
  Phase phase_ = Phase::kPlan;
  Phase reported_ = Phase::kPlan;
  TimePoint since_{};
  bool running_ = false;
};

// Announces each tile of a layout to the worker once, and no other tile.
class TileAnnouncements {
 public:
  void begin(TileSet held) {
    held_ = held.count();
    pending_ = std::move(held);
  }
  // Returns the tiles of `verified` that the worker has not heard of. The caller announces them.
  TileRuns announce(const TileSet& verified);
  TileRuns announce_rest();

  std::uint64_t announced() const { return announced_; }
  std::uint64_t held() const { return held_; }  // tiles of the layout
  bool all() const { return announced_ == held_; }

 private:
  TileSet pending_;
  std::uint64_t held_ = 0;
  std::uint64_t announced_ = 0;
};

enum class Rung { kResident, kLocal, kAdopted, kPeers, kFallback };
std::string_view to_string(Rung rung);

enum class SessionState { kResolving, kServing, kLoaded, kCommitted, kEnded };
std::string_view to_string(SessionState state);

// How the bytes reach the worker once it is served.
enum class Delivery {
  // The worker, or its device, reads this host's copy.
  kHost,
  // A broadcast round, or NICs, may bring the bytes to its device.
  kRound,
  // It brings no more: its device process fills the rest from this host's copy.
  kRest,
  // Its device process has given the worker every byte, not all of them by a round or by NICs.
  kFilled,
  // A round, or NICs, brought every byte, and the device verified all of them.
  kBroadcast,
};

struct SessionTimes {
  // How long a worker may take to load, from the arrival of the last byte. Then its rank fails.
  std::chrono::milliseconds load{600'000};
};

// Serves one rank of a worker from its attach to its end. Pure: the caller passes events and the
// time, and sends the worker what the calls return. Nothing changes a session that has ended.
//
//   resolving ──serve──▶ serving ──loaded──▶ loaded ──commit──▶ committed
//       └────────────────────┴──────── end ──────┴──────────────────┴──▶ ended {why}
class WorkerSession {
 public:
  // `resolve_by`: when the worker gives up on its attach.
  WorkerSession(SessionId id, TimePoint now, TimePoint resolve_by, SessionTimes times = {});

  const SessionTimes& times() const { return times_; }

  struct Offer {
    ModelVersion id;
    Rung rung = Rung::kLocal;
    TileSet held;                     // tiles that the layout touches
    std::uint64_t payload_bytes = 0;  // of the layout
  };
  // --- events of the agent
  // The present reason why the attach waits. The error of a timeout names it.
  void wait_for(std::optional<Error> obstacle) { obstacle_ = std::move(obstacle); }
  // The worker learns where its bytes will be; none of them are ready yet. kStale: it has ended.
  Result<void> serve(TimePoint now, Offer offer);
  // These tiles have verified. Returns those to announce to the worker now.
  TileRuns ready(const TileSet& verified);
  // The whole layout has verified and is committed. Returns the tiles to announce. The worker may
  // have loaded everything before, because a commit takes a while.
  TileRuns complete(TimePoint now);
  // A rung failed and the next one brings the rest. Earlier announcements stay true.
  void fall_to(Rung rung) { rung_ = rung; }

  // --- its device process and its broadcast round, if any. The worker's time to load begins when
  // the round is over for it.
  void enter_round();
  // The round brings nothing more. `all`: the device process has given the worker every byte.
  void leave_round(TimePoint now, bool all);
  // A round has brought every byte, verified on the device.
  void receive_broadcast(TimePoint now);
  // The device process is done with the session. `all`: it has delivered every bucket.
  void leave_device(TimePoint now, bool all);

  // --- messages of the worker
  // The next step after a worker has reported that it has loaded.
  enum class LoadedStep {
    kWait,    // its device process, or the commit of the copy
    kVerify,  // a check that the copy is still what the worker was given
    kAccept,  // nothing
  };
  // `copy`: what is known of the copy that the worker reads.
  enum class CopyKnown { kArriving, kChanged, kUnchanged };
  LoadedStep next_for_loaded(CopyKnown copy) const;
  // kInvalid: the worker has not been given all bytes, or says another number. Again is fine.
  Result<void> loaded(TimePoint now, std::uint64_t bytes);

  // --- decisions of its instance
  void commit(TimePoint now);  // of a loaded one
  void end(TimePoint now, Error why);

  // The error of a session whose deadline has passed. The caller checks at `next_deadline`.
  std::optional<Error> overdue(TimePoint now) const;
  std::optional<TimePoint> next_deadline() const;
  // This process did not run for `pause`. The deadlines move by that time.
  void excuse(Duration pause) {
    resolve_by_ += pause;
    load_by_ += pause;
  }

  SessionId id() const { return id_; }
  SessionState state() const { return state_; }
  bool ended() const { return why_.has_value(); }
  const ModelVersion& version() const { return version_; }
  Rung rung() const { return rung_; }
  Delivery delivery() const { return delivery_; }
  bool is_complete() const { return complete_; }
  // Its device process has given the worker every byte, by a round or without.
  bool was_given_all() const;
  // The worker may say that it has loaded.
  bool has_all() const;
  std::uint64_t payload_bytes() const { return payload_bytes_; }
  // In proportion to the announced tiles, which differ little in size; exact at the end.
  std::uint64_t announced_bytes() const;
  const TileAnnouncements& tiles() const { return tiles_; }
  PhaseTimes& phases() { return phases_; }
  const PhaseTimes& phases() const { return phases_; }

 private:
  void begin_install(TimePoint now);

  const SessionId id_;
  const SessionTimes times_;
  TimePoint resolve_by_;
  SessionState state_ = SessionState::kResolving;
  Delivery delivery_ = Delivery::kHost;
  // Why the session has ended; empty before.
  std::optional<Error> why_;
  std::optional<Error> obstacle_;
  ModelVersion version_;
  Rung rung_ = Rung::kLocal;
  TileAnnouncements tiles_;
  std::uint64_t payload_bytes_ = 0;
  bool complete_ = false;  // the copy here is committed
  TimePoint load_by_{};
  PhaseTimes phases_;
};

}  // namespace rekindle::worker
