// Paths under the cuts of `rekindle drill cut-link`: as ever without a cut, silent in one, and as
// ever again after it.
#include "transport/link_cuts.h"

#include "tests/transport/fake/fake_transport.h"
#include "tests/transport/path_conformance.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::transport::testing {
namespace {

// Every path of the real fixture is guarded. Its peer is "far", if not told otherwise.
class GuardedFixture : public PathFixture {
 public:
  explicit GuardedFixture(std::unique_ptr<PathFixture> real) : real_(std::move(real)) {}
  RegionKey serve(const TestSegment& segment) override { return real_->serve(segment); }
  void withdraw(RegionKey key) override { real_->withdraw(key); }
  SessionToken admit(std::vector<RegionKey> regions) override {
    return real_->admit(std::move(regions));
  }
  void revoke(const SessionToken& token) override { real_->revoke(token); }
  Result<std::unique_ptr<Path>> connect(const SessionToken& token) override {
    return connect_to("far", token);
  }
  void kill_peer() override { real_->kill_peer(); }

  Result<std::unique_ptr<Path>> connect_to(const std::string& peer, const SessionToken& token) {
    TRY(auto path, real_->connect(token));
    return cuts_.guard(std::move(path), peer, "m@1");
  }
  LinkCuts cuts_;

 private:
  const std::unique_ptr<PathFixture> real_;
};

class FakeFixture final : public PathFixture {
 public:
  RegionKey serve(const TestSegment& segment) override { return peer_.add_region(segment.bytes()); }
  void withdraw(RegionKey key) override { peer_.remove_region(key); }
  SessionToken admit(std::vector<RegionKey> regions) override {
    return peer_.admit(std::move(regions));
  }
  void revoke(const SessionToken& token) override { peer_.revoke(token); }
  Result<std::unique_ptr<Path>> connect(const SessionToken& token) override {
    return peer_.connect(token, {.delay = 1ms, .drain_delay = 3ms});
  }
  void kill_peer() override { peer_.kill(); }

 private:
  fake::FakePeer peer_;
};

struct ShmSource : TestSource<shm::ShmServer, shm::ServerOptions> {
  ShmSource() : TestSource(shm::make_connector(), {}) {}
};
struct TcpSource : TestSource<tcp::TcpServer, tcp::ServerOptions> {
  TcpSource()
      : TestSource(tcp::make_connector("reno"),
                   {.listen_host = "127.0.0.1", .congestion = "reno"}) {}
};

template <typename Real>
PathBackend guarded(std::string name) {
  return {std::move(name),
          [] { return std::make_unique<GuardedFixture>(std::make_unique<Real>()); }};
}

const auto kBackends =
    ::testing::Values(guarded<FakeFixture>("Fake"), guarded<SourceFixture<ShmSource>>("Shm"),
                      guarded<SourceFixture<TcpSource>>("Tcp"));
const auto kName = [](const auto& parameter) { return parameter.param.name; };

INSTANTIATE_TEST_SUITE_P(Guarded, PathConformance, kBackends, kName);

class CutLinks : public PathConformance {
 protected:
  LinkCuts& cuts() { return static_cast<GuardedFixture&>(*fixture_).cuts_; }
  std::unique_ptr<Path> connect_to(const std::string& peer) {
    auto path = static_cast<GuardedFixture&>(*fixture_).connect_to(peer, token_);
    EXPECT_TRUE(path) << path.error().message();
    return path ? std::move(*path) : nullptr;
  }
  // Longer than the test.
  void cut(LinkFilter filter = {}) {
    const TimePoint now = steady_now();
    cuts().cut(std::move(filter), now, now + 10min);
  }
  void expect_silence(Path& path) {
    const std::uint64_t landed = path.bytes_landed();
    std::vector<Completion> some(16);
    for (int turn = 0; turn < 1000; ++turn) ASSERT_EQ(path.poll(some), 0u);
    EXPECT_EQ(path.bytes_landed(), landed);
    const auto probe = path.post({});
    ASSERT_TRUE(probe) << probe.error().message();
    EXPECT_EQ(*probe, 0u);
    EXPECT_EQ(path.wait_fd(), -1);
  }
};

TEST_P(CutLinks, ASilentPathTellsNothingAndGoesOnWhenItHeals) {
  const auto path = connect();
  const auto other = connect_to("other");
  ASSERT_TRUE(path != nullptr && other != nullptr);
  std::vector<std::byte> local;
  const auto ops = reads(16, 100'000, local);
  const std::size_t taken = path->post(ops).value_or(0);
  ASSERT_GT(taken, 0u);
  cut({.peer = "far"});
  expect_silence(*path);
  std::vector<std::byte> unposted;
  EXPECT_EQ(path->post(reads(1, 8, unposted)).value_or(1), 0u);
  std::vector<std::byte> elsewhere;
  EXPECT_EQ(read_all(*other, reads(8, 100'000, elsewhere)).size(), 8u);

  cuts().heal();
  const auto completions = drain(*path);
  EXPECT_EQ(sorted_ids(completions), first_ids(taken));
  for (const auto& completion : completions) {
    EXPECT_EQ(completion.status, OpStatus::kOk);
    EXPECT_TRUE(landed(ops[completion.wr_id])) << completion.wr_id;
  }
  EXPECT_EQ(path->bytes_landed(), taken * 100'000);
}

TEST_P(CutLinks, ACutEndsWithoutAnybodysHelp) {
  const auto path = connect();
  ASSERT_NE(path, nullptr);
  const TimePoint now = steady_now();
  cuts().cut({}, now, now + 20ms);
  std::vector<std::byte> local;
  const auto ops = reads(4, 1000, local);
  EXPECT_EQ(read_all(*path, ops).size(), ops.size());
  for (const auto& op : ops) EXPECT_TRUE(landed(op)) << op.wr_id;
  EXPECT_EQ(cuts().left(steady_now()), Duration{0});
}

TEST_P(CutLinks, AnAbortInSilenceReportsEveryReadAsAbortedAndNothingIsWrittenLater) {
  const auto path = connect();
  const auto other = connect_to("other");
  ASSERT_TRUE(path != nullptr && other != nullptr);
  std::vector<std::byte> local;
  const std::size_t taken = path->post(reads(64, 1'000'000, local)).value_or(0);
  ASSERT_GT(taken, 0u);
  cut({.peer = "far"});
  path->abort();
  const auto completions = drain(*path);
  EXPECT_EQ(sorted_ids(completions), first_ids(taken));
  for (const auto& completion : completions) EXPECT_EQ(completion.status, OpStatus::kAborted);
  EXPECT_EQ(path->bytes_landed(), 0u);
  EXPECT_FALSE(path->post({}));

  std::fill(local.begin(), local.end(), std::byte{0x11});
  std::vector<std::byte> elsewhere;
  EXPECT_EQ(read_all(*other, reads(8, 1'000'000, elsewhere)).size(), 8u);
  EXPECT_EQ(std::count(local.begin(), local.end(), std::byte{0x11}),
            static_cast<std::ptrdiff_t>(local.size()));
}

TEST_P(CutLinks, ADeadPeerIsNoticedOnlyAfterTheSilence) {
  const auto path = connect();
  ASSERT_NE(path, nullptr);
  cut();
  fixture_->kill_peer();
  expect_silence(*path);
  cuts().heal();
  EXPECT_TRUE(eventually([&] {
    std::vector<Completion> nothing(1);
    EXPECT_EQ(path->poll(nothing), 0u);
    return !path->post({});
  }));
}

TEST_P(CutLinks, APathThatIsMadeInTheCutIsSilentAndOthersAreNot) {
  cut({.peer = "far"});
  const auto path = connect();
  const auto other = connect_to("other");
  ASSERT_TRUE(path != nullptr && other != nullptr);
  expect_silence(*path);
  EXPECT_NE(other->wait_fd(), -1);
  // No path of this test uses a rail.
  cut({.rail = "mlx5_0:1"});
  EXPECT_NE(path->wait_fd(), -1);
  cut({.peer = "far", .peer_rail = "mlx5_0:1"});
  EXPECT_NE(path->wait_fd(), -1);
}

TEST_P(CutLinks, TheRoutesTellWhatFellSilentAndWhoNoticed) {
  auto noticing = connect();
  const auto patient = connect();
  const auto other = connect_to("other");
  ASSERT_TRUE(noticing != nullptr && patient != nullptr && other != nullptr);
  std::vector<std::byte> local;
  EXPECT_EQ(read_all(*other, reads(2, 1000, local)).size(), 2u);
  cut({.peer = "far"});
  EXPECT_EQ(read_all(*other, reads(3, 1000, local)).size(), 3u);
  noticing->abort();
  noticing.reset();
  const auto routes = cuts().routes();
  ASSERT_EQ(routes.size(), 3u);
  EXPECT_EQ(routes[0].peer, "far");
  EXPECT_EQ(routes[0].reader, "m@1");
  EXPECT_TRUE(routes[0].silenced && routes[0].noticed_after && routes[0].ended);
  EXPECT_TRUE(routes[1].silenced && !routes[1].noticed_after && !routes[1].ended);
  EXPECT_EQ(routes[2].peer, "other");
  EXPECT_TRUE(!routes[2].silenced && !routes[2].noticed_after && !routes[2].ended);
  EXPECT_EQ(routes[2].bytes, 3000u);
  // The next cut has its own report.
  cut({.peer = "nobody"});
  const auto again = cuts().routes();
  ASSERT_EQ(again.size(), 2u);
  EXPECT_TRUE(!again[0].silenced && !again[1].silenced);
}

INSTANTIATE_TEST_SUITE_P(Cut, CutLinks, kBackends, kName);

TEST(PeerRail, IsTheSecondOfTheDescription) {
  EXPECT_EQ(peer_rail_of("verbs mlx5_0:1 10.0.0.2 -> mlx5_1:1 10.0.0.3"), "mlx5_1:1");
  EXPECT_EQ(peer_rail_of("memory"), "");
}

}  // namespace
}  // namespace rekindle::transport::testing
