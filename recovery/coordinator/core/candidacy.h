#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "src/base/result.h"

// One of several coordinators that compete for leadership under a lease that a store keeps. The
// rules only: the driver calls the store and reads the clock.
namespace rekindle::coordinator {

// Time since boot. It goes on while this host is suspended, as the lease does in the store.
using BootTime = std::chrono::milliseconds;

// The lease of a leader, as far as the leader knows. It is counted from before the request that
// renewed it: while this object says that the lease is held, it is held in the store, too, and
// nobody else leads.
class LeaderLease {
 public:
  // kAway: the last request came to no answer. kOver: another coordinator may lead.
  enum class State { kHeld, kAway, kOver };

  LeaderLease(BootTime ttl, BootTime renewed_at) : ttl_(ttl), until_(renewed_at + ttl) {}

  // Time passes; the lease may end.
  State advance(BootTime now);
  // A request that was sent at `asked_at` has ended. False: the store says that the lease is over.
  // An error: no answer.
  State answered(BootTime asked_at, const Result<bool>& renewed, BootTime now);
  // How long to wait before the next request, and how long it may take.
  BootTime next_request_in(BootTime now) const;
  BootTime request_limit(BootTime now) const;
  // kUnavailable: it cannot be known whether this coordinator still leads.
  Result<void> check(BootTime now) const;
  // Of kOver.
  const std::string& why_over() const { return why_over_; }

 private:
  const BootTime ttl_;
  BootTime until_;
  State state_ = State::kHeld;
  std::string why_over_;
};

// From standing by to leading and back. A coordinator campaigns; when it has won it confirms the
// lease before it leads. After a term that ended because of the lease it stands by again. An error
// that would repeat itself (bad options, a damaged state) ends the candidacy.
class Candidacy {
 public:
  enum class State { kStandingBy, kConfirming, kLeading, kOver };

  State state() const { return state_; }
  // Wait this long before the state is acted on.
  BootTime pause() const { return pause_; }
  // The result of kOver.
  const Result<void>& outcome() const { return outcome_; }

  // The operator wants this coordinator to end. A term that runs ends first.
  void stop();
  // The campaign has ended. Returns the reason of a loss unless it is the same as the last time.
  std::optional<std::string> campaigned(const Result<void>& won);
  void confirmed(const Result<bool>& renewed);
  void term_ended(const Result<void>& outcome);

 private:
  void stand_by(BootTime pause);

  State state_ = State::kStandingBy;
  BootTime pause_{};
  bool stopping_ = false;
  std::string last_loss_;
  Result<void> outcome_;
};

}  // namespace rekindle::coordinator
