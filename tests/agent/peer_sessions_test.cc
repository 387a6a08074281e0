// Who may open a session on a copy of this host, and when its reads have ended.
#include "recovery/agent/peer_sessions.h"

#include <exception>

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <gtest/gtest.h>

#include "recovery/rpc/convert.h"
#include "recovery/rpc/grants.h"
#include "tests/recovery/rpc_fixture.h"
#include "tests/store/store_fixture.h"

namespace rekindle::agent {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kIssuerMs = 1000;

// A transport that remembers which sessions it has dropped.
class RecordingServer final : public transport::Server {
 public:
  std::string_view transport() const override { return "tcp"; }
  std::string endpoint(std::string_view host) const override { return std::string(host) + ":1"; }
  Result<std::string> accept(const SessionToken&, std::string_view request) override {
    return "answer to " + std::string(request);
  }
  void drop_session(const SessionToken& token) override { dropped.push_back(token); }

  std::vector<SessionToken> dropped;
};

class PeerSessionsTest : public store::StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    served_.add(source_);
    grants_.observe(self_.incarnation, self_.key->public_key(), kIssuerMs, steady_now());
    options_.limits.max_pullers = 2;
    options_.advertised_host = [] { return std::string("host"); };
    make_sessions();
  }
  // Sessions that end by themselves use the members of this object.
  void TearDown() override {
    if (sessions_) loop_.run(sessions_->drain(5s));
    StoreTest::TearDown();
  }
  void make_sessions() {
    sessions_.emplace(
        loop_.executor(),
        PeerSessions::Parts{self_, served_, grants_, registry_, {&server_}, blocking_}, options_);
  }
  static rpc::Peer peer(const std::string& name, const rpc::Identity& identity) {
    rpc::Peer peer;
    peer.node_id = name;
    peer.incarnation = identity.incarnation;
    peer.address = "10.0.0.1:1";
    peer.public_key = identity.key->public_key();
    return peer;
  }
  proto::OpenSessionRequest request(const std::string& transport = "tcp") const {
    proto::OpenSessionRequest request;
    request.set_source_incarnation(self_.incarnation.to_bytes());
    *request.mutable_id() = rpc::to_proto(id_);
    *request.mutable_root() = rpc::to_proto(checkpoint()->root);
    *request.mutable_layout() = rpc::to_proto(source_->manifest.layout.digest());
    request.add_transports(transport);
    auto& grant = *request.mutable_grant();
    grant.set_puller_incarnation(puller_.incarnation.to_bytes());
    grant.set_source_incarnation(self_.incarnation.to_bytes());
    *grant.mutable_root() = rpc::to_proto(checkpoint()->root);
    grant.set_issuer(self_.incarnation.to_bytes());
    grant.set_expiry_ms(kIssuerMs + 3'600'000);
    rpc::sign_grant(grant, self_);
    return request;
  }
  // A grant of the coordinator that runs out after `left`.
  proto::OpenSessionRequest request_until(std::chrono::milliseconds left) const {
    auto granted = request();
    auto& grant = *granted.mutable_grant();
    grant.set_issuer(coordinator_.incarnation.to_bytes());
    const auto ms = static_cast<std::uint64_t>(left.count());
    grant.set_expiry_ms(kIssuerMs + ms);
    rpc::sign_grant(grant, coordinator_);
    return granted;
  }
  // A coordinator has answered heartbeats for a minute.
  void in_contact() {
    grants_ = {};
    grants_.observe(self_.incarnation, self_.key->public_key(), kIssuerMs, steady_now());
    observe_coordinator();
    for (auto ago = 60s; ago > 0s; ago -= 5s) grants_.hear_coordinator(steady_now() - ago);
    grants_.hear_coordinator(steady_now());
  }
  void observe_coordinator() {
    grants_.observe(coordinator_.incarnation, coordinator_.key->public_key(), kIssuerMs,
                    steady_now());
  }
  Result<SessionToken> open(proto::OpenSessionRequest what) {
    TRY(const auto response, loop_.run(sessions_->open(peer_, std::move(what))));
    return SessionToken::from_bytes(response.token());
  }

  rpc::testing::Loop loop_;
  const rpc::Identity self_ = rpc::testing::make_identity(proto::ROLE_AGENT, "a");
  const rpc::Identity puller_ = rpc::testing::make_identity(proto::ROLE_PULLER, "p");
  rpc::Peer peer_ = peer("p", puller_);
  const rpc::Identity coordinator_ = rpc::testing::make_identity(proto::ROLE_COORDINATOR, "c");
  transport::SegmentRegistry registry_;
  ServedVersions served_{registry_};
  GrantClock grants_;
  WorkerPool blocking_{"t-blocking", 2, 16};
  RecordingServer server_;
  PeerSessions::Options options_;
  std::optional<PeerSessions> sessions_;
};

TEST_F(PeerSessionsTest, ASessionIsOpenedAgainstAGrantAndEndsOnce) {
  const auto token = open(request());
  ASSERT_TRUE(token) << token.error().message();
  EXPECT_EQ(sessions_->count(id_), 1u);
  EXPECT_EQ(sessions_->copy_of(*token, peer_)->id, id_);
  for (int i = 0; i < 2; ++i) {
    proto::CloseSessionRequest close;
    close.set_token(token->to_bytes());
    ASSERT_TRUE(loop_.run(sessions_->close(peer_, close)));
  }
  EXPECT_EQ(server_.dropped, std::vector{*token});
  EXPECT_EQ(sessions_->count(), 0u);
}

TEST_F(PeerSessionsTest, S5AGrantOfAnotherPullerIsDenied) {
  auto stolen = request();
  stolen.mutable_grant()->set_puller_incarnation(Incarnation::random().to_bytes());
  rpc::sign_grant(*stolen.mutable_grant(), self_);
  EXPECT_EQ(open(stolen).error().code(), ErrorCode::kDenied);
}

TEST_F(PeerSessionsTest, ADrainingVersionGetsNoNewReaders) {
  served_.set_draining({id_});
  EXPECT_EQ(open(request()).error().code(), ErrorCode::kStale);
}

TEST_F(PeerSessionsTest, MorePullersThanAllowedAreSentElsewhere) {
  ASSERT_TRUE(open(request()));
  ASSERT_TRUE(open(request()));
  EXPECT_EQ(open(request()).error().code(), ErrorCode::kUnavailable);
}

TEST_F(PeerSessionsTest, OnePeerHasItsPartOfThePlacesWhateverItsConnections) {
  sessions_->set_limits({.max_bytes_per_second = 0, .max_pullers = 64});
  peer_.address = "10.0.0.1:1";
  int opened = 0;
  std::optional<Error> refused;
  for (int i = 0; i < 64; ++i) {
    peer_.address = "10.0.0.1:" + std::to_string(1 + i);
    const auto token = open(request());
    if (token) {
      ++opened;
    } else {
      refused = token.error();
    }
  }
  EXPECT_EQ(opened, 16);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code(), ErrorCode::kUnavailable);
  EXPECT_NE(refused->message().find("10.0.0.1 has 16 sessions"), std::string::npos)
      << refused->message();
  peer_.address = "10.0.0.2:1";
  EXPECT_TRUE(open(request())) << "another host finds a place";
}

TEST_F(PeerSessionsTest, PeersThatKeepAllPlacesKeepNobodyOut) {
  sessions_->set_limits({.max_bytes_per_second = 0, .max_pullers = 16});
  for (const char* const hog : {"10.0.0.8:1", "10.0.0.9:1"}) {
    peer_.address = hog;
    for (int i = 0; i < 8; ++i) ASSERT_TRUE(open(request()));
  }
  EXPECT_FALSE(open(request()));
  peer_.address = "10.0.0.1:1";
  int opened = 0;
  while (open(request())) ++opened;
  EXPECT_EQ(opened, 5) << "a third of the places";
}

TEST_F(PeerSessionsTest, NewLimitsApplyToTheNextPuller) {
  ASSERT_TRUE(open(request()));
  sessions_->set_limits({.max_bytes_per_second = 7, .max_pullers = 1});
  EXPECT_EQ(open(request()).error().code(), ErrorCode::kUnavailable);
  sessions_->set_limits({.max_bytes_per_second = 7, .max_pullers = 2});
  const auto response = loop_.run(sessions_->open(peer_, request()));
  ASSERT_TRUE(response) << response.error().message();
  EXPECT_EQ(response->max_bytes_per_second(), 7u);
}

TEST_F(PeerSessionsTest, ATransportThatIsNotServedOpensNothing) {
  EXPECT_EQ(open(request("verbs")).error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(sessions_->count(), 0u);
}

TEST_F(PeerSessionsTest, ASessionEndsWithItsConnectionAndDrainWaitsForItsReads) {
  const auto token = open(request());
  ASSERT_TRUE(token);
  auto other = peer_;
  other.address = "10.0.0.1:2";
  EXPECT_EQ(sessions_->copy_of(*token, other).error().code(), ErrorCode::kDenied);
  sessions_->on_disconnect(other);
  EXPECT_TRUE(sessions_->contains(*token));
  sessions_->on_disconnect(peer_);
  loop_.run_until([&] { return !sessions_->contains(*token); });
  loop_.run(sessions_->drain(5s));
  EXPECT_EQ(server_.dropped, std::vector{*token});
}

TEST_F(PeerSessionsTest, S13ASessionEndsWithItsGrant) {
  in_contact();
  const auto token = open(request_until(50ms));
  ASSERT_TRUE(token) << token.error().message();
  const auto own = open(request());
  ASSERT_TRUE(own);
  loop_.run_until([&] { return !sessions_->contains(*token); });
  loop_.run(sessions_->drain(5s));
  EXPECT_EQ(server_.dropped, std::vector{*token});
  EXPECT_FALSE(registry_.find_session(*token)) << "its streams end";
  EXPECT_TRUE(sessions_->contains(*own)) << "its grant is of an hour";
}

// Whoever may no longer read gets no second grant.
TEST_F(PeerSessionsTest, ASessionByAGrantOfThisAgentEndsWithItAlsoWithoutACoordinator) {
  const auto until = [&](std::chrono::milliseconds left) {
    auto granted = request();
    granted.mutable_grant()->set_expiry_ms(kIssuerMs + static_cast<std::uint64_t>(left.count()));
    rpc::sign_grant(*granted.mutable_grant(), self_);
    return granted;
  };
  const auto token = open(until(50ms));
  ASSERT_TRUE(token) << token.error().message();
  const auto renewed = open(until(60ms));
  ASSERT_TRUE(renewed);
  auto renewal = until(1h);
  renewal.set_renews(renewed->to_bytes());
  ASSERT_TRUE(open(renewal));
  loop_.run_until([&] { return !sessions_->contains(*token); });
  EXPECT_TRUE(sessions_->contains(*renewed));
}

TEST_F(PeerSessionsTest, StreamsComeFromTheAddressesOfThePuller) {
  auto named = request();
  named.add_stream_hosts("10.1.0.1");
  const auto token = open(named);
  ASSERT_TRUE(token);
  EXPECT_EQ(registry_.find_session(*token)->stream_hosts,
            (std::vector<std::string>{"10.1.0.1", "10.0.0.1"}));
  for (int i = 0; i < 1000; ++i) named.add_stream_hosts("10.1.0.2");
  const auto many = open(named);
  ASSERT_TRUE(many);
  EXPECT_EQ(registry_.find_session(*many)->stream_hosts.size(), 65u);
}

TEST_F(PeerSessionsTest, ANewerGrantKeepsASession) {
  in_contact();
  const auto renewed = open(request_until(200ms));
  ASSERT_TRUE(renewed);
  auto renewal = request_until(1h);
  renewal.set_renews(renewed->to_bytes());
  const auto answer = loop_.run(sessions_->open(peer_, renewal));
  ASSERT_TRUE(answer) << answer.error().message();
  EXPECT_EQ(answer->token(), renewed->to_bytes());
  EXPECT_EQ(sessions_->count(), 1u);
  const auto left_alone = open(request_until(250ms));
  ASSERT_TRUE(left_alone);
  loop_.run_until([&] { return !sessions_->contains(*left_alone); });
  EXPECT_TRUE(sessions_->contains(*renewed)) << "its first grant ended before";
}

TEST_F(PeerSessionsTest, OnlyTheConnectionOfASessionRenewsItAndOnlyByARightGrant) {
  in_contact();
  const auto token = open(request_until(1h));
  ASSERT_TRUE(token);
  auto renewal = request_until(2h);
  renewal.set_renews(token->to_bytes());
  auto other = peer_;
  other.address = "10.0.0.1:2";
  EXPECT_EQ(loop_.run(sessions_->open(other, renewal)).error().code(), ErrorCode::kDenied);
  auto forged = renewal;
  forged.mutable_grant()->set_expiry_ms(kIssuerMs + 1);
  EXPECT_EQ(open(forged).error().code(), ErrorCode::kDenied);
  auto of_another_version = renewal;
  *of_another_version.mutable_root() = rpc::to_proto(Digest{7});
  *of_another_version.mutable_grant()->mutable_root() = rpc::to_proto(Digest{7});
  rpc::sign_grant(*of_another_version.mutable_grant(), coordinator_);
  EXPECT_EQ(open(of_another_version).error().code(), ErrorCode::kDenied);
  EXPECT_TRUE(open(renewal));
}

// While the coordinator is away nobody gets a new grant, and running pulls go on.
TEST_F(PeerSessionsTest, ASessionOutlivesItsGrantWhileNoCoordinatorAnswers) {
  observe_coordinator();
  const auto lasting = open(request_until(50ms));
  ASSERT_TRUE(lasting);
  loop_.run(async::sleep_for(1200ms));
  EXPECT_TRUE(sessions_->contains(*lasting));
  grants_.hear_coordinator(steady_now());
  loop_.run(async::sleep_for(1200ms));
  EXPECT_TRUE(sessions_->contains(*lasting)) << "its puller gets time to renew";
  in_contact();
  loop_.run_until([&] { return !sessions_->contains(*lasting); });
}

TEST_F(PeerSessionsTest, APullerOfAnEarlierReleaseSendsItsTokenAndRenewsNothing) {
  in_contact();
  auto old = peer_;
  old.public_key.clear();
  const auto response = loop_.run(sessions_->open(old, request_until(50ms)));
  ASSERT_TRUE(response);
  const auto token = SessionToken::from_bytes(response->token());
  EXPECT_TRUE(registry_.find_session(*token)->sends_token);
  EXPECT_TRUE(registry_.find_session(*token)->stream_hosts.empty()) << "it names none";
  const auto present = open(request_until(50ms));
  EXPECT_FALSE(registry_.find_session(*present)->sends_token);
  loop_.run_until([&] { return !sessions_->contains(*present); });
  EXPECT_TRUE(sessions_->contains(*token));
}

// A call is cancelled when its connection ends. Nobody would end a session that opens later.
TEST_F(PeerSessionsTest, NoSessionOpensForACallThatIsCancelledWhileItsCopyIsVerified) {
  boost::asio::cancellation_signal cancel;
  options_.require_verified = [&cancel](auto, auto) -> async::Task<Result<void>> {
    co_await async::sleep_for(1ms);
    cancel.emit(boost::asio::cancellation_type::terminal);
    co_return Result<void>();
  };
  make_sessions();
  bool ended = false;
  boost::asio::co_spawn(
      loop_.executor(), sessions_->open(peer_, request()),
      boost::asio::bind_cancellation_slot(
          cancel.slot(), [&ended](std::exception_ptr, const Result<proto::OpenSessionResponse>&) {
            ended = true;
          }));
  loop_.run_until([&] { return ended; });
  EXPECT_EQ(sessions_->count(), 0u);
}

TEST_F(PeerSessionsTest, SessionsOfOneLayoutEndAlone) {
  ASSERT_TRUE(open(request()));
  loop_.run(sessions_->end_all_of(id_, Digest{9, 9}));
  EXPECT_EQ(sessions_->count(id_), 1u);
  loop_.run(sessions_->end_all_of(id_));
  EXPECT_EQ(sessions_->count(id_), 0u);
}

TEST_F(PeerSessionsTest, OneCallAtATimeWatchesASession) {
  const auto token = open(request());
  ASSERT_TRUE(token);
  EXPECT_TRUE(sessions_->begin_watch(*token));
  EXPECT_FALSE(sessions_->begin_watch(*token));
  sessions_->end_watch(*token);
  EXPECT_TRUE(sessions_->begin_watch(*token));
}

}  // namespace
}  // namespace rekindle::agent
