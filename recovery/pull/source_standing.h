#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "recovery/pull/transfer_policy.h"
#include "src/base/ids.h"

namespace rekindle::pull {

inline constexpr int kLossesToBan = 3;
inline constexpr std::uint32_t kWrongSlicesToQuarantine = 2;

// What one pull knows of each source's conduct, over all its transfers. A source that is lost again
// and again, or that sent wrong bytes, is not asked again. Pure.
class SourceStanding {
 public:
  bool banned(const Incarnation& source) const { return banned_.contains(source); }
  void ban(const Incarnation& source) { banned_.insert(source); }
  // Outside of a transfer. A peer that did not answer in time may be asked again a few times; a
  // peer that answered nonsense may not.
  void failed(const Incarnation& source, ErrorCode code) {
    const bool unreachable = code == ErrorCode::kTimeout || code == ErrorCode::kPeerLost ||
                             code == ErrorCode::kUnavailable;
    if (!unreachable || ++losses_[source] >= kLossesToBan) ban(source);
  }

  // Slices that a transfer had from this source, and that did not verify. True: they are enough to
  // quarantine it.
  bool add_wrong(const std::string& name, std::uint32_t slices) {
    auto& wrong = wrong_slices_[name];
    wrong += slices;
    return slices > 0 && wrong >= kWrongSlicesToQuarantine;
  }
  void quarantine(const std::string& name, const std::string& cause) { quarantined_[name] = cause; }
  bool quarantined(const std::string& name) const { return quarantined_.contains(name); }
  // The causes, by name.
  const std::map<std::string, std::string>& quarantined() const { return quarantined_; }

  // A transfer lost this peer. Losses do not count while the source delivers in between, and
  // neither does an expired grant.
  void lost(const Incarnation& source, SourceState::Loss loss, bool delivered) {
    if (delivered) losses_.erase(source);
    if (loss == SourceState::Loss::kGrantRefused) return;
    const bool wrong = loss == SourceState::Loss::kWrongBytes;
    if (wrong || ++losses_[source] >= kLossesToBan) ban(source);
  }

 private:
  std::map<Incarnation, int> losses_;  // without a byte in between
  std::set<Incarnation> banned_;
  std::map<std::string, std::uint32_t> wrong_slices_;
  std::map<std::string, std::string> quarantined_;
};

}  // namespace rekindle::pull
