#include "recovery/pull/source_standing.h"

namespace rekindle::pull {

void SourceStanding::failed(const Incarnation& source, ErrorCode code) {
  const bool unreachable = code == ErrorCode::kTimeout || code == ErrorCode::kPeerLost ||
                           code == ErrorCode::kUnavailable;
  if (!unreachable || ++losses_[source] >= kLossesToBan) ban(source);
}

bool SourceStanding::add_wrong(const std::string& name, std::uint32_t slices) {
  auto& wrong = wrong_slices_[name];
  wrong += slices;
  return slices > 0 && wrong >= kWrongSlicesToQuarantine;
}

void SourceStanding::lost(const Incarnation& source, SourceState::Loss loss, bool delivered) {
  if (delivered) losses_.erase(source);
  if (loss == SourceState::Loss::kGrantRefused) return;
  const bool wrong = loss == SourceState::Loss::kWrongBytes;
  if (wrong || ++losses_[source] >= kLossesToBan) ban(source);
}

}  // namespace rekindle::pull
