#include "src/base/numa_nodes.h"

#include <algorithm>
#include <set>
#include <thread>

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/base/units.h"
#include "tests/support/process.h"
#include "tests/verbs/sysfs_tree.h"

namespace rekindle {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

class NumaNodesTest : public ::testing::Test {
 protected:
  std::vector<NumaNode> read() const { return read_numa_nodes(tree_.root()); }

  rekindle::testing::TempDir dir_;
  rekindle::testing::SysfsTree tree_{dir_.path()};
};

TEST_F(NumaNodesTest, AreThoseOfTheKernel) {
  tree_.node(1, "2-3,6-7", "21 10 80");
  tree_.node(0, "0-1,4-5", "10 21 80");
  tree_.node(10, "", "80 80 10");  // memory of a GPU
  tree_.memory("0-1,10");
  std::filesystem::create_directories(tree_.root() / "devices/system/node/nodes");
  std::filesystem::create_directories(tree_.root() / "devices/system/node/node");
  std::filesystem::create_directories(tree_.root() / "devices/system/node/node5x");
  const auto nodes = read();
  ASSERT_EQ(nodes.size(), 3u);
  EXPECT_EQ(nodes[0].id, 0);
  EXPECT_THAT(nodes[0].cpus, ElementsAre(0, 1, 4, 5));
  EXPECT_TRUE(nodes[0].has_memory);
  EXPECT_THAT(nodes[0].distances, ElementsAre(Pair(0, 10), Pair(1, 21), Pair(10, 80)));
  EXPECT_EQ(nodes[1].id, 1);
  EXPECT_THAT(nodes[1].cpus, ElementsAre(2, 3, 6, 7));
  EXPECT_EQ(nodes[2].id, 10);
  EXPECT_THAT(nodes[2].cpus, IsEmpty());
  EXPECT_TRUE(nodes[2].has_memory);
}

TEST_F(NumaNodesTest, WithoutSysfsThereAreNone) { EXPECT_THAT(read(), IsEmpty()); }

TEST_F(NumaNodesTest, AListThatIsNoneNamesNoMemory) {
  tree_.node(0, "0-3", "10");
  for (const char* text : {"", "x", "1-", "-1", "3-1", "0,", "0-99999", "0 1"}) {
    tree_.memory(text);
    ASSERT_EQ(read().size(), 1u);
    EXPECT_FALSE(read()[0].has_memory) << text;
  }
}

TEST(NumaNodes, NumbersAreListedAsTheKernelListsThem) {
  EXPECT_EQ(number_list({}), "");
  EXPECT_EQ(number_list(std::vector<int>{3}), "3");
  EXPECT_EQ(number_list(std::vector<int>{0, 1, 2, 8, 10, 11}), "0-2, 8, 10-11");
}

TEST(NumaNodes, ACommonNodeIsThatOfAll) {
  EXPECT_EQ(common_node({}), -1);
  EXPECT_EQ(common_node(std::vector<int>{1, 1}), 1);
  EXPECT_EQ(common_node(std::vector<int>{0, 1}), -1);
  EXPECT_EQ(common_node(std::vector<int>{1, -1}), -1);
  EXPECT_EQ(common_node(std::vector<int>{-1, -1}), -1);
}

TEST(NumaNodes, AThreadKeepsToTheCpusThatItMayUse) {
  const auto allowed = allowed_cpus();
  ASSERT_FALSE(allowed.empty());
  std::thread([&] {
    keep_thread_to({});
    EXPECT_EQ(allowed_cpus(), allowed);
    keep_thread_to(std::vector<int>{65535});  // not here
    EXPECT_EQ(allowed_cpus(), allowed);
    keep_thread_to(std::vector<int>{allowed.back(), 65535});
    EXPECT_THAT(allowed_cpus(), ElementsAre(allowed.back()));
    // What a thread has given up, it does not take back.
    keep_thread_to(allowed);
    EXPECT_THAT(allowed_cpus(), ElementsAre(allowed.back()));
  }).join();
}

TEST(NumaNodes, SampledPagesAreNotThoseOfOneNodeOfInterleavedMemory) {
  EXPECT_THAT(sampled_pages(0), IsEmpty());
  EXPECT_THAT(sampled_pages(1), ::testing::Each(0u));
  for (const std::uint64_t bytes : {16 * kMiB, kGiB, 5 * kGiB}) {
    for (const std::uint64_t page_bytes : {kPageBytes, 2 * kMiB}) {
      for (const std::uint64_t nodes : {2u, 4u, 8u}) {
        std::set<std::uint64_t> seen;
        for (const std::uint64_t offset : sampled_pages(bytes)) {
          EXPECT_LT(offset, bytes);
          seen.insert(offset / page_bytes % nodes);
        }
        EXPECT_EQ(seen.size(), nodes) << bytes << " in pages of " << page_bytes;
      }
    }
  }
}

// Four pages, of which the first and the third are there.
class Pages {
 public:
  Pages()
      : bytes_(static_cast<std::byte*>(::mmap(nullptr, 4 * kPageBytes, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
               4 * kPageBytes) {
    ::madvise(bytes_.data(), bytes_.size(), MADV_NOHUGEPAGE);
    bytes_[0] = bytes_[2 * kPageBytes] = std::byte{1};
  }
  ~Pages() { ::munmap(bytes_.data(), bytes_.size()); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::span<const std::byte> bytes() const { return bytes_; }
  // The kernel tells this process where its pages are.
  bool may_look() const {
    void* page = bytes_.data();
    int node = -1;
    return ::syscall(SYS_move_pages, 0, 1ul, &page, nullptr, &node, 0) == 0;
  }

 private:
  std::span<std::byte> bytes_;
};

TEST(NumaNodes, PagesThatAreThereHaveANode) {
  const Pages pages;
  if (!pages.may_look()) GTEST_SKIP() << "move_pages is not allowed here";
  const auto nodes = nodes_of_pages(pages.bytes(), kPageBytes);
  ASSERT_EQ(nodes.size(), 4u);
  EXPECT_GE(nodes[0], 0);
  EXPECT_EQ(nodes[1], -1);
  EXPECT_GE(nodes[2], 0);
  EXPECT_EQ(nodes[3], -1);
  EXPECT_EQ(node_of_memory(pages.bytes()), -1) << "two are nowhere";
  EXPECT_EQ(node_of_memory(pages.bytes().first(kPageBytes)), nodes[0]);
  EXPECT_EQ(node_of_memory({}), -1);
  const auto here = usable_numa_nodes();
  if (here.size() == 1) {
    EXPECT_EQ(nodes[0], here[0].id);
  }
}

}  // namespace
}  // namespace rekindle
