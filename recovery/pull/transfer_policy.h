#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "src/base/result.h"

// What a transfer decides about its sources. Pure: the transfer brings the events and does what is
// decided.
namespace rekindle::pull {

// What became of one source, in the transfer that runs or before it.
class SourceState {
 public:
  enum class Phase {
    kIdle,  // known, and not connected in this transfer
    kConnecting,
    kConnected,
    kSlow,  // alive, but others finish its slices sooner; not connected now
    kLost,  // of no more use to this transfer
  };
  enum class Loss {
    kNone,
    kFailed,
    kGrantRefused,  // its grant has run out, which is not the source's fault
    kWrongBytes,    // it is quarantined
  };
  enum class AfterLoss {
    kWait,       // until nobody else has what is left
    kReconnect,  // over any transport
    kReconnectOverAnother,
    kLose,
  };
  // What a source that lost all its paths could still do.
  struct Means {
    bool is_peer = false;  // bytes of this host need no connection
    bool has_another_transport = false;
  };

  Phase phase() const { return phase_; }
  bool connecting() const { return phase_ == Phase::kConnecting; }
  bool lost() const { return phase_ == Phase::kLost; }
  // It neither connects nor was set aside or lost.
  bool settled() const { return phase_ == Phase::kIdle || phase_ == Phase::kConnected; }
  Loss loss() const { return loss_; }
  bool quarantined() const { return loss_ == Loss::kWrongBytes; }
  const std::string& cause() const { return cause_; }
  int reconnects() const { return reconnects_; }

  void connect();
  // Later than the source was lost it changes nothing.
  void connected();
  // All its paths are gone, and this is why. The caller connects it again, or calls lose().
  AfterLoss on_paths_lost(const Error& cause, Means means);
  // Of use again, as nobody else has what is left. False: it was not set aside.
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

// When a transfer has tried everything. The batch says that it starves: no source can bring what is
// left. That counts only when all paths that were made since have reached it.
class TransferPolicy {
 public:
  struct Step {
    bool ended = false;
    bool stop_connecting = false;  // cut the connects that are under way short
    bool cancel_batch = false;
    bool join_rails = false;
  };

  // Connects, reconnects and joins of rails. The transfer does not end while one is under way.
  void connect_begins() { ++connecting_; }
  void connect_ended() { --connecting_; }
  void paths_added() { ++additions_; }
  // `additions`: of paths that the batch knew then. False: more are on their way to it.
  bool starved(std::uint64_t additions);
  bool starved() const { return starved_at_ == additions_; }
  Step next(bool batch_finished, bool cancelled) const;

 private:
  int connecting_ = 0;
  std::uint64_t additions_ = 0;
  std::optional<std::uint64_t> starved_at_;  // additions that the batch knew when it last starved
};

}  // namespace rekindle::pull
