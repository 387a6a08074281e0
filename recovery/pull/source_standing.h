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

// What one pull thinks of each source over all its transfers: a source that is lost again and
// again, or that sent wrong bytes, is not asked again. Pure.
class SourceStanding {
 public:
  bool banned(const Incarnation& source) const { return banned_.contains(source); }
  void ban(const Incarnation& source) { banned_.insert(source); }
  // Outside of a transfer. A peer that did not answer in time may be asked again a few times; a
  // peer that answered nonsense may not.
  void failed(const Incarnation& source, ErrorCode code);

  // Slices that a transfer had from this source, and that did not verify. True: they are enough to
  // quarantine it.
  bool add_wrong(const std::string& name, std::uint32_t slices);
  void quarantine(const std::string& name, const std::string& cause) { quarantined_[name] = cause; }
  bool quarantined(const std::string& name) const { return quarantined_.contains(name); }
  // By name: why.
  const std::map<std::string, std::string>& quarantined() const { return quarantined_; }

  // A transfer lost this peer. While a source delivers, the network may lose it as often as it
  // likes; a grant that has run out is not its fault.
  void lost(const Incarnation& source, SourceState::Loss loss, bool delivered);

 private:
  std::map<Incarnation, int> losses_;  // in a row
  std::set<Incarnation> banned_;
  std::map<std::string, std::uint32_t> wrong_slices_;
  std::map<std::string, std::string> quarantined_;
};

}  // namespace rekindle::pull
