// The values that two ends agree on, and their reaction to nonsense.
#include <random>

#include <gmock/gmock.h>

#include "tests/verbs/verbs_lab.h"
#include "transport/verbs/link/verbs_wire.h"

namespace rekindle::transport::verbs {
namespace {

using testing::eventually;
using ::testing::HasSubstr;

constexpr const char* kSourceNic = "source/mlx5_0";
constexpr const char* kPullerNic = "puller/mlx5_0";

OpStatus read_once(VerbsLab& lab, Path& path) {
  std::vector<std::byte> local(kMiB);
  const ReadOp op = lab.read(1, 4096, local.data(), local.size());
  const OpStatus status = testing::read_one(path, op);
  EXPECT_EQ(lab.landed(op), status == OpStatus::kOk);
  return status;
}

// A puller's request, for tests to damage.
class HandshakeTest : public ::testing::Test {
 protected:
  ConnectRequest request() {
    auto begun = lab_.puller().connector().begin(lab_.source().target(lab_.token()), {});
    if (!begun) throw std::runtime_error(begun.error().message());
    handshake_ = std::move(*begun);
    return ConnectRequest::parse(handshake_->request()).value();
  }
  Result<ConnectResponse> ask(const std::string& bytes) {
    TRY(const std::string answer, lab_.source().server()->accept(lab_.token(), bytes));
    return ConnectResponse::parse(answer);
  }
  Result<ConnectResponse> ask(const ConnectRequest& request) { return ask(request.to_bytes()); }

  VerbsLab lab_;
  std::unique_ptr<Handshake> handshake_;
};

TEST_F(HandshakeTest, ARailThatTheSourceDoesNotHaveIsAnErrorOfThatLinkOnly) {
  auto wanted = request();
  wanted.links.push_back(wanted.links.front());
  wanted.links.back().source_rail = 63;
  const auto response = ask(wanted);
  ASSERT_TRUE(response) << response.error().message();
  ASSERT_EQ(response->links.size(), 2u);
  EXPECT_EQ(response->links[0].error, "");
  EXPECT_THAT(response->links[1].error, HasSubstr("no rail 63"));
}

TEST_F(HandshakeTest, MoreQueuePairsThanTheSourceGivesAreCutAndTooManyRefused) {
  auto wanted = request();
  auto& pairs = wanted.links.front().queue_pairs;
  pairs.resize(kMaxQueuePairs, pairs.front());
  auto response = ask(wanted);
  ASSERT_TRUE(response) << response.error().message();
  EXPECT_EQ(response->links.front().queue_pairs.size(), VerbsServerOptions{}.max_queue_pairs);
  pairs.push_back(pairs.front());
  response = ask(wanted);
  ASSERT_FALSE(response);
  EXPECT_EQ(response.error().code(), ErrorCode::kInvalid);
  EXPECT_THAT(response.error().message(), HasSubstr("queue pairs on one link"));
  pairs.clear();
  EXPECT_EQ(ask(wanted).error().code(), ErrorCode::kInvalid);
}

TEST_F(HandshakeTest, AnotherIncarnationIsStaleAtEitherEnd) {
  auto wanted = request();
  const Incarnation right = wanted.source;
  wanted.source = Incarnation::random();
  EXPECT_EQ(ask(wanted).error().code(), ErrorCode::kStale);
  wanted.source = right;
  auto response = ask(wanted);
  ASSERT_TRUE(response);
  response->source = Incarnation::random();
  EXPECT_EQ(handshake_->finish(response->to_bytes()).error().code(), ErrorCode::kStale);
}

TEST_F(HandshakeTest, AnUnknownSessionIsDenied) {
  const auto wanted = request();
  const auto answer = lab_.source().server()->accept(SessionToken::random(), wanted.to_bytes());
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), ErrorCode::kDenied);
}

// Answers that only a broken source, or a stranger, would give.
TEST_F(HandshakeTest, AnAnswerThatDoesNotFitTheRequestIsInvalid) {
  using Spoil = void (*)(ConnectResponse&);
  const Spoil spoils[] = {
      [](ConnectResponse& r) { r.links.clear(); },
      [](ConnectResponse& r) { r.links.push_back(r.links.front()); },
      [](ConnectResponse& r) { r.links.front().queue_pairs.clear(); },
      [](ConnectResponse& r) {
        r.links.front().queue_pairs.push_back(r.links.front().queue_pairs.front());
      },
      [](ConnectResponse& r) { r.links.front().windows.front().keys.clear(); },
      [](ConnectResponse& r) { r.links.front().windows.front().keys.resize(3); },
      [](ConnectResponse& r) { r.links.front().windows.front().bytes = 0; },
      [](ConnectResponse& r) { r.links.front().windows.front().offset = 4096; },
      [](ConnectResponse& r) { r.links.front().windows.front().bytes = ~std::uint64_t{0}; },
      [](ConnectResponse& r) {
        r.links.front().windows.push_back(r.links.front().windows.front());
      },
  };
  for (std::size_t i = 0; i < std::size(spoils); ++i) {
    auto response = ask(request());
    ASSERT_TRUE(response) << response.error().message();
    spoils[i](*response);
    const auto paths = handshake_->finish(response->to_bytes());
    ASSERT_FALSE(paths) << i;
    EXPECT_EQ(paths.error().code(), ErrorCode::kInvalid) << i << ": " << paths.error().message();
  }
}

TEST_F(HandshakeTest, WhatThePeerSaysStaysOnOneShortLine) {
  auto response = ask(request());
  ASSERT_TRUE(response);
  response->links.front().error =
      "port down\n2026-01-01 forged\x1b[31m" + std::string(100'000, 'x');
  const auto paths = handshake_->finish(response->to_bytes());
  ASSERT_FALSE(paths);
  EXPECT_THAT(paths.error().message(), HasSubstr("port down 2026-01-01 forged [31mxxx"));
  EXPECT_LT(paths.error().message().size(), 1000u);
}

TEST_F(HandshakeTest, GarbageIsRefusedAndLeavesNothingBehind) {
  const std::string good = request().to_bytes();
  for (std::size_t length = 0; length < good.size(); ++length) {
    (void)ask(good.substr(0, length));
  }
  const auto seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes = good;
    for (unsigned i = 0; i <= random() % 4; ++i) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    (void)ask(bytes);
  }
  lab_.source().revoke(lab_.token());
  EXPECT_EQ(lab_.network().queue_pairs(kSourceNic), 0u);
  EXPECT_EQ(lab_.network().windows(kSourceNic), 0u);
}

TEST_F(HandshakeTest, AGarbledAnswerMakesNoPathThatReadsWrongBytesOrLeaks) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    const auto wanted = request();
    auto answer = lab_.source().server()->accept(lab_.token(), wanted.to_bytes());
    ASSERT_TRUE(answer) << answer.error().message();
    if (round % 3 == 0) {
      answer->resize(random() % answer->size());
    } else {
      // The head of it: window addresses are at the end, and any address is one to a fake.
      (*answer)[random() % 40] = static_cast<char>(random());
    }
    // Without this the connector would wait for a lost first read.
    lab_.network().deliver_by_thread(0us, 1us);
    auto paths = handshake_->finish(*answer);
    if (paths) {
      for (const auto& path : *paths) path->abort();
    }
    lab_.network().deliver_at_post();
  }
  handshake_.reset();
  EXPECT_EQ(lab_.network().queue_pairs(kPullerNic), 0u);
}

struct Ends {
  ibv_mtu source_mtu, puller_mtu;
  int source_answers, puller_asks;
  std::size_t source_queue_pairs, puller_queue_pairs;
};

// The fake loses packets of another MTU, and refuses more reads than were agreed on.
TEST(HandshakeMinima, BothEndsUseTheSmallerValueOfEach) {
  const Ends cases[] = {
      {IBV_MTU_4096, IBV_MTU_1024, 16, 16, 8, 2},  {IBV_MTU_1024, IBV_MTU_4096, 16, 16, 8, 2},
      {IBV_MTU_256, IBV_MTU_512, 1, 16, 8, 2},     {IBV_MTU_4096, IBV_MTU_4096, 16, 1, 1, 4},
      {IBV_MTU_4096, IBV_MTU_4096, 4, 128, 3, 16}, {IBV_MTU_4096, IBV_MTU_4096, 128, 4, 8, 1}};
  for (const Ends& ends : cases) {
    LabOptions options;
    options.source_devices[0].ports[0].active_mtu = ends.source_mtu;
    options.source_devices[0].attr.max_qp_rd_atom = ends.source_answers;
    options.puller_devices[0].ports[0].active_mtu = ends.puller_mtu;
    options.puller_devices[0].attr.max_qp_init_rd_atom = ends.puller_asks;
    options.server.max_queue_pairs = ends.source_queue_pairs;
    options.connector.queue_pairs = ends.puller_queue_pairs;
    VerbsLab lab(options);
    const auto path = lab.path();
    ASSERT_NE(path, nullptr);
    EXPECT_EQ(read_once(lab, *path), OpStatus::kOk);
    const std::size_t agreed = std::min(ends.source_queue_pairs, ends.puller_queue_pairs);
    EXPECT_EQ(lab.network().queue_pairs(kSourceNic), agreed);
    EXPECT_EQ(lab.network().queue_pairs(kPullerNic), agreed);
  }
}

// The device has fewer than were asked for, and these suffice.
TEST(HandshakeMinima, ADeviceThatIsShortOfQueuePairsGivesFewer) {
  LabOptions options;
  options.connector.queue_pairs = 4;
  options.source_devices[0].attr.max_qp = 3;
  options.puller_devices[0].attr.max_qp = 4;
  VerbsLab lab(options);
  const auto path = lab.path();
  ASSERT_NE(path, nullptr);
  EXPECT_EQ(read_once(lab, *path), OpStatus::kOk);
  EXPECT_EQ(lab.network().queue_pairs(kPullerNic), 3u);
  const auto none = lab.puller().connect(lab.source(), lab.token());
  ASSERT_FALSE(none);
  EXPECT_THAT(none.error().message(), HasSubstr("queue pair"));
}

TEST(HandshakeMemory, WindowsThatRunOutAreAnErrorThatNamesThemAndGiveBackTheRest) {
  LabOptions options;
  options.source_devices[0].attr.max_mw = 3;
  VerbsLab lab(options);
  const auto first = lab.path();
  ASSERT_NE(first, nullptr);
  const auto second = lab.connect();
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(second.error().message(), HasSubstr("no memory window left"));
  EXPECT_EQ(lab.network().windows(kSourceNic), 2u);
  EXPECT_EQ(lab.network().queue_pairs(kSourceNic), 2u);
  EXPECT_EQ(read_once(lab, *first), OpStatus::kOk);
}

TEST(HandshakeMemory, ARegionThatIsBeingRegisteredIsUnavailableAndThenServed) {
  LabOptions options;
  options.server.registration_patience = 1ms;
  VerbsLab lab(options);
  ASSERT_TRUE(eventually([&] { return lab.connect().has_value(); }));
  lab.network().hold(FakeCall::kRegMr, kSourceNic);
  const testing::TestSegment late(2 * kMiB, 3);
  const RegionKey key = lab.source().serve(late);
  const SessionToken token = lab.source().admit({key});
  const auto early = lab.puller().connect(lab.source(), token);
  ASSERT_FALSE(early);
  EXPECT_EQ(early.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(early.error().message(), HasSubstr("still registering"));
  lab.network().let_go(FakeCall::kRegMr, kSourceNic);
  ASSERT_TRUE(eventually([&] { return bool(lab.puller().connect(lab.source(), token)); }));
}

TEST(HandshakeMemory, ARegionThatCanNeitherBeRegisteredNorStagedIsNotServedAndTheErrorSaysWhy) {
  LabOptions options;
  options.source_devices[0].max_registered_bytes = kPageBytes;  // not even a window to stage it
  options.segment_bytes = 8 * kMiB;
  VerbsLab lab(options);
  const auto paths = lab.connect();
  ASSERT_FALSE(paths);
  EXPECT_EQ(paths.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(paths.error().message(), HasSubstr("of 8.00 MiB not registered"));
  EXPECT_FALSE(lab.source().server()->registration_problems().empty());
  EXPECT_EQ(lab.network().windows(kSourceNic), 0u);
}

TEST(HandshakeRails, ARailOfTheSourceThatGoesDownBetweenRequestAndAnswerIsNamed) {
  VerbsLab lab;
  auto handshake = lab.puller().connector().begin(lab.source().target(lab.token()), {});
  ASSERT_TRUE(handshake);
  lab.network().set_port_state(kSourcePort, IBV_PORT_DOWN);
  ASSERT_TRUE(VerbsLab::wait_rail(lab.source().fabric(), false));
  const auto answer = lab.source().server()->accept(lab.token(), (*handshake)->request());
  ASSERT_TRUE(answer) << answer.error().message();
  const auto paths = (*handshake)->finish(*answer);
  ASSERT_FALSE(paths);
  EXPECT_EQ(paths.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(paths.error().message(), HasSubstr("port down"));
}

TEST(HandshakeRails, ARailOfThePullerThatWentDownMeanwhileMakesNoUsablePath) {
  LabOptions options;
  options.connector.probe_deadline = 20ms;
  VerbsLab lab(options);
  auto handshake = lab.puller().connector().begin(lab.source().target(lab.token()), {});
  ASSERT_TRUE(handshake);
  const auto answer = lab.source().server()->accept(lab.token(), (*handshake)->request());
  ASSERT_TRUE(answer) << answer.error().message();
  lab.network().set_port_state(kPullerPort, IBV_PORT_DOWN);
  ASSERT_TRUE(VerbsLab::wait_rail(lab.puller().fabric(), false));
  const auto paths = (*handshake)->finish(*answer);
  ASSERT_FALSE(paths);
  EXPECT_THAT(paths.error().message(), HasSubstr("port down"));
}

}  // namespace
}  // namespace rekindle::transport::verbs
