#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"

namespace rekindle::agent {

// Chooses the versions that a host retires to make room for a newer one: the oldest first, only
// versions that nobody on this host needs, and only where the coordinator agrees; as many as are
// needed, or none. Pure: RoomMaker asks the coordinator and retires.
class RoomChoice {
 public:
  struct Candidate {
    ModelVersion id;
    // Of the budget, all its copies.
    std::uint64_t bytes = 0;
    // Why it must stay on this host; "" when it need not.
    std::string why_needed;
  };

  // How long the agreement of the coordinator counts. The coordinator remembers it for a minute.
  static constexpr std::chrono::seconds kAgreementLifetime{30};

  // `candidates`: the oldest first.
  RoomChoice(std::uint64_t missing_bytes, std::vector<Candidate> candidates, TimePoint now);

  // The version that the coordinator must be asked about next. Nothing: the choice is made.
  std::optional<ModelVersion> next_question() const;
  void agreed();
  void refused(const std::string& why);

  // The versions to retire. kExhausted: there is not enough; one clause for each version that
  // stays. `nothing_older` is the reason when there is no such version.
  Result<std::vector<Candidate>> chosen(const std::string& nothing_older) const;

  // Whether the choice still holds just before the first version is retired. `why_needed` is asked
  // about each chosen version again.
  Result<void> confirm(bool same_connection, TimePoint now,
                       const std::function<std::string(const ModelVersion&)>& why_needed) const;

 private:
  bool enough() const { return chosen_bytes_ >= missing_bytes_; }
  void note(const std::string& why);

  const std::uint64_t missing_bytes_;
  const TimePoint began_;
  std::vector<Candidate> unused_;
  std::size_t asked_ = 0;
  std::vector<Candidate> chosen_;
  std::uint64_t chosen_bytes_ = 0;
  // False: even all unused versions together are too small, and nobody is asked.
  bool possible_ = false;
  // Why versions stay, one clause each.
  std::string stays_;
};

}  // namespace rekindle::agent
