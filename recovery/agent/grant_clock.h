#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"

namespace rekindle::agent {

// The highest epoch of a coordinator that this agent has heard of, in the hello of any peer. A
// coordinator that was replaced must not lead this agent again, not even after a restart of the
// agent. Control thread only.
class HighestEpoch {
 public:
  // Reads the epochs that an earlier life of the agent kept in this file, and keeps them there from
  // here on. Without a file the epoch lives in memory only. A damaged file is renamed to
  // FILE.damaged with a warning, and its epochs are lost.
  Result<void> keep_in(const std::filesystem::path& file, TimePoint now);

  std::uint64_t highest() const { return highest_; }
  // When this agent first heard of an epoch above this one. nullopt: it has not, or too long ago.
  std::optional<TimePoint> replaced_at(std::uint64_t epoch) const;
  // Takes the epoch of a peer's hello. A higher epoch is durable on return. An epoch that is
  // absurdly far above the last confirmed one is ignored: a peer that lies, even repeatedly, must
  // not cut this agent off from all coordinators.
  void hear(std::uint64_t epoch, TimePoint now);
  // Takes the epoch of a coordinator that has registered this agent, or answers its heartbeats.
  void confirm(std::uint64_t epoch, TimePoint now);

 private:
  void raise(std::uint64_t epoch, TimePoint now);
  void keep() const;
  Result<void> save() const;
  Result<void> put_damaged_aside() const;

  struct Raise {
    std::uint64_t to = 0;
    TimePoint at{};
  };
  std::filesystem::path file_;
  std::uint64_t highest_ = 0;
  // By the last registration.
  std::uint64_t confirmed_ = 0;
  // The last few, the earliest first.
  std::deque<Raise> raises_;
};

// Grants are signed by their issuer, and expire on its monotonic clock, so that no wall clock
// matters. This class remembers the keys and clocks of the last few issuers: the coordinators that
// this process was connected to, and the process itself. Pure; control thread only.
class GrantClock {
 public:
  // The clock of `issuer` shows `issuer_ms` now. `key`: its public key; "" at protocol 2.
  void observe(const Incarnation& issuer, std::string_view key, std::uint64_t issuer_ms,
               TimePoint now);
  // kStale: the issuer is unknown.
  Result<std::string> key_of(const Incarnation& issuer) const;
  // kStale: the issuer is unknown, or a coordinator that has been replaced. kDenied: the grant has
  // expired. A grant of an earlier epoch holds until it expires if it may have been given before
  // this agent heard of the new epoch: a change of the coordinator ends no pull. `epoch` 0: the
  // source gave the grant itself.
  // Returns the end of the grant on the clock of this host.
  Result<TimePoint> check(const Incarnation& issuer, std::uint64_t epoch, std::uint64_t expiry_ms,
                          TimePoint now) const;
  // A coordinator answers now.
  void hear_coordinator(TimePoint now);
  // nullopt: no coordinator has answered lately.
  std::optional<TimePoint> in_contact_since(TimePoint now) const;
  HighestEpoch& epochs() { return epochs_; }

 private:
  struct Issuer {
    Incarnation id;
    std::string key;
    std::uint64_t issuer_ms = 0;
    TimePoint at{};
  };
  Result<const Issuer*> find(const Incarnation& id) const;

  std::deque<Issuer> issuers_;
  // Answers of coordinators that follow each other closely.
  std::optional<TimePoint> contact_begin_;
  TimePoint contact_end_{};
  HighestEpoch epochs_;
};

}  // namespace rekindle::agent
