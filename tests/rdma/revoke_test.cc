// Taking rights away while they are used: real queue pairs, real windows.
#include <atomic>
#include <thread>

#include "src/base/units.h"
#include "tests/rdma/rails.h"
#include "tests/verbs/verbs_hosts.h"

namespace rekindle::transport::verbs {
namespace {

using testing::TestSegment;

constexpr std::uint64_t kBytes = 256 * kKiB;

class RdmaRevoke : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto rails = rekindle::testing::rdma_rails();
    if (rails.a.empty()) GTEST_SKIP() << "no RDMA device";
    api_ = make_system_api();
    source_ = std::make_unique<VerbsSource>(*api_, only(rails.b.front()));
    puller_ = std::make_unique<VerbsPuller>(*api_, only(rails.a.front()));
  }
  static FabricOptions only(const std::string& device) {
    FabricOptions options;
    options.hca = "=" + device;
    return options;
  }
  std::unique_ptr<Path> connect(const SessionToken& token) {
    auto paths = puller_->connect(*source_, token);
    if (paths) return std::move(paths->front());
    ADD_FAILURE() << paths.error().message();
    return nullptr;
  }

  std::unique_ptr<Api> api_;
  std::unique_ptr<VerbsSource> source_;
  std::unique_ptr<VerbsPuller> puller_;
};

// Overwriting a segment in place: first its readers lose their rights, then the bytes change. No
// read that is reported good has seen a new byte, and other pullers notice nothing.
TEST_F(RdmaRevoke, AnUpdateInPlaceAfterARevokeIsNeverSeenByAReader) {
  const TestSegment bystanders(kBytes, 1);
  TestSegment updated(kBytes, 2);
  const RegionKey other = source_->serve(bystanders);
  const RegionKey key = source_->serve(updated);
  const SessionToken steady = source_->admit({other});
  const auto bystander = connect(steady);
  ASSERT_NE(bystander, nullptr);
  std::vector<std::byte> landing(kBytes);
  for (int round = 0; round < 5; ++round) {
    const SessionToken doomed = source_->admit({key});
    const auto reader = connect(doomed);
    ASSERT_NE(reader, nullptr);
    const std::vector<std::byte> before(updated.bytes().begin(), updated.bytes().end());
    std::atomic<std::uint64_t> good = 0;
    std::atomic<bool> torn = false;
    std::thread pulling([&] {
      while (true) {
        const ReadOp op{.wr_id = 1, .remote = key, .local = landing.data(), .run_bytes = kBytes};
        const auto taken = reader->post({&op, 1});
        if (!taken) return;
        const auto done = testing::drain(*reader);
        if (done.empty() || done.front().status != OpStatus::kOk) return;
        if (std::memcmp(landing.data(), before.data(), kBytes) != 0) torn = true;
        ++good;
      }
    });
    EXPECT_TRUE(testing::eventually([&] { return good >= 3; }));
    source_->revoke(doomed);
    const auto fresh = static_cast<std::uint8_t>(0xa0 + round);
    std::memset(const_cast<std::byte*>(updated.bytes().data()), fresh, kBytes);
    pulling.join();  // its reads fail, or it would go on for ever
    EXPECT_FALSE(torn) << "a read that was reported good mixes old and new bytes";
    reader->abort();
    EXPECT_FALSE(puller_->connect(*source_, doomed));

    std::vector<std::byte> untouched(kBytes);
    const ReadOp op{.wr_id = 2, .remote = other, .local = untouched.data(), .run_bytes = kBytes};
    ASSERT_EQ(testing::read_one(*bystander, op), OpStatus::kOk);
    EXPECT_EQ(std::memcmp(untouched.data(), bystanders.bytes().data(), kBytes), 0);
  }
}

// A region that goes ends its readers by itself, whoever they are, before it is deregistered.
TEST_F(RdmaRevoke, ARegionThatIsRemovedIsReadNoMore) {
  const TestSegment segment(kBytes, 3);
  const RegionKey key = source_->serve(segment);
  const SessionToken token = source_->admit({key});
  const auto path = connect(token);
  ASSERT_NE(path, nullptr);
  std::vector<std::byte> landing(kBytes);
  const ReadOp op{.wr_id = 1, .remote = key, .local = landing.data(), .run_bytes = kBytes};
  ASSERT_EQ(testing::read_one(*path, op), OpStatus::kOk);
  source_->registry().remove(key);
  EXPECT_TRUE(testing::eventually([&] { return source_->server()->link_count() == 0; }));
  if (path->post({&op, 1})) {
    const auto done = testing::drain(*path);
    ASSERT_EQ(done.size(), 1u);
    EXPECT_NE(done.front().status, OpStatus::kOk);
  }
  path->abort();
}

}  // namespace
}  // namespace rekindle::transport::verbs
