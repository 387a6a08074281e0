#include "transport/verbs/link/rail_pairs.h"

#include <algorithm>
#include <bit>
#include <map>
#include <optional>
#include <tuple>

namespace rekindle::transport::verbs {
namespace {

constexpr std::size_t kRailSubnetBytes = 8;
constexpr std::size_t kMappedPrefixBytes = 12;
constexpr int kByteBits = 8;

int common_prefix_bits(const RailAddress& a, const RailAddress& b) {
  int bits = 0;
  for (std::size_t i = 0; i < a.gid.size(); ++i) {
    const auto differs = static_cast<std::uint8_t>(a.gid[i] ^ b.gid[i]);
    if (differs != 0) return bits + std::countl_zero(differs);
    bits += kByteBits;
  }
  return bits;
}

bool is_v4_mapped(const RailAddress& address) {
  const auto& gid = address.gid;
  return std::all_of(gid.begin(), gid.begin() + kMappedPrefixBytes - 2,
                     [](std::uint8_t byte) { return byte == 0; }) &&
         gid[kMappedPrefixBytes - 2] == 0xff && gid[kMappedPrefixBytes - 1] == 0xff;
}

// How many bytes of the network part two addresses share. Without masks this is an estimate: the
// network part of an IPv4 address is all but its last byte. That of another address is its first
// half, as the rest names the port.
int common_network_bytes(const RailAddress& a, const RailAddress& b) {
  const int bytes = common_prefix_bits(a, b) / kByteBits;
  const std::size_t most = is_v4_mapped(a) ? a.gid.size() - 1 : kRailSubnetBytes;
  return std::min(bytes, static_cast<int>(most));
}

bool may_reach(const RailAddress& a, const RailAddress& b) {
  if (a.link != b.link) return false;
  if (a.link == LinkLayer::kEthernet) return is_v4_mapped(a) == is_v4_mapped(b);
  return std::equal(a.gid.begin(), a.gid.begin() + kRailSubnetBytes, b.gid.begin());
}

std::vector<const RailInfo*> of_speed(std::span<const RailInfo> rails, bool fast) {
  std::uint64_t fastest = 0;
  for (const auto& rail : rails) fastest = std::max(fastest, rail.bytes_per_second);
  std::vector<const RailInfo*> chosen;
  for (const auto& rail : rails) {
    // An unknown speed counts as fast: it would be worse to leave a good rail out.
    const bool is_fast = rail.bytes_per_second == 0 || rail.bytes_per_second >= fastest / 2;
    if (is_fast || !fast) chosen.push_back(&rail);
  }
  return chosen;
}

std::vector<RailPair> pair_up(const std::vector<const RailInfo*>& local,
                              const std::vector<const RailInfo*>& remote) {
  std::vector<RailPair> pairs;
  std::map<std::uint32_t, int> uses;
  for (const auto* mine : local) {
    const RailInfo* best = nullptr;
    const auto rank = [&](const RailInfo& theirs) {
      return std::tuple(common_network_bytes(mine->address, theirs.address), -uses[theirs.index],
                        common_prefix_bits(mine->address, theirs.address));
    };
    for (const auto* theirs : remote) {
      if (!may_reach(mine->address, theirs->address)) continue;
      if (best == nullptr || rank(*theirs) > rank(*best)) best = theirs;
    }
    if (best == nullptr) continue;
    ++uses[best->index];
    pairs.push_back({mine->index, best->index});
  }
  return pairs;
}

std::string list(std::span<const RailInfo> rails) {
  std::string text;
  for (const auto& rail : rails) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", rail.name, to_string(rail.address));
  }
  return text.empty() ? "no active port" : text;
}

}  // namespace

Result<std::vector<RailPair>> choose_rail_pairs(std::span<const RailInfo> local,
                                                std::span<const RailInfo> remote) {
  for (const auto& [local_fast, remote_fast] : {std::pair(true, true), std::pair(true, false),
                                                std::pair(false, true), std::pair(false, false)}) {
    auto pairs = pair_up(of_speed(local, local_fast), of_speed(remote, remote_fast));
    if (!pairs.empty()) return pairs;
  }
  return fail(ErrorCode::kUnavailable, "no common RDMA fabric: here {}; there {}", list(local),
              list(remote));
}

}  // namespace rekindle::transport::verbs
