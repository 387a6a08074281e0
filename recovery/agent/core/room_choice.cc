#include "recovery/agent/core/room_choice.h"

#include <utility>

namespace rekindle::agent {

RoomChoice::RoomChoice(std::uint64_t missing_bytes, std::vector<Candidate> candidates,
                       TimePoint now)
    : missing_bytes_(missing_bytes), began_(now) {
  std::uint64_t unused_bytes = 0;
  for (Candidate& candidate : candidates) {
    if (!candidate.why_needed.empty()) {
      note(candidate.why_needed);
      continue;
    }
    unused_bytes += candidate.bytes;
    unused_.push_back(std::move(candidate));
  }
  possible_ = unused_bytes >= missing_bytes_;
}

std::optional<ModelVersion> RoomChoice::next_question() const {
  if (!possible_ || enough() || asked_ == unused_.size()) return std::nullopt;
  return unused_[asked_].id;
}

void RoomChoice::agreed() {
  const Candidate& candidate = unused_[asked_++];
  chosen_bytes_ += candidate.bytes;
  chosen_.push_back(candidate);
}

void RoomChoice::refused(const std::string& why) {
  ++asked_;
  note(why);
}

void RoomChoice::note(const std::string& why) { stays_ += (stays_.empty() ? "" : "; ") + why; }

Result<std::vector<RoomChoice::Candidate>> RoomChoice::chosen(
    const std::string& nothing_older) const {
  if (possible_ && enough()) return chosen_;
  return fail(ErrorCode::kExhausted, "{}", stays_.empty() ? nothing_older : stays_);
}

Result<void> RoomChoice::confirm(
    bool same_connection, TimePoint now,
    const std::function<std::string(const ModelVersion&)>& why_needed) const {
  if (!same_connection || now - began_ > kAgreementLifetime) {
    return fail(ErrorCode::kUnavailable,
                "nothing was retired: the coordinator was lost after it agreed; try again");
  }
  for (const Candidate& candidate : chosen_) {
    if (const std::string why = why_needed(candidate.id); !why.empty()) {
      return fail(ErrorCode::kExhausted, "{}", why);
    }
  }
  return {};
}

}  // namespace rekindle::agent
