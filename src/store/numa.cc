#include "src/store/numa.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <climits>
#include <string>

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "src/base/log.h"

namespace rekindle::store {

namespace {

constexpr int kMostNodes = 4096;
constexpr std::size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
using NodeMask = std::array<unsigned long, kMostNodes / kWordBits>;

void set(NodeMask& mask, int node) {
  const auto at = static_cast<std::size_t>(node);
  mask[at / kWordBits] |= 1ul << (at % kWordBits);
}

bool contains(std::span<const int> nodes, int node) {
  return std::ranges::find(nodes, node) != nodes.end();
}

}  // namespace

Result<NumaPolicy> parse_numa(std::string_view text) {
  using Kind = NumaPolicy::Kind;
  if (text == "auto") return NumaPolicy{};
  if (text == "interleave") return NumaPolicy{Kind::kInterleave, -1};
  if (text == "local") return NumaPolicy{Kind::kLocal, -1};
  int node = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), node);
  if (error != std::errc() || end != text.data() + text.size() || node < 0 || node >= kMostNodes) {
    return fail(ErrorCode::kInvalid, "'{}' is not auto, interleave, local or the number of a node",
                text);
  }
  return NumaPolicy{Kind::kNode, node};
}

Result<void> NumaPlacement::choose(const NumaPolicy& policy, std::span<const NumaNode> nodes) {
  using Kind = NumaPolicy::Kind;
  std::vector<int> with_memory;
  std::vector<int> of_host;  // not memory of GPUs or CXL
  for (const NumaNode& node : nodes) {
    if (!node.has_memory) continue;
    with_memory.push_back(node.id);
    if (!node.cpus.empty()) of_host.push_back(node.id);
  }
  nodes_.clear();
  possible_.clear();
  if (policy.kind == Kind::kNode) {
    if (!contains(with_memory, policy.node)) {
      return fail(ErrorCode::kInvalid, "NUMA node {} has no memory for this process: use {}",
                  policy.node, with_memory.empty() ? "auto or local" : number_list(with_memory));
    }
    if (with_memory.size() > 1) nodes_ = {policy.node};
  } else if (policy.kind != Kind::kLocal && of_host.size() > 1) {
    const bool automatic = policy.kind == Kind::kAuto;
    if (automatic) possible_ = of_host;
    nodes_ = automatic && contains(of_host, policy.node) ? std::vector{policy.node} : of_host;
  }
  return {};
}

int NumaPlacement::node_for(int preferred) const {
  return contains(possible_, preferred) ? preferred : common_node(nodes_);
}

int NumaPlacement::preferred_in_turn(std::uint64_t number) const {
  return possible_.empty() ? -1 : possible_[number % possible_.size()];
}

bool NumaPlacement::apply(std::span<std::byte> mapping, int preferred_node) const {
  if (nodes_.empty() || mapping.empty()) return false;
  const int one = node_for(preferred_node);
  const std::vector<int> nodes = one >= 0 ? std::vector{one} : nodes_;
  // A full node must not end the process, so one node is only preferred.
  const int mode = one >= 0 ? MPOL_PREFERRED : MPOL_INTERLEAVE;
  NodeMask mask{};
  for (const int node : nodes) set(mask, node);
  // The kernel reads one bit less than this number.
  const long done = ::syscall(SYS_mbind, mapping.data(), mapping.size(), mode, mask.data(),
                              static_cast<unsigned long>(kMostNodes) + 1, 0u);
  if (done == 0) return true;
  if (refused_.exchange(true)) return false;
  log::warn("store.numa", "nodes", number_list(nodes), "error", errno_error(errno, "mbind"),
            "action", "pages lie where they are touched first", "hint",
            "a container needs the system call mbind (CAP_SYS_NICE in Docker's profile)");
  return false;
}

}  // namespace rekindle::store
