// Memory that stays registered from one pull to the next, on real devices.
#include <algorithm>
#include <memory>
#include <optional>

#include "src/base/units.h"
#include "tests/rdma/rails.h"
#include "tests/store/store_fixture.h"
#include "tests/verbs/verbs_hosts.h"

namespace rekindle::transport::verbs {
namespace {

using testing::TestSegment;

constexpr std::uint64_t kFileBytes = 4 * kMiB;

FabricOptions only(const std::string& device) {
  FabricOptions options;
  options.hca = "=" + device;
  return options;
}

// The second file of the store is the first one again, at the same address. Other bytes are read
// into it through the registration of the first.
TEST(RdmaLandingMemory, AFileOfThePoolIsRegisteredOnceAndReadIntoTwice) {
  const auto rails = rekindle::testing::rdma_rails();
  if (rails.a.empty()) GTEST_SKIP() << "no RDMA device";
  const auto api = make_system_api();
  VerbsSource source(*api, only(rails.b.front()));
  VerbsPuller puller(*api, only(rails.a.front()));
  if (!puller.registrar().keeps_idle_memory()) GTEST_SKIP() << "pinned memory is limited here";
  const store::TempDirectory scratch;
  const auto store = store::open_store(scratch.path() / "store", 1 << 30, std::nullopt);

  const std::byte* address = nullptr;
  std::uint64_t pieces = 0;
  for (const std::uint8_t seed : {std::uint8_t{1}, std::uint8_t{2}}) {
    const auto path = store->directory() / "staging" / "file";
    store::fs::create_directories(path.parent_path());
    auto segment = store->create_segment(path, kFileBytes);
    ASSERT_TRUE(segment) << segment.error().message();
    const auto memory = (*segment)->writable();
    auto used = puller.connector().use_memory(memory, (*segment)->life());
    // Bytes count from before their registration, pieces from its end.
    ASSERT_TRUE(testing::eventually([&] {
      const RegistrarStats stats = puller.registrar().stats();
      return stats.bytes == kFileBytes && stats.pieces > 0;
    }));
    if (address != nullptr) {
      EXPECT_EQ(memory.data(), address);
      EXPECT_EQ(puller.registrar().stats().pieces, pieces);
    }
    address = memory.data();
    pieces = puller.registrar().stats().pieces;

    const TestSegment remote(kFileBytes, seed);
    const RegionKey key = source.serve(remote);
    auto paths = puller.connect(source, source.admit({key}));
    ASSERT_TRUE(paths) << paths.error().message();
    const ReadOp op{.wr_id = 1, .remote = key, .local = memory.data(), .run_bytes = kFileBytes};
    EXPECT_EQ(testing::read_one(*paths->front(), op), OpStatus::kOk);
    EXPECT_TRUE(std::ranges::equal(memory, remote.bytes()));
    paths->clear();

    used.reset();
    segment->reset();
    ASSERT_TRUE(store->remove_segment(path));
    EXPECT_EQ(store->pooled_bytes(), kFileBytes);
    EXPECT_EQ(puller.registrar().stats().bytes, kFileBytes) << "the file in the pool is registered";
  }
  store->trim_pool(TimePoint());
  store->trim_pool(TimePoint() + std::chrono::hours(1));
  EXPECT_TRUE(testing::eventually([&] { return puller.registrar().stats().bytes == 0; }));
}

}  // namespace
}  // namespace rekindle::transport::verbs
