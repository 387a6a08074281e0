#include "src/base/numa_nodes.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <climits>
#include <fstream>
#include <optional>
#include <random>
#include <sstream>
#include <system_error>

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fmt/format.h>

#include "src/base/units.h"

namespace rekindle {

namespace {

constexpr int kMostNodes = 4096;
constexpr int kMostCpus = 65536;
constexpr std::size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
template <int kMost>
using Mask = std::array<unsigned long, static_cast<std::size_t>(kMost) / kWordBits>;

template <std::size_t kWords>
bool test(const std::array<unsigned long, kWords>& mask, int number) {
  const auto at = static_cast<std::size_t>(number);
  return (mask[at / kWordBits] >> (at % kWordBits) & 1ul) != 0;
}

std::string first_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  if (!file || !std::getline(file, line)) return {};
  line.erase(line.find_last_not_of(" \t\r\n") + 1);
  return line;
}

// The N of "nodeN".
std::optional<int> number_of(const std::string& name) {
  constexpr std::string_view kPrefix = "node";
  int number = -1;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const char* const last = name.data() + name.size();
  const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), last, number);
  const bool good = error == std::errc() && end == last && number >= 0 && number < kMostNodes;
  return good ? std::optional(number) : std::nullopt;
}

std::vector<int> list_nodes(const std::filesystem::path& base) {
  std::vector<int> numbers;
  std::error_code error;
  for (std::filesystem::directory_iterator it(base, error), end; !error && it != end;
       it.increment(error)) {
    if (const auto number = number_of(it->path().filename().string())) numbers.push_back(*number);
  }
  std::ranges::sort(numbers);
  return numbers;
}

std::optional<Mask<kMostNodes>> allowed_memory() {
  Mask<kMostNodes> mask{};
  const long done =
      ::syscall(SYS_get_mempolicy, nullptr, mask.data(), static_cast<unsigned long>(kMostNodes),
                nullptr, static_cast<unsigned long>(MPOL_F_MEMS_ALLOWED));
  if (done != 0) return std::nullopt;
  return mask;
}

// For one page, where move_pages is forbidden: Docker allows this call with CAP_SYS_NICE.
int node_of_page(void* address) {
  int node = -1;
  const long done = ::syscall(SYS_get_mempolicy, &node, nullptr, 0ul, address,
                              static_cast<unsigned long>(MPOL_F_NODE | MPOL_F_ADDR));
  return done == 0 ? node : -1;
}

std::vector<int> nodes_at(std::span<const std::byte> memory,
                          std::span<const std::uint64_t> offsets) {
  std::vector<void*> addresses;
  for (const std::uint64_t offset : offsets) {
    addresses.push_back(const_cast<std::byte*>(memory.data()) + offset);  // NOLINT: for the kernel
  }
  std::vector<int> nodes(addresses.size(), -1);
  if (::syscall(SYS_move_pages, 0, addresses.size(), addresses.data(), nullptr, nodes.data(), 0) ==
      0) {
    for (int& node : nodes) node = std::max(node, -1);  // negative: errno
    return nodes;
  }
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    nodes[i] = node_of_page(addresses[i]);
    if (nodes[i] < 0) break;  // forbidden, too
  }
  return nodes;
}

}  // namespace

std::vector<NumaNode> read_numa_nodes(const std::filesystem::path& sysfs) {
  const auto base = sysfs / "devices/system/node";
  const std::vector<int> with_memory =
      parse_number_list(first_line(base / "has_memory"), kMostNodes);
  std::vector<NumaNode> nodes;
  for (const int id : list_nodes(base)) {
    const std::string directory = fmt::format("node{}", id);
    nodes.push_back({id,
                     parse_cpu_list(first_line(base / directory / "cpulist")),
                     std::ranges::find(with_memory, id) != with_memory.end(),
                     {}});
  }
  for (NumaNode& node : nodes) {  // "10 21": to every node, in order
    std::istringstream text(first_line(base / fmt::format("node{}", node.id) / "distance"));
    int value = 0;
    for (const NumaNode& other : nodes) {
      if (text >> value) node.distances[other.id] = value;
    }
  }
  return nodes;
}

std::vector<NumaNode> usable_numa_nodes() {
  std::vector<NumaNode> nodes = read_numa_nodes("/sys");
  if (const auto allowed = allowed_memory()) {
    for (NumaNode& node : nodes) node.has_memory = node.has_memory && test(*allowed, node.id);
  }
  return nodes;
}

std::vector<int> parse_cpu_list(std::string_view text) {
  std::vector<int> cpus = parse_number_list(text, kMostCpus);
  std::ranges::sort(cpus);
  cpus.erase(std::ranges::unique(cpus).begin(), cpus.end());
  return cpus;
}

std::string number_list(std::span<const int> numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    if (!text.empty()) text += ", ";
    text +=
        last == i ? fmt::format("{}", numbers[i]) : fmt::format("{}-{}", numbers[i], numbers[last]);
    i = last + 1;
  }
  return text;
}

std::vector<int> allowed_cpus() {
  Mask<kMostCpus> mask{};
  if (::syscall(SYS_sched_getaffinity, 0, sizeof mask, mask.data()) < 0) return {};
  std::vector<int> cpus;
  for (int cpu = 0; cpu < kMostCpus; ++cpu) {
    if (test(mask, cpu)) cpus.push_back(cpu);
  }
  return cpus;
}

void keep_thread_to(std::span<const int> cpus) {
  Mask<kMostCpus> mask{};
  bool any = false;
  for (const int cpu : allowed_cpus()) {
    if (std::ranges::find(cpus, cpu) == cpus.end()) continue;
    const auto at = static_cast<std::size_t>(cpu);
    mask[at / kWordBits] |= 1ul << (at % kWordBits);
    any = true;
  }
  if (any) (void)::syscall(SYS_sched_setaffinity, 0, sizeof mask, mask.data());
}

int common_node(std::span<const int> nodes) {
  if (nodes.empty()) return -1;
  const bool alike = std::ranges::all_of(nodes, [&](int node) { return node == nodes.front(); });
  return alike && nodes.front() >= 0 ? nodes.front() : -1;
}

std::vector<int> nodes_of_pages(std::span<const std::byte> memory, std::uint64_t step) {
  std::vector<std::uint64_t> offsets;
  for (std::uint64_t at = 0; at < memory.size(); at += step) offsets.push_back(at);
  return nodes_at(memory, offsets);
}

int node_of_memory(std::span<const std::byte> memory) {
  return common_node(nodes_at(memory, sampled_pages(memory.size())));
}

std::vector<std::uint64_t> sampled_pages(std::uint64_t bytes) {
  constexpr std::size_t kSamples = 64;
  const std::uint64_t pages = round_up(bytes, kPageBytes) / kPageBytes;
  std::vector<std::uint64_t> offsets;
  std::mt19937_64 random(1);  // the same pages each time
  for (std::size_t i = 0; i < kSamples && pages > 0; ++i) {
    offsets.push_back(random() % pages * kPageBytes);
  }
  return offsets;
}

}  // namespace rekindle
