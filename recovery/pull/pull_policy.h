#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "transport/engine.h"

// The decisions of a pull about its sources, its transfers and its patience. Pure: the caller
// brings the events and the time, and carries the decisions out.
namespace rekindle::pull {

// The state of one source, in the transfer that runs or before it.
class SourceState {
 public:
  enum class Phase {
    kIdle,
    kConnecting,
    kConnected,
    kSlow,  // set aside: others finish its slices sooner
    kLost,  // not used by this transfer any more
  };
  enum class Loss {
    kNone,
    kFailed,
    kGrantRefused,  // the grant has run out
    kWrongBytes,    // the source is quarantined
  };
  enum class AfterLoss {
    kWait,  // until it is needed again
    kReconnect,
    kReconnectOverAnother,
    kLose,
  };
  // What is left to try for a source that lost all its paths.
  struct Means {
    bool is_peer = false;
    bool has_another_transport = false;
  };

  Phase phase() const { return phase_; }
  bool connecting() const { return phase_ == Phase::kConnecting; }
  bool lost() const { return phase_ == Phase::kLost; }
  Loss loss() const { return loss_; }
  bool quarantined() const { return loss_ == Loss::kWrongBytes; }
  const std::string& cause() const { return cause_; }
  int reconnects() const { return reconnects_; }

  void connect();
  // Changes nothing when the source was lost meanwhile.
  void connected();
  // All its paths are gone. The caller connects the source again, or calls lose().
  AfterLoss on_paths_lost(const Error& cause, Means means);
  // No other source has the rest, so a slow source is wanted again. False: it was not slow.
  bool revive();
  void lose(Loss loss, std::string cause);
  // Another transfer begins.
  void restart();

 private:
  Phase phase_ = Phase::kIdle;
  Loss loss_ = Loss::kNone;
  std::string cause_;
  int reconnects_ = 0;
};

// Decides when a transfer has tried everything. A batch that starves has no source for the rest.
// That counts only when the batch knows all paths that were made.
class TransferPolicy {
 public:
  struct Step {
    bool ended = false;
    // Cut the connects that are under way short.
    bool stop_connecting = false;
    bool cancel_batch = false;
    bool join_rails = false;
  };

  // Connects, reconnects and joins of rails. The transfer does not end while one is under way.
  void connect_begins() { ++connecting_; }
  void connect_ended() { --connecting_; }
  void paths_added() { ++additions_; }
  // `additions`: how many paths_added() the batch knew. False: more are on their way to it.
  bool starved(std::uint64_t additions);
  bool starved() const { return starved_at_ == additions_; }
  Step next(bool batch_finished, bool cancelled) const;

 private:
  int connecting_ = 0;
  std::uint64_t additions_ = 0;
  // The additions that the batch knew when it last starved.
  std::optional<std::uint64_t> starved_at_;
};

// How long no source has sent a byte of this pull. A pull in trouble has this one budget: it bounds
// reconnecting, asking the coordinator, dialling and waiting together. So NO_SOURCE comes at a
// known time after the last byte, however many of these steps follow one another. Pure; the caller
// brings the time.
class Silence {
 public:
  Silence(std::chrono::milliseconds patience, TimePoint now) : patience_(patience), since_(now) {}

  void heard(TimePoint when) { since_ = std::max(since_, when); }
  // This process was stopped for `pause`. That time does not count as silence.
  void forgive(Duration pause) { since_ += pause; }
  // What comes next has at least this long.
  void leave(std::chrono::milliseconds time, TimePoint now) { heard(now + time - patience_); }

  bool over(TimePoint now) const { return now - since_ >= patience_; }
  std::chrono::milliseconds left(TimePoint now) const {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(since_ + patience_ - now);
    return std::max(left, std::chrono::milliseconds(0));
  }
  // The time that a step may take, at most `wanted`. At least 1 ms, because 0 would mean no
  // deadline.
  std::chrono::milliseconds at_most(std::chrono::milliseconds wanted, TimePoint now) const {
    return std::clamp(left(now), std::chrono::milliseconds(1), wanted);
  }

 private:
  const std::chrono::milliseconds patience_;
  TimePoint since_;
};

// The rails of connected sources: which rails are alive, and when the missing ones are tried again.
// They may work by then: a link comes back, or a source finishes the registration of its memory.
// Pure: the transfer brings the time and does the handshakes.
class RailKeeper {
 public:
  struct LostRail {
    transport::SourceIndex source = 0;
    std::string rail;
  };
  enum class Join { kJoined, kNothingMissing, kFailed };

  // Takes in which paths are alive. Returns the rails that died of sources that go on over others.
  std::vector<LostRail> update(const transport::BatchProgress& progress);
  // NICs whose paths to this source are alive.
  std::vector<std::string> alive(transport::SourceIndex source) const;

  // For a connected source: whether to try to join its missing rails now. Each true is answered by
  // an end_join().
  bool begin_join(transport::SourceIndex source, TimePoint now);
  void end_join(transport::SourceIndex source, Join outcome, TimePoint now);
  bool joining(transport::SourceIndex source) const;

 private:
  struct Rails {
    std::set<std::string> alive;
    bool joining = false;
    // The epoch: the source has just been connected.
    TimePoint next_join{};
    Duration pause{};  // doubles while joins fail
  };

  std::map<transport::SourceIndex, Rails> rails_;
};

inline constexpr int kLossesToBan = 3;
inline constexpr std::uint32_t kWrongSlicesToQuarantine = 2;

// Counts the faults of each source over all transfers of one pull. A source that is lost
// repeatedly, or that sent wrong bytes, is not asked again.
class SourceFaults {
 public:
  bool banned(const Incarnation& source) const { return banned_.contains(source); }
  void ban(const Incarnation& source) { banned_.insert(source); }
  // Outside of a transfer. A peer that did not answer in time may be asked again a few times; a
  // peer that answered nonsense may not.
  void failed(const Incarnation& source, ErrorCode code) {
    const bool unreachable = code == ErrorCode::kTimeout || code == ErrorCode::kPeerLost ||
                             code == ErrorCode::kUnavailable;
    if (!unreachable || ++losses_[source] >= kLossesToBan) ban(source);
  }

  // Slices that a transfer had from this source, and that did not verify. True: they are enough to
  // quarantine it.
  bool add_wrong(const std::string& name, std::uint32_t slices) {
    auto& wrong = wrong_slices_[name];
    wrong += slices;
    return slices > 0 && wrong >= kWrongSlicesToQuarantine;
  }
  void quarantine(const std::string& name, const std::string& cause) { quarantined_[name] = cause; }
  bool quarantined(const std::string& name) const { return quarantined_.contains(name); }
  // The causes, by name.
  const std::map<std::string, std::string>& quarantined() const { return quarantined_; }

  // A transfer lost this peer. Losses do not count while the source delivers in between, and
  // neither does an expired grant.
  void lost(const Incarnation& source, SourceState::Loss loss, bool delivered) {
    if (delivered) losses_.erase(source);
    if (loss == SourceState::Loss::kGrantRefused) return;
    const bool wrong = loss == SourceState::Loss::kWrongBytes;
    if (wrong || ++losses_[source] >= kLossesToBan) ban(source);
  }

 private:
  std::map<Incarnation, int> losses_;  // without a byte in between
  std::set<Incarnation> banned_;
  std::map<std::string, std::uint32_t> wrong_slices_;
  std::map<std::string, std::string> quarantined_;
};

// The decisions between the transfers of a pull: what to do with a plan, where to look for more
// sources, and when to stop. Pure.
class PullRounds {
 public:
  enum class Next { kDone, kTransfer, kFindSources };
  struct PlanFacts {
    bool has_slices = false;
    // No source's layout covers some of the boxes.
    bool has_missing = false;
    // Some sources are being filled.
    bool any_growing = false;
    // Only then: no source holds any of the slices as of now.
    bool nothing_readable = false;
  };
  // While sources are being filled, the pull first reads what they have, although boxes are
  // missing: meanwhile they get more.
  static Next next(const PlanFacts& plan) {
    if (!plan.has_slices && !plan.has_missing) return Next::kDone;
    const bool part_first = plan.has_slices && plan.any_growing;
    if (part_first) return plan.nothing_readable ? Next::kFindSources : Next::kTransfer;
    return plan.has_missing ? Next::kFindSources : Next::kTransfer;
  }

  enum class Search { kReadFallback, kGiveUp, kAskAgain };
  struct SearchFacts {
    // A fallback directory was not read yet.
    bool has_fallback = false;
    // Sources are only behind, or busy.
    bool worth_waiting = false;
    // No source has sent a byte for too long.
    bool silent = false;
  };
  static Search search(const SearchFacts& facts) {
    const bool fallback = facts.has_fallback && (!facts.worth_waiting || facts.silent);
    if (fallback) return Search::kReadFallback;
    return facts.silent ? Search::kGiveUp : Search::kAskAgain;
  }

  enum class After { kGoOn, kAwaitGrants, kStop };
  struct TransferFacts {
    // Tiles verified, or a source was quarantined.
    bool gained = false;
    bool grants_refused = false;
    bool silent = false;
  };
  // A pull stops after some transfers in a row that gained nothing. A transfer whose grants had run
  // out does not count: the coordinator has fresh ones when it is back.
  After after(const TransferFacts& facts) {
    if (facts.gained) {
      fruitless_ = 0;
      return After::kGoOn;
    }
    if (facts.grants_refused && !facts.silent) return After::kAwaitGrants;
    return ++fruitless_ == kFruitlessTransfers ? After::kStop : After::kGoOn;
  }

 private:
  static constexpr int kFruitlessTransfers = 5;
  int fruitless_ = 0;
};

}  // namespace rekindle::pull
