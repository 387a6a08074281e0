#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include <fmt/format.h>

namespace rekindle {

// The versions of a protocol that one end speaks.
struct ProtocolRange {
  // "agent host-7 (rekindle 0.2.0)".
  std::string speaker;
  std::uint32_t min = 0;
  std::uint32_t max = 0;
};

// Why the two ends cannot talk, and what to do; nullopt: both speak the lower one of their maxima.
// A release speaks the protocol of the release before it, so the older end needs not be made equal.
inline std::optional<std::string> protocol_conflict(const ProtocolRange& a,
                                                    const ProtocolRange& b) {
  const ProtocolRange& older = a.max < b.max ? a : b;
  const ProtocolRange& newer = &older == &a ? b : a;
  if (older.max >= newer.min) return std::nullopt;
  return fmt::format(
      "{} speaks protocol {}..{}, {} speaks {}..{}: upgrade {}, at least to the release before "
      "that of the other end",
      newer.speaker, newer.min, newer.max, older.speaker, older.min, older.max, older.speaker);
}

}  // namespace rekindle
