#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"

namespace rekindle::agent {

// Decides how an agent stays registered at its coordinator: which address it connects to, how long
// it pauses after a failure, and when it registers, announces its copies and sends a heartbeat.
// CoordinatorLink asks for the next step, performs it and reports the outcome. Several addresses
// are tried in turn, because only the coordinator that leads listens. A node that is not a member
// (the embedded agent of a command) keeps a connection and neither registers nor sends heartbeats.
// Pure: no I/O and no clock.
class CoordinatorRegistration {
 public:
  enum class Step { kConnect, kRegister, kAnnounce, kHeartbeat, kWait, kStop };
  struct Next {
    Step step = Step::kWait;
    // Of kWait. A change ends the wait early: see the methods that say so.
    TimePoint until{};
  };

  // `seed` spreads the pauses of agents that lose their coordinator at the same moment.
  CoordinatorRegistration(std::vector<std::string> addresses, bool member, std::uint32_t seed);

  Next next(TimePoint now);

  // Outcomes of the steps. An outcome that comes after a loss or after stop() changes nothing.
  void connected(TimePoint now);
  void registered(std::uint32_t heartbeat_interval_ms, std::uint32_t ttl_ms, TimePoint now);
  // `again`: the coordinator could not make all of it durable and wants the same announcement soon.
  void announced(bool again, TimePoint now);
  void heartbeat_answered(TimePoint now);
  // The connection could not be made, or it ended, or a call on it failed. Returns true for the
  // first loss after a stable connection, which is worth a line in the log.
  bool lost(Error why, TimePoint now);

  // The copies of this host have changed: a heartbeat and an announcement are due now.
  void copies_changed();
  // An announcement has begun: changes from here on need another one.
  void begin_announcement();
  void stop();

  bool is_registered() const;
  const std::string& address() const { return addresses_[current_]; }
  // For one attempt to connect. Short when there are several addresses: a dead host does not
  // answer, and all of them are tried within the grace of a coordinator that has just started.
  std::chrono::milliseconds connect_deadline() const;
  // For the answer to a heartbeat: the coordinator forgets this agent after that time.
  std::chrono::milliseconds ttl() const { return ttl_; }
  // Why there is no connection.
  const Error& last_error() const { return last_error_; }
  // Waiting does not repair a wrong name or secret.
  bool hopeless() const;

 private:
  enum class State {
    kConnecting,
    kPausing,
    kRegistering,
    kAnnouncing,
    kHeartbeating,
    kIdle,
    kStopped
  };
  void pause_or_try_next(bool was_connected, TimePoint now);
  std::chrono::milliseconds jittered_backoff();

  const std::vector<std::string> addresses_;
  const bool member_;
  std::minstd_rand random_;
  State state_ = State::kConnecting;
  std::size_t current_ = 0;
  Error last_error_{ErrorCode::kUnavailable, "not tried yet"};
  std::chrono::milliseconds backoff_;
  std::chrono::milliseconds heartbeat_interval_{250};
  std::chrono::milliseconds ttl_{2000};
  // Of the connection that is open.
  std::optional<TimePoint> connected_at_;
  // Of kPausing: its end. Of kIdle: when the next heartbeat is due.
  TimePoint wake_at_{};
  bool announcement_due_ = false;
  std::optional<TimePoint> announce_again_at_;
};

}  // namespace rekindle::agent
