#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

// The NUMA nodes of this host: their CPUs and their memory, as the kernel lists them, and what this
// process may use of them. The number -1 stands for a node that is unknown, and for several nodes.
namespace rekindle {

struct NumaNode {
  int id = 0;
  std::vector<int> cpus;  // ascending; none: memory of a GPU, or CXL memory
  bool has_memory = false;
  std::map<int, int> distances;  // to other nodes, 10 = itself
};

// By the directory that stands for /sys, ascending. Empty: it lists none.
std::vector<NumaNode> read_numa_nodes(const std::filesystem::path& sysfs);
// Those of this host. Memory that the cpuset of this process excludes does not count.
std::vector<NumaNode> usable_numa_nodes();

// Parses "0-3,8" and sorts. Empty: the text is no list of CPUs below 65536.
std::vector<int> parse_cpu_list(std::string_view text);
// "0-1, 4", of ascending numbers.
std::string number_list(std::span<const int> numbers);

// The CPUs that the calling thread may use, ascending: its cpuset and its affinity. Threads that it
// starts inherit them. Empty: the kernel does not tell.
std::vector<int> allowed_cpus();
// Keeps the calling thread to those of `cpus` that it may use. Without any of them, and where the
// kernel refuses, it stays where it was.
void keep_thread_to(std::span<const int> cpus);

// The number that all of these are. -1: they differ, one of them is -1, or there are none.
int common_node(std::span<const int> nodes);
// The node of the page at each multiple of `step`. -1: unknown, or the page is not faulted in.
std::vector<int> nodes_of_pages(std::span<const std::byte> memory, std::uint64_t step);
// The node that all of this memory lies on, as far as 64 of its pages tell.
int node_of_memory(std::span<const std::byte> memory);
// The offsets of those pages. They are irregular: pages of interleaved memory change their node at
// regular steps.
std::vector<std::uint64_t> sampled_pages(std::uint64_t bytes);

}  // namespace rekindle
