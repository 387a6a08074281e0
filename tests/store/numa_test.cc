#include "src/store/numa.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "tests/store/store_fixture.h"

namespace rekindle::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class NumaTest : public ::testing::Test {
 protected:
  void nodes(const std::string& with_memory, const std::string& with_cpus) {
    const fs::path base = temp_.path() / "devices/system/node";
    fs::create_directories(base);
    write_bytes(base / "has_memory", with_memory + "\n");
    write_bytes(base / "has_cpu", with_cpus + "\n");
  }
  MemoryNodes read() const { return read_memory_nodes(temp_.path()); }

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

TEST_F(NumaTest, PoliciesAreParsed) {
  EXPECT_EQ(*parse_numa("interleave"), NumaPolicy());
  EXPECT_EQ(parse_numa("local")->kind, NumaPolicy::Kind::kLocal);
  EXPECT_EQ(*parse_numa("3"), (NumaPolicy{NumaPolicy::Kind::kNode, 3}));
  for (const char* text : {"", "near", "-1", "1x", "1,2", "99999999999", "4096"}) {
    const auto policy = parse_numa(text);
    ASSERT_FALSE(policy) << text;
    EXPECT_EQ(policy.error().code(), ErrorCode::kInvalid);
  }
}

TEST_F(NumaTest, NodesAreThoseOfTheKernel) {
  EXPECT_THAT(read().all, IsEmpty());
  nodes("0-1,8-9", "0-1");  // 8 and 9: memory of GPUs
  EXPECT_THAT(read().all, ElementsAre(0, 1, 8, 9));
  EXPECT_THAT(read().with_cpus, ElementsAre(0, 1));
  EXPECT_EQ(node_list(read().all), "0-1, 8-9");
  nodes("0,2", "0-3");
  EXPECT_THAT(read().with_cpus, ElementsAre(0, 2));
  for (const char* text : {"", "x", "1-", "-1", "3-1", "0,", "0-99999", "1,0", "0 1"}) {
    nodes(text, "0");
    EXPECT_THAT(read().all, IsEmpty()) << text;
  }
}

TEST_F(NumaTest, OnlyNodesWithMemoryAreTaken) {
  nodes("0-1,8", "0-1");
  NumaPlacement placement;
  ASSERT_TRUE(placement.choose({}, read()));
  EXPECT_THAT(placement.nodes(), ElementsAre(0, 1));
  ASSERT_TRUE(placement.choose({NumaPolicy::Kind::kLocal, 0}, read()));
  EXPECT_THAT(placement.nodes(), IsEmpty());
  ASSERT_TRUE(placement.choose({NumaPolicy::Kind::kNode, 8}, read()));
  EXPECT_THAT(placement.nodes(), ElementsAre(8));
  const auto refused = placement.choose({NumaPolicy::Kind::kNode, 2}, read());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalid);
  EXPECT_THAT(refused.error().message(), HasSubstr("NUMA node 2 has no memory"));
  EXPECT_THAT(refused.error().message(), HasSubstr("0-1, 8"));

  nodes("0", "0");
  ASSERT_TRUE(placement.choose({}, read()));
  EXPECT_THAT(placement.nodes(), IsEmpty());  // nothing to choose
  ASSERT_TRUE(placement.choose({NumaPolicy::Kind::kNode, 0}, read()));
  EXPECT_THAT(placement.nodes(), IsEmpty());
}

// The kernel leaves out nodes that this host lacks: node 0 is the one that is left.
TEST_F(NumaTest, AFilesPolicyHoldsForEveryMappingOfIt) {
  if (!may_place()) GTEST_SKIP() << "mbind is not allowed here";
  nodes("0-1", "0-1");
  NumaPlacement placement;
  ASSERT_TRUE(placement.choose({}, read()));
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

TEST_F(NumaTest, AFileIsMadeWhereTheKernelRefuses) {
  nodes("1022-1023", "1022-1023");  // none of them is here
  NumaPlacement placement;
  ASSERT_TRUE(placement.choose({}, read()));
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
