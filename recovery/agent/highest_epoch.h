#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <optional>

#include "src/base/clock.h"
#include "src/base/result.h"

namespace rekindle::agent {

// The highest epoch of a coordinator that this agent has heard of, from anybody's hello: who is
// replaced must not lead it again, not even after a restart of the agent. Control thread only.
class HighestEpoch {
 public:
  // Reads what an earlier life kept in this file and keeps it there from here on; without it the
  // epoch lives in memory only. A damaged file is not believed: it is renamed to FILE.damaged, a
  // warning says so, and the epochs of an earlier life are forgotten.
  Result<void> keep_in(const std::filesystem::path& file, TimePoint now);

  std::uint64_t highest() const { return highest_; }
  // Since when an epoch above this one is known; nothing when none is. Of the last few raises.
  std::optional<TimePoint> replaced_at(std::uint64_t epoch) const;
  // Of anybody's hello. A higher one is durable on return. One that is absurdly far above the last
  // epoch in which a coordinator has registered this agent is ignored: whoever lies, once or again
  // and again, must not cut this agent off from all coordinators.
  void hear(std::uint64_t epoch, TimePoint now);
  // Of a coordinator that has registered this agent, or answers as such.
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
  std::uint64_t confirmed_ = 0;  // by the last registration
  std::deque<Raise> raises_;     // the earliest first
};

}  // namespace rekindle::agent
