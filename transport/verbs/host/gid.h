#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "src/base/result.h"

// The choice of a port's address. Pure and without libibverbs, so that doctor comes to the same
// result from sysfs alone.
namespace rekindle::transport::verbs {

enum class LinkLayer : std::uint8_t { kInfiniBand = 1, kEthernet = 2 };
std::string_view to_string(LinkLayer link);

using Gid = std::array<std::uint8_t, 16>;

enum class GidType : std::uint8_t { kInfiniBand, kRoceV1, kRoceV2 };

struct GidEntry {
  std::uint32_t index = 0;
  GidType type = GidType::kInfiniBand;
  Gid gid{};
};

// Better ones first.
enum class GidKind : std::uint8_t {
  kIpv4,           // ::ffff:a.b.c.d
  kIpv6,           // global or unique-local
  kIpv4LinkLocal,  // 169.254.0.0/16: found itself, reaches the same wire only
  kIpv6LinkLocal,  // fe80::/10
  kNone,           // all zero
};
GidKind kind_of(const Gid& gid);
std::string_view to_string(GidKind kind);

struct GidChoice {
  std::uint8_t index = 0;
  Gid gid{};
  std::string why;  // "RoCE v2, IPv4"
  bool operator==(const GidChoice&) const = default;
};

// Chooses among the entries of one port. `wanted_index` (for RoCE ports only) forces one; -1 does
// not. `current` is kept until a better kind appears: a further address on the port breaks nothing.
// kNotFound: the port has no usable GID yet. kInvalid: `wanted_index` cannot be used.
Result<GidChoice> choose_gid(std::span<const GidEntry> entries, LinkLayer link, int wanted_index,
                             const GidChoice* current = nullptr);

// "10.0.0.3" for an IPv4-mapped GID, else the form of inet_ntop.
std::string format_gid(const Gid& gid);
// Parses the form of sysfs: eight groups of four hex digits.
Result<Gid> parse_sysfs_gid(std::string_view text);

}  // namespace rekindle::transport::verbs
