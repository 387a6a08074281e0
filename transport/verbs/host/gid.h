#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "src/base/result.h"

// Which of a port's addresses is used. Pure, and without libibverbs, so that doctor says the same
// from sysfs alone.
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

// `entries`: of one port. `wanted_index`: -1, or the one to use (of RoCE ports only). `current`
// is kept while nothing of a better kind is there: another address on the same port breaks nothing.
// kNotFound: the port has no usable GID (yet); kInvalid: `wanted_index` cannot be used.
Result<GidChoice> choose_gid(std::span<const GidEntry> entries, LinkLayer link, int wanted_index,
                             const GidChoice* current = nullptr);

// "10.0.0.3" for IPv4-mapped ones, else as inet_ntop.
std::string format_gid(const Gid& gid);
// As sysfs writes it: eight groups of four hex digits.
Result<Gid> parse_sysfs_gid(std::string_view text);

}  // namespace rekindle::transport::verbs
