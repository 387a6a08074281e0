#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "src/base/result.h"

// The decisions of a transfer about its sources. Pure: the transfer brings the events and carries
// the decisions out.
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

}  // namespace rekindle::pull
