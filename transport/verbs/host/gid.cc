#include "transport/verbs/host/gid.h"

#include <algorithm>
#include <charconv>

#include <arpa/inet.h>

namespace rekindle::transport::verbs {

namespace {

constexpr std::uint32_t kMaxIndex = 255;  // what an address vector holds

GidChoice chosen(const GidEntry& entry, std::string why) {
  return {static_cast<std::uint8_t>(entry.index), entry.gid, std::move(why)};
}

Result<GidChoice> wanted(std::span<const GidEntry> entries, int index) {
  const auto has_index = [&](const GidEntry& entry) {
    return entry.index == static_cast<std::uint32_t>(index) && kind_of(entry.gid) != GidKind::kNone;
  };
  const auto it = std::ranges::find_if(entries, has_index);
  if (it == entries.end() || it->index > kMaxIndex) {
    return fail(ErrorCode::kInvalid, "GID index {} is empty: `rekindle topo` shows the others",
                index);
  }
  if (it->type != GidType::kRoceV2) {
    return fail(ErrorCode::kInvalid, "GID index {} is {}: a RoCE v2 one is needed", index,
                it->type == GidType::kRoceV1 ? "RoCE v1" : "not RoCE");
  }
  return chosen(*it, fmt::format("--gid-index, {}", to_string(kind_of(it->gid))));
}

}  // namespace

std::string_view to_string(LinkLayer link) {
  return link == LinkLayer::kInfiniBand ? "InfiniBand" : "Ethernet";
}

std::string_view to_string(GidKind kind) {
  switch (kind) {
    case GidKind::kIpv4:
      return "IPv4";
    case GidKind::kIpv6:
      return "IPv6";
    case GidKind::kIpv4LinkLocal:
      return "IPv4 link-local";
    case GidKind::kIpv6LinkLocal:
      return "IPv6 link-local";
    case GidKind::kNone:
      return "none";
  }
  return "?";
}

GidKind kind_of(const Gid& gid) {
  constexpr std::array<std::uint8_t, 12> kMapped = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  if (std::ranges::all_of(gid, [](std::uint8_t byte) { return byte == 0; })) return GidKind::kNone;
  if (std::equal(kMapped.begin(), kMapped.end(), gid.begin())) {
    return gid[12] == 169 && gid[13] == 254 ? GidKind::kIpv4LinkLocal : GidKind::kIpv4;
  }
  const bool link_local = gid[0] == 0xfe && (gid[1] & 0xc0U) == 0x80;
  return link_local ? GidKind::kIpv6LinkLocal : GidKind::kIpv6;
}

Result<GidChoice> choose_gid(std::span<const GidEntry> entries, LinkLayer link, int wanted_index,
                             const GidChoice* current) {
  if (link == LinkLayer::kInfiniBand) {
    const auto it = std::ranges::find(entries, 0U, &GidEntry::index);
    if (it != entries.end()) return chosen(*it, "InfiniBand, the default one");
    return fail(ErrorCode::kNotFound, "no GID at index 0");
  }
  if (wanted_index >= 0) return wanted(entries, wanted_index);
  const GidEntry* best = nullptr;
  const auto is_current = [&](const GidEntry& entry) {
    return current != nullptr && entry.index == current->index && entry.gid == current->gid;
  };
  for (const GidEntry& entry : entries) {
    const GidKind kind = kind_of(entry.gid);
    if (entry.type != GidType::kRoceV2 || kind == GidKind::kNone || entry.index > kMaxIndex) {
      continue;
    }
    const auto better = [&] {
      if (kind != kind_of(best->gid)) return kind < kind_of(best->gid);
      if (is_current(entry) != is_current(*best)) return is_current(entry);
      return entry.index < best->index;
    };
    if (best == nullptr || better()) best = &entry;
  }
  if (best == nullptr) {
    return fail(ErrorCode::kNotFound, "no RoCE v2 GID: give the network interface an address");
  }
  return chosen(*best, fmt::format("RoCE v2, {}", to_string(kind_of(best->gid))));
}

std::string format_gid(const Gid& gid) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const GidKind kind = kind_of(gid);
  const bool ipv4 = kind == GidKind::kIpv4 || kind == GidKind::kIpv4LinkLocal;
  ::inet_ntop(ipv4 ? AF_INET : AF_INET6, ipv4 ? gid.data() + 12 : gid.data(), text.data(),
              text.size());
  return text.data();
}

Result<Gid> parse_sysfs_gid(std::string_view text) {
  constexpr std::size_t kGroups = 8;
  constexpr std::size_t kStride = 5;  // "ffff:"
  Gid gid{};
  bool good = text.size() == kGroups * kStride - 1;
  for (std::size_t i = 0; good && i < kGroups; ++i) {
    const char* const begin = text.data() + i * kStride;
    std::uint16_t group = 0;
    const auto [end, error] = std::from_chars(begin, begin + 4, group, 16);
    good = error == std::errc() && end == begin + 4 && (i + 1 == kGroups || *end == ':');
    gid[2 * i] = static_cast<std::uint8_t>(group >> 8U);
    gid[2 * i + 1] = static_cast<std::uint8_t>(group & 0xffU);
  }
  if (!good) return fail(ErrorCode::kInvalid, "'{}' is no GID", text);
  return gid;
}

}  // namespace rekindle::transport::verbs
