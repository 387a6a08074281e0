#include "src/store/numa.h"

#include <map>

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "src/store/segment_pool.h"
#include "tests/store/store_fixture.h"

namespace rekindle::store {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class NumaTest : public ::testing::Test {
 protected:
  // Nodes of a host, and nodes that are memory of GPUs.
  static std::vector<NumaNode> nodes(const std::vector<int>& with_cpus,
                                     const std::vector<int>& without = {}) {
    std::vector<NumaNode> nodes;
    for (const int id : with_cpus) nodes.push_back({id, {2 * id, 2 * id + 1}, true, {}});
    for (const int id : without) nodes.push_back({id, {}, true, {}});
    return nodes;
  }
  static constexpr NumaPolicy kInterleave{NumaPolicy::Kind::kInterleave, -1};

  TempDirectory temp_;
};

struct Policy {
  int mode = -1;
  std::array<unsigned long, 64> nodes{};
};

// Of the page at `at`; nullopt where such calls are forbidden.
std::optional<Policy> policy_at(const std::byte* at) {
  Policy policy;
  if (::syscall(SYS_get_mempolicy, &policy.mode, policy.nodes.data(), policy.nodes.size() * 64, at,
                static_cast<unsigned long>(MPOL_F_ADDR)) != 0) {
    return std::nullopt;
  }
  return policy;
}

bool may_place() {
  void* const page =
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  unsigned long node = 1;
  const long done = ::syscall(SYS_mbind, page, 4096ul, MPOL_INTERLEAVE, &node, 64ul, 0u);
  const bool seen = policy_at(static_cast<const std::byte*>(page)).has_value();
  ::munmap(page, 4096);
  return done == 0 && seen;
}

bool may_look() {
  int here = 0;
  void* page = &here;
  int node = -1;
  return ::syscall(SYS_move_pages, 0, 1ul, &page, nullptr, &node, 0) == 0;
}

TEST_F(NumaTest, PoliciesAreParsed) {
  EXPECT_EQ(*parse_numa("auto"), NumaPolicy());
  EXPECT_EQ(*parse_numa("interleave"), kInterleave);
  EXPECT_EQ(parse_numa("local")->kind, NumaPolicy::Kind::kLocal);
  EXPECT_EQ(*parse_numa("3"), (NumaPolicy{NumaPolicy::Kind::kNode, 3}));
  for (const char* text : {"", "near", "-1", "1x", "1,2", "99999999999", "4096"}) {
    const auto policy = parse_numa(text);
    ASSERT_FALSE(policy) << text;
    EXPECT_EQ(policy.error().code(), ErrorCode::kInvalid);
  }
}

TEST_F(NumaTest, OnlyNodesWithMemoryAreTaken) {
  const auto two = nodes({0, 1}, {8});
  NumaPlacement placement;
  ASSERT_TRUE(placement.choose(kInterleave, two));
  EXPECT_THAT(placement.nodes(), ElementsAre(0, 1));
  ASSERT_TRUE(placement.choose({NumaPolicy::Kind::kLocal, -1}, two));
  EXPECT_THAT(placement.nodes(), IsEmpty());
  ASSERT_TRUE(placement.choose({NumaPolicy::Kind::kNode, 8}, two));
  EXPECT_THAT(placement.nodes(), ElementsAre(8));
  const auto refused = placement.choose({NumaPolicy::Kind::kNode, 2}, two);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalid);
  EXPECT_THAT(refused.error().message(), HasSubstr("NUMA node 2 has no memory"));
  EXPECT_THAT(refused.error().message(), HasSubstr("0-1, 8"));
  // A cpuset excludes the memory of node 1.
  auto limited = two;
  limited[1].has_memory = false;
  ASSERT_TRUE(placement.choose(kInterleave, limited));
  EXPECT_THAT(placement.nodes(), IsEmpty());
  EXPECT_FALSE(placement.choose({NumaPolicy::Kind::kNode, 1}, limited));

  for (const auto& policy : {NumaPolicy{}, kInterleave, NumaPolicy{NumaPolicy::Kind::kNode, 0}}) {
    ASSERT_TRUE(placement.choose(policy, nodes({0})));
    EXPECT_THAT(placement.nodes(), IsEmpty());  // nothing to choose
    EXPECT_EQ(placement.node_for(0), -1);
  }
}

TEST_F(NumaTest, AutoFollowsThePreferenceElseTheNicsElseInterleaves) {
  const auto two = nodes({0, 1}, {8});
  NumaPlacement placement;
  ASSERT_TRUE(placement.choose({}, two));
  EXPECT_THAT(placement.nodes(), ElementsAre(0, 1));
  EXPECT_EQ(placement.node_for(-1), -1);
  EXPECT_EQ(placement.node_for(0), 0);
  EXPECT_EQ(placement.node_for(1), 1);
  EXPECT_EQ(placement.node_for(8), -1) << "memory of a GPU";
  EXPECT_EQ(placement.node_for(5), -1) << "not here";
  // All NICs are on node 1.
  ASSERT_TRUE(placement.choose({NumaPolicy::Kind::kAuto, 1}, two));
  EXPECT_EQ(placement.node_for(-1), 1);
  EXPECT_EQ(placement.node_for(0), 0);
  ASSERT_TRUE(placement.choose({NumaPolicy::Kind::kAuto, 8}, two));
  EXPECT_THAT(placement.nodes(), ElementsAre(0, 1));
  // The other policies say it all.
  ASSERT_TRUE(placement.choose(kInterleave, two));
  EXPECT_EQ(placement.node_for(1), -1);
  ASSERT_TRUE(placement.choose({NumaPolicy::Kind::kNode, 0}, two));
  EXPECT_EQ(placement.node_for(1), 0);
}

TEST_F(NumaTest, AReserveTakesTheNodesInTurn) {
  NumaPlacement placement;
  ASSERT_TRUE(placement.choose({}, nodes({0, 2}, {8})));
  std::map<int, int> files;
  for (std::uint64_t number = 1; number <= 10; ++number) {
    ++files[placement.preferred_in_turn(number)];
  }
  EXPECT_EQ(files, (std::map<int, int>{{0, 5}, {2, 5}}));
  ASSERT_TRUE(placement.choose(kInterleave, nodes({0, 2})));
  EXPECT_EQ(placement.preferred_in_turn(1), -1);
}

// The kernel leaves out nodes that this host lacks: node 0 is the one that is left.
TEST_F(NumaTest, AFilesPolicyHoldsForEveryMappingOfIt) {
  if (!may_place()) GTEST_SKIP() << "mbind is not allowed here";
  NumaPlacement placement;
  ASSERT_TRUE(placement.choose({}, nodes({0, 1})));
  const fs::path path = temp_.path() / "a.safetensors";
  const auto made = MappedSegment::create(path, 64 << 10, placement);
  ASSERT_TRUE(made) << made.error().message();
  const auto other = MappedSegment::open_read(path, 64 << 10);
  ASSERT_TRUE(other) << other.error().message();
  for (const auto* segment : {made->get(), other->get()}) {
    for (const std::size_t at : {std::size_t{0}, std::size_t{32} << 10}) {
      const auto policy = policy_at(segment->bytes().data() + at);
      ASSERT_TRUE(policy);
      EXPECT_EQ(policy->mode, MPOL_INTERLEAVE);
      EXPECT_EQ(policy->nodes[0] & 1, 1u);
    }
  }
  const auto plain = MappedSegment::create(temp_.path() / "b.safetensors", 64 << 10);
  ASSERT_TRUE(plain);
  EXPECT_EQ(policy_at((*plain)->bytes().data())->mode, MPOL_DEFAULT);
}

TEST_F(NumaTest, AFileOfAPreferredNodeHasItsPolicy) {
  if (!may_place()) GTEST_SKIP() << "mbind is not allowed here";
  NumaPlacement placement;
  ASSERT_TRUE(placement.choose({}, nodes({0, 1})));
  const auto made =
      MappedSegment::create(temp_.path() / "a.safetensors", 64 << 10, placement, {0, false});
  ASSERT_TRUE(made) << made.error().message();
  const auto policy = policy_at((*made)->bytes().data());
  ASSERT_TRUE(policy);
  EXPECT_EQ(policy->mode, MPOL_PREFERRED);
  EXPECT_EQ(policy->nodes[0], 1u);
}

// On a host with one node every page is there. On others the preferred node has them.
TEST_F(NumaTest, PagesOfASegmentAreOnItsNode) {
  if (!may_place() || !may_look()) GTEST_SKIP() << "mbind or move_pages is not allowed here";
  const auto here = usable_numa_nodes();
  if (here.empty()) GTEST_SKIP() << "no sysfs";
  NumaPlacement placement;
  ASSERT_TRUE(placement.choose({}, here));
  for (const NumaNode& node : here) {
    if (node.cpus.empty() || !node.has_memory) continue;
    const auto made = MappedSegment::create(temp_.path() / fmt::format("{}.safetensors", node.id),
                                            1 << 20, placement, {node.id, false});
    ASSERT_TRUE(made) << made.error().message();
    const auto pages = nodes_of_pages((*made)->bytes(), 4096);
    ASSERT_EQ(pages.size(), 256u);
    EXPECT_THAT(pages, Each(node.id));
    EXPECT_EQ((*made)->numa_node(), node.id);
  }
}

TEST_F(NumaTest, APreferenceCountsForItsFileAlsoIfItsPagesComeLater) {
  if (!may_place()) GTEST_SKIP() << "mbind is not allowed here";
  auto placement = std::make_unique<NumaPlacement>();
  ASSERT_TRUE(placement->choose({}, nodes({0, 1})));
  for (const char* name : {"pool", "a"}) fs::create_directory(temp_.path() / name);
  SegmentPool pool(temp_.path() / "pool", 0, 0, std::move(placement));
  const auto made = [&](const fs::path& file, MappedSegment::NewPages pages) {
    auto segment = pool.create(temp_.path() / file, 64 << 10, 0, pages);
    EXPECT_TRUE(segment) << segment.error().message();
    return segment ? *segment : nullptr;
  };
  const auto mode_of = [&](const MappedSegment& segment) {
    return policy_at(segment.bytes().data())->mode;
  };
  EXPECT_EQ(mode_of(*made("a/1", {.preferred_node = 0})), MPOL_PREFERRED);
  EXPECT_EQ(mode_of(*made("a/2", {})), MPOL_INTERLEAVE);
  const auto later = made("a/3", {.preferred_node = 0, .later = true});
  EXPECT_EQ(mode_of(*later), MPOL_PREFERRED);
  EXPECT_EQ(later->numa_node(), 0);
}

TEST_F(NumaTest, AFileIsMadeWhereTheKernelRefuses) {
  NumaPlacement placement;
  ASSERT_TRUE(placement.choose({}, nodes({1022, 1023})));  // none of them is here
  for (const char* name : {"a.safetensors", "b.safetensors"}) {
    const auto made = MappedSegment::create(temp_.path() / name, 64 << 10, placement);
    ASSERT_TRUE(made) << made.error().message();
    std::memset((*made)->writable().data(), 7, 64 << 10);
  }
}

TEST_F(NumaTest, AStoreIsNotOpenedForANodeThatIsNotHere) {
  StoreOptions options;
  options.directory = temp_.path() / "store";
  options.numa = {NumaPolicy::Kind::kNode, 4095};
  const auto opened = SegmentStore::open(options);
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code(), ErrorCode::kInvalid);
  EXPECT_FALSE(fs::exists(options.directory));
}

}  // namespace
}  // namespace rekindle::store
