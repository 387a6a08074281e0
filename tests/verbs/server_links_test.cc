// What a source keeps for its pullers, and how it takes it away.
#include <future>

#include <gmock/gmock.h>

#include "tests/verbs/verbs_lab.h"

namespace rekindle::transport::verbs {
namespace {

using ::testing::AnyOf;
using testing::eventually;
using ::testing::HasSubstr;
using testing::test_deadline;

constexpr const char* kServingNic = "source/mlx5_0";
// Long enough for a call that does not wait to return, and only that.
constexpr auto kWhile = 50ms;

// Two servers may answer at once; the answers are the puller's.
std::future<Result<Paths>> connect_later(VerbsLab& lab) {
  return std::async(std::launch::async, [&lab] { return lab.connect(); });
}

OpStatus read_served(VerbsLab& lab, Path& path) {
  std::vector<std::byte> local(4096);
  return testing::read_one(path, lab.read(1, 0, local.data(), local.size()));
}

TEST(VerbsLinks, ASessionHasSoManyLinksAndNoMore) {
  LabOptions options;
  options.server.max_links_per_session = 2;
  VerbsLab lab(options);
  const auto first = lab.connect();
  const auto second = lab.connect();
  ASSERT_TRUE(first && second);
  const auto third = lab.connect();
  ASSERT_FALSE(third);
  EXPECT_EQ(third.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(third.error().message(), HasSubstr("2 links already"));
  EXPECT_EQ(lab.source().server()->link_count(), 2u);
  EXPECT_EQ(lab.network().queue_pairs(kServingNic), 4u);
  for (const auto& paths : {&*first, &*second}) {
    EXPECT_EQ(read_served(lab, *paths->front()), OpStatus::kOk);
  }
  const SessionToken other = lab.source().admit({lab.key()});
  EXPECT_NE(lab.path(other), nullptr) << "another session is not concerned";
}

// A rail of the puller that comes and goes, or a path that was cut to steal its work: the source
// hears of neither.
TEST(VerbsLinks, APullerThatConnectsAgainAndAgainEndsItsOldestLinks) {
  VerbsLab lab;
  std::unique_ptr<Path> last;
  for (int round = 0; round < 100; ++round) {
    last = lab.path();
    ASSERT_NE(last, nullptr) << round;
    last->abort();
  }
  last = lab.path();
  ASSERT_NE(last, nullptr);
  EXPECT_EQ(read_served(lab, *last), OpStatus::kOk);
  EXPECT_EQ(lab.source().server()->link_count(), VerbsServerOptions{}.max_links_per_rail_pair);
  EXPECT_EQ(lab.network().windows(kServingNic), 2 * VerbsServerOptions{}.max_links_per_rail_pair);
}

TEST(VerbsLinks, ASessionThatIsRevokedWhileItShakesHandsGetsNothing) {
  VerbsLab lab;
  lab.network().hold(FakeCall::kCreateQp, kServingNic);
  auto connecting = connect_later(lab);
  ASSERT_TRUE(lab.network().wait_held(FakeCall::kCreateQp, 1, test_deadline()));
  lab.source().revoke(lab.token());
  lab.network().let_go(FakeCall::kCreateQp, kServingNic);
  const auto paths = connecting.get();
  ASSERT_FALSE(paths);
  EXPECT_EQ(paths.error().code(), ErrorCode::kDenied);
  EXPECT_EQ(lab.source().server()->link_count(), 0u);
  EXPECT_EQ(lab.network().windows(kServingNic), 0u);
  EXPECT_EQ(lab.network().queue_pairs(kServingNic), 0u);
}

// The handshake finds out first that the session is gone, and must not take its links with it:
// whoever revokes waits for those.
TEST(VerbsLinks, DropSessionReturnsWhenAllLinksOfTheSessionHaveEnded) {
  VerbsLab lab;
  const auto path = lab.path();
  ASSERT_NE(path, nullptr);
  lab.network().hold(FakeCall::kCreateQp, kServingNic);
  auto connecting = connect_later(lab);
  ASSERT_TRUE(lab.network().wait_held(FakeCall::kCreateQp, 1, test_deadline()));
  lab.source().registry().revoke(lab.token());
  lab.network().hold(FakeCall::kDestroyQp, kServingNic);
  lab.network().let_go(FakeCall::kCreateQp, kServingNic);
  ASSERT_TRUE(lab.network().wait_held(FakeCall::kDestroyQp, 1, test_deadline()));
  auto dropping =
      std::async(std::launch::async, [&] { lab.source().server()->drop_session(lab.token()); });
  ASSERT_TRUE(lab.network().wait_held(FakeCall::kDestroyQp, 2, test_deadline()))
      << "the new link on one thread, the old one on the other";
  EXPECT_EQ(dropping.wait_for(kWhile), std::future_status::timeout);
  lab.network().let_go(FakeCall::kDestroyQp, kServingNic);
  dropping.get();
  EXPECT_EQ(lab.network().windows(kServingNic), 0u);
  EXPECT_EQ(connecting.get().error().code(), ErrorCode::kDenied);
}

TEST(VerbsLinks, DropSessionWaitsForALinkThatTheServerIsEndingByItself) {
  VerbsLab lab;
  const auto path = lab.path();
  ASSERT_NE(path, nullptr);
  lab.network().hold(FakeCall::kDestroyQp, kServingNic);
  lab.source().registry().remove(lab.key());
  ASSERT_TRUE(lab.network().wait_held(FakeCall::kDestroyQp, 1, test_deadline()));
  EXPECT_EQ(lab.source().server()->link_count(), 1u) << "it is being revoked, and may still read";
  auto dropping = std::async(std::launch::async, [&] { lab.source().revoke(lab.token()); });
  EXPECT_EQ(dropping.wait_for(kWhile), std::future_status::timeout);
  // Others are not concerned.
  lab.source().revoke(lab.source().admit({}));
  lab.network().let_go(FakeCall::kDestroyQp, kServingNic);
  dropping.get();
  EXPECT_EQ(lab.network().queue_pairs(kServingNic), 0u);
}

TEST(VerbsLinks, ASessionRevokedAfterTheAnswerLeavesThePullerWithoutAPath) {
  LabOptions options;
  options.connector.probe_deadline = 50ms;
  VerbsLab lab(options);
  auto handshake = lab.puller().connector().begin(lab.source().target(lab.token()), {});
  ASSERT_TRUE(handshake);
  const auto answer = lab.source().server()->accept(lab.token(), (*handshake)->request());
  ASSERT_TRUE(answer) << answer.error().message();
  lab.source().revoke(lab.token());
  const auto paths = (*handshake)->finish(*answer);
  ASSERT_FALSE(paths);
  EXPECT_THAT(paths.error().message(), HasSubstr("a first read"));
}

// The fake says so when a region is deregistered while a read of it is under way.
TEST(VerbsLinks, LinksToARemovedRegionEndBeforeItIsDeregistered) {
  VerbsLab lab;
  const testing::TestSegment other(kMiB, 9);
  const RegionKey stays = lab.source().serve(other);
  const SessionToken unconcerned = lab.source().admit({stays});
  const auto path = lab.path();
  const auto bystander = lab.path(unconcerned);
  ASSERT_TRUE(path != nullptr && bystander != nullptr);
  std::vector<std::byte> local(8 * kMiB);
  const auto used = lab.puller().use(local);
  lab.network().deliver_by_thread(100us, 20ms);
  const auto ops = lab.reads(256, 32 * kKiB, local.data());
  ASSERT_EQ(path->post(ops).value_or(0), ops.size());
  const std::size_t registrations = lab.network().registrations(kServingNic);
  lab.source().registry().remove(lab.key());
  std::size_t done = 0;
  for (const OpStatus status : statuses(testing::drain(*path), ops.size())) {
    EXPECT_THAT(status, AnyOf(OpStatus::kOk, OpStatus::kStale, OpStatus::kPeerLost));
    EXPECT_TRUE(status != OpStatus::kOk || lab.landed(ops[done]));
    ++done;
  }
  EXPECT_TRUE(eventually([&] { return lab.network().registrations(kServingNic) < registrations; }));
  EXPECT_EQ(lab.source().server()->link_count(), 1u);
  std::vector<std::byte> bytes(kMiB);
  const ReadOp op{.wr_id = 1, .remote = stays, .local = bytes.data(), .run_bytes = kMiB};
  EXPECT_EQ(testing::read_one(*bystander, op), OpStatus::kOk);
  EXPECT_EQ(std::memcmp(bytes.data(), other.bytes().data(), kMiB), 0);
  // Connected again: the session is good, the region is not.
  const auto again = lab.path();
  ASSERT_NE(again, nullptr);
  EXPECT_EQ(read_served(lab, *again), OpStatus::kStale);
}

TEST(VerbsLinks, AServerThatGoesAwayTakesItsLinksWithIt) {
  VerbsLab lab;
  std::vector<std::unique_ptr<Path>> paths;
  for (int i = 0; i < 3; ++i) {
    paths.push_back(lab.path());
    paths.push_back(lab.path(lab.source().admit({lab.key()})));
  }
  ASSERT_EQ(lab.source().server()->link_count(), 6u);
  lab.source().stop();
  EXPECT_EQ(lab.network().windows(kServingNic), 0u);
  EXPECT_EQ(lab.network().queue_pairs(kServingNic), 0u);
  EXPECT_EQ(lab.network().registrations(kServingNic), 0u);
}

// Nothing of it completes, neither LOCAL_INV nor the flush: destroying has the last word.
TEST(VerbsLinks, RevokingWorksOnANicThatHangs) {
  VerbsLab lab;
  std::vector<std::unique_ptr<Path>> paths;
  for (int i = 0; i < 4; ++i) paths.push_back(lab.path());
  lab.network().change(kServingNic, [](FakeDevice& device) { device.flushes = false; });
  lab.network().deliver_by_hand();
  lab.source().revoke(lab.token());
  EXPECT_EQ(lab.network().windows(kServingNic), 0u);
  EXPECT_EQ(lab.network().queue_pairs(kServingNic), 0u);
}

TEST(VerbsLinks, LinksOverARailThatWentDownAreGivenBack) {
  VerbsLab lab;
  const auto path = lab.path();
  ASSERT_NE(path, nullptr);
  lab.network().set_port_state(kSourcePort, IBV_PORT_DOWN);
  EXPECT_TRUE(eventually([&] { return lab.network().queue_pairs(kServingNic) == 0; }));
  EXPECT_EQ(lab.network().windows(kServingNic), 0u);
}

TEST(VerbsLinks, WindowsAreCountedFromTheirBindingToTheEndOfTheLink) {
  VerbsLab lab;
  WindowCounts& counts = lab.source().fabric().devices()[0]->windows();
  auto path = lab.path();
  ASSERT_NE(path, nullptr);
  EXPECT_EQ(counts.allocated, 2u) << "one for each queue pair";
  EXPECT_EQ(counts.bound, 2u);
  EXPECT_EQ(counts.invalidated, 0u);
  lab.source().revoke(lab.token());
  EXPECT_EQ(counts.allocated, 0u);
  EXPECT_EQ(counts.invalidated, 2u);
  EXPECT_EQ(counts.refused, 0u);
}

TEST(VerbsLinks, ADeviceThatHasNoWindowLeftIsCounted) {
  VerbsLab lab;
  lab.network().fail_call(FakeCall::kAllocMw, {.error = ENOMEM, .count = 1, .device = kServingNic});
  EXPECT_FALSE(lab.connect());
  WindowCounts& counts = lab.source().fabric().devices()[0]->windows();
  EXPECT_EQ(counts.refused, 1u);
  EXPECT_EQ(counts.allocated, 0u);
}

TEST(VerbsLinks, WithoutWindowsRevokingEndsReadsByTheQueuePairs) {
  LabOptions options;
  options.source_devices[0].attr.device_cap_flags &= ~unsigned{IBV_DEVICE_MEM_WINDOW_TYPE_2B};
  VerbsLab lab(options);
  const auto victim = lab.path();
  const auto bystander = lab.path(lab.source().admit({lab.key()}));
  ASSERT_TRUE(victim != nullptr && bystander != nullptr);
  EXPECT_EQ(read_served(lab, *victim), OpStatus::kOk);
  EXPECT_EQ(lab.network().windows(kServingNic), 0u);
  lab.source().revoke(lab.token());
  lab.network().deliver_by_thread(0us, 5ms);
  EXPECT_EQ(read_served(lab, *victim), OpStatus::kPeerLost);
  EXPECT_EQ(read_served(lab, *bystander), OpStatus::kOk);
}

}  // namespace
}  // namespace rekindle::transport::verbs
