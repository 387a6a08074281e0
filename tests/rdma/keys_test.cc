// The key of one puller in the hands of another: the device decides what it opens.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "src/base/units.h"
#include "tests/rdma/rails.h"
#include "tests/rdma/windowless.h"
#include "tests/verbs/raw_puller.h"
#include "tests/verbs/verbs_hosts.h"

namespace rekindle::transport::verbs {
namespace {

using testing::TestSegment;

constexpr std::uint64_t kModelBytes = 256 * kKiB;
constexpr std::uint32_t kReadBytes = 4096;

struct Serving {
  std::string name;
  bool windows = true;
  bool staged = false;
};

class RdmaKeys : public ::testing::TestWithParam<Serving> {
 protected:
  // A session of one puller, which may read one model, and what its key opens.
  struct Link {
    std::unique_ptr<RawPuller> puller;
    std::uint64_t address = 0;
    std::uint32_t key = 0;
  };

  void SetUp() override {
    const auto rails = rekindle::testing::rdma_rails();
    if (rails.a.empty()) GTEST_SKIP() << "no RDMA device";
    near_.hca = "=" + rails.a.front();
    FabricOptions far;
    far.hca = "=" + rails.b.front();
    RegistrarOptions registrar;
    if (GetParam().windows && GetParam().staged) registrar.max_bytes_per_device = 4096;
    VerbsServerOptions server;
    server.registration_patience = std::chrono::seconds(30);
    Api& api = GetParam().windows ? api_ : windowless_;
    source_ = std::make_unique<VerbsSource>(api, far, registrar, server);
    mine_ = source_->serve(my_model_);
    theirs_ = source_->serve(their_model_);
  }

  // For a staged link, the first bytes of the model are in the block.
  void open(RegionKey model, Link& link) {
    link.puller = std::make_unique<RawPuller>(api_, near_);
    const auto connected = link.puller->connect(*source_, source_->admit({model}));
    ASSERT_TRUE(connected) << connected.error().message();
    const auto& windows = link.puller->windows();
    ASSERT_EQ(windows.empty(), GetParam().staged);
    if (!windows.empty()) {
      link.address = windows.front().address;
      link.key = windows.front().key(0);
      return;
    }
    link.puller->say({RawPuller::bytes_of(
        {.slot = 0, .sequence = 1, .region = model, .run_bytes = kReadBytes, .count = 1})});
    const auto answer = link.puller->answer();
    ASSERT_TRUE(answer) << answer.error().message();
    ASSERT_EQ(answer->status, OpStatus::kOk);
    link.address = link.puller->offer().blocks.front().address;
    link.key = link.puller->offer().blocks.front().key;
  }
  static void expect_reads(const Link& link, const TestSegment& model) {
    const auto bytes = link.puller->read(link.address, link.key, kReadBytes);
    ASSERT_EQ(bytes.size(), kReadBytes) << "its own key opens nothing";
    EXPECT_EQ(std::memcmp(bytes.data(), model.bytes().data(), kReadBytes), 0);
  }

  SystemApi api_;
  WithoutWindows windowless_;
  FabricOptions near_;
  const TestSegment my_model_{kModelBytes, 1};
  const TestSegment their_model_{kModelBytes, 2};
  std::unique_ptr<VerbsSource> source_;
  RegionKey mine_;
  RegionKey theirs_;
};

TEST_P(RdmaKeys, S15TheKeyOfOnePullerOpensNothingForAnother) {
  Link victim;
  Link thief;
  ASSERT_NO_FATAL_FAILURE(open(theirs_, victim));
  ASSERT_NO_FATAL_FAILURE(open(mine_, thief));
  expect_reads(victim, their_model_);
  EXPECT_TRUE(thief.puller->read(victim.address, victim.key, kReadBytes).empty())
      << "it read the model of another";
  expect_reads(victim, their_model_);
}

TEST_P(RdmaKeys, S15AKeyOpensNoMemoryOfAnotherModel) {
  Link victim;
  ASSERT_NO_FATAL_FAILURE(open(theirs_, victim));
  const std::uint64_t places[] = {victim.address,
                                  reinterpret_cast<std::uint64_t>(their_model_.bytes().data())};
  for (const std::uint64_t place : places) {
    // A read that is refused ends the queue pair.
    Link thief;
    ASSERT_NO_FATAL_FAILURE(open(mine_, thief));
    expect_reads(thief, my_model_);
    EXPECT_TRUE(thief.puller->read(place, thief.key, kReadBytes).empty())
        << "it read the model of another";
  }
  expect_reads(victim, their_model_);
}

INSTANTIATE_TEST_SUITE_P(
    Rdma, RdmaKeys,
    ::testing::Values(Serving{.name = "Windows"},
                      Serving{.name = "StagedByWindows", .staged = true},
                      Serving{.name = "NoWindows", .windows = false, .staged = true}),
    [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace rekindle::transport::verbs
