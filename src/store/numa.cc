#include "src/store/numa.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <climits>
#include <fstream>
#include <functional>
#include <optional>

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "src/base/log.h"
#include "src/base/units.h"

namespace rekindle::store {

namespace {

constexpr int kMostNodes = 4096;
constexpr std::size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
using NodeMask = std::array<unsigned long, kMostNodes / kWordBits>;

void set(NodeMask& mask, int node) {
  const auto at = static_cast<std::size_t>(node);
  mask[at / kWordBits] |= 1ul << (at % kWordBits);
}

bool test(const NodeMask& mask, int node) {
  const auto at = static_cast<std::size_t>(node);
  return (mask[at / kWordBits] >> (at % kWordBits) & 1ul) != 0;
}

std::vector<int> read_nodes(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  if (!file || !std::getline(file, line)) return {};
  line.erase(line.find_last_not_of(" \t\r\n") + 1);
  std::vector<int> nodes = parse_number_list(line, kMostNodes);
  // They are looked for by bisection.
  const bool ascending = std::ranges::adjacent_find(nodes, std::greater_equal()) == nodes.end();
  return ascending ? nodes : std::vector<int>();
}

std::optional<NodeMask> allowed_nodes() {
  NodeMask mask{};
  const long done =
      ::syscall(SYS_get_mempolicy, nullptr, mask.data(), static_cast<unsigned long>(kMostNodes),
                nullptr, static_cast<unsigned long>(MPOL_F_MEMS_ALLOWED));
  if (done != 0) return std::nullopt;
  return mask;
}

}  // namespace

Result<NumaPolicy> parse_numa(std::string_view text) {
  if (text == "interleave") return NumaPolicy{};
  if (text == "local") return NumaPolicy{NumaPolicy::Kind::kLocal, 0};
  int node = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), node);
  if (error != std::errc() || end != text.data() + text.size() || node < 0 || node >= kMostNodes) {
    return fail(ErrorCode::kInvalid, "'{}' is not interleave, local or the number of a node", text);
  }
  return NumaPolicy{NumaPolicy::Kind::kNode, node};
}

MemoryNodes read_memory_nodes(const std::filesystem::path& sysfs) {
  const auto base = sysfs / "devices/system/node";
  MemoryNodes nodes;
  nodes.all = read_nodes(base / "has_memory");
  std::ranges::set_intersection(nodes.all, read_nodes(base / "has_cpu"),
                                std::back_inserter(nodes.with_cpus));
  return nodes;
}

MemoryNodes usable_memory_nodes() {
  MemoryNodes nodes = read_memory_nodes("/sys");
  if (const auto allowed = allowed_nodes()) {
    const auto is_denied = [&](int node) { return !test(*allowed, node); };
    std::erase_if(nodes.all, is_denied);
    std::erase_if(nodes.with_cpus, is_denied);
  }
  return nodes;
}

std::string node_list(std::span<const int> nodes) {
  std::string text;
  for (std::size_t i = 0; i < nodes.size();) {
    std::size_t last = i;
    while (last + 1 < nodes.size() && nodes[last + 1] == nodes[last] + 1) ++last;
    if (!text.empty()) text += ", ";
    text += last == i ? fmt::format("{}", nodes[i]) : fmt::format("{}-{}", nodes[i], nodes[last]);
    i = last + 1;
  }
  return text;
}

Result<void> NumaPlacement::choose(const NumaPolicy& policy, const MemoryNodes& nodes) {
  nodes_.clear();
  if (policy.kind == NumaPolicy::Kind::kNode) {
    if (!std::ranges::binary_search(nodes.all, policy.node)) {
      return fail(ErrorCode::kInvalid, "NUMA node {} has no memory for this process: use {}",
                  policy.node, nodes.all.empty() ? "interleave or local" : node_list(nodes.all));
    }
    mode_ = MPOL_PREFERRED;  // a full node must not end the process
    if (nodes.all.size() > 1) nodes_ = {policy.node};
  } else if (policy.kind == NumaPolicy::Kind::kInterleave && nodes.with_cpus.size() > 1) {
    mode_ = MPOL_INTERLEAVE;
    nodes_ = nodes.with_cpus;
  }
  return {};
}

void NumaPlacement::apply(std::span<std::byte> mapping) const {
  if (nodes_.empty() || mapping.empty()) return;
  NodeMask mask{};
  for (const int node : nodes_) set(mask, node);
  // The kernel reads one bit less than this number.
  const long done = ::syscall(SYS_mbind, mapping.data(), mapping.size(), mode_, mask.data(),
                              static_cast<unsigned long>(kMostNodes) + 1, 0u);
  if (done == 0 || refused_.exchange(true)) return;
  log::warn("store.numa", "nodes", node_list(nodes_), "error", errno_error(errno, "mbind"),
            "action", "pages lie where they are touched first", "hint",
            "a container needs the system call mbind (CAP_SYS_NICE in Docker's profile)");
}

}  // namespace rekindle::store
