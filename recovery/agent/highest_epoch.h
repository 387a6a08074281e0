#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <optional>

#include "src/base/clock.h"
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

}  // namespace rekindle::agent
