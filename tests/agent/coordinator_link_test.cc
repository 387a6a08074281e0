#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/agent/core/coordinator_registration.h"
#include "recovery/agent/worker_host.h"
#include "recovery/rpc/convert.h"
#include "tests/recovery/rpc_fixture.h"
#include "tests/support/process.h"

// An agent beside a coordinator that answers as it is told.
namespace rekindle::agent {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Step = CoordinatorRegistration::Step;

const Error kRefused(ErrorCode::kPeerLost, "connection refused");

class Registration : public ::testing::Test {
 protected:
  Step step() { return registration_.next(now_).step; }
  // Waits for as long as the machine says, and returns the step that follows.
  Step step_after_wait() {
    const auto next = registration_.next(now_);
    EXPECT_EQ(next.step, Step::kWait);
    EXPECT_GT(next.until, now_);
    now_ = next.until;
    return step();
  }
  void connect_and_register() {
    ASSERT_EQ(step(), Step::kConnect);
    registration_.connected(now_);
    ASSERT_EQ(step(), Step::kRegister);
    registration_.registered(250, 2000, now_);
    announce();
  }
  void announce(bool again = false) {
    ASSERT_EQ(step(), Step::kAnnounce);
    registration_.begin_announcement();
    registration_.announced(again, now_);
  }
  void beat() {
    ASSERT_EQ(step(), Step::kHeartbeat);
    registration_.heartbeat_answered(now_);
  }

  TimePoint now_{1h};
  CoordinatorRegistration registration_{{"a:1"}, /*member=*/true, /*seed=*/1};
};

TEST_F(Registration, AMemberRegistersAnnouncesAndSendsHeartbeats) {
  EXPECT_FALSE(registration_.is_registered());
  connect_and_register();
  EXPECT_TRUE(registration_.is_registered());
  beat();
  const TimePoint beaten = now_;
  ASSERT_EQ(step_after_wait(), Step::kHeartbeat);
  EXPECT_EQ(now_ - beaten, 250ms);
}

TEST_F(Registration, TheIntervalsOfTheCoordinatorAreBounded) {
  ASSERT_EQ(step(), Step::kConnect);
  registration_.connected(now_);
  registration_.registered(0, 4'000'000'000, now_);
  EXPECT_EQ(registration_.ttl(), 60s);
  announce();
  beat();
  const TimePoint beaten = now_;
  ASSERT_EQ(step_after_wait(), Step::kHeartbeat);
  EXPECT_EQ(now_ - beaten, 10ms);
}

TEST_F(Registration, AChangeIsAnnouncedAtOnceAfterAHeartbeat) {
  connect_and_register();
  beat();
  ASSERT_EQ(step(), Step::kWait);
  registration_.copies_changed();
  beat();
  announce();
  EXPECT_EQ(step(), Step::kWait);
}

TEST_F(Registration, AChangeDuringAnAnnouncementNeedsAnotherOne) {
  connect_and_register();
  beat();
  registration_.copies_changed();
  beat();
  ASSERT_EQ(step(), Step::kAnnounce);
  registration_.begin_announcement();
  registration_.copies_changed();
  registration_.announced(false, now_);
  beat();
  announce();
}

TEST_F(Registration, AnAnnouncementThatIsNotDurableComesAgainOnTheSameConnection) {
  ASSERT_EQ(step(), Step::kConnect);
  registration_.connected(now_);
  registration_.registered(250, 2000, now_);
  announce(/*again=*/true);
  const TimePoint refused = now_;
  beat();
  for (;;) {
    ASSERT_EQ(step_after_wait(), Step::kHeartbeat);
    registration_.heartbeat_answered(now_);
    if (step() == Step::kAnnounce) break;
    ASSERT_LT(now_ - refused, 2s);
  }
  EXPECT_GE(now_ - refused, 1s);
  announce();
  EXPECT_EQ(step(), Step::kWait);
}

TEST_F(Registration, PausesGrowAndStayBoundedUntilAConnectionIsStable) {
  std::chrono::nanoseconds longest{0};
  for (int attempt = 0; attempt < 20; ++attempt) {
    ASSERT_EQ(step(), Step::kConnect);
    EXPECT_EQ(registration_.lost(kRefused, now_), attempt == 0) << "only the first is logged";
    const TimePoint failed = now_;
    ASSERT_EQ(step_after_wait(), Step::kConnect);
    EXPECT_GE(now_ - failed, 50ms);
    EXPECT_LE(now_ - failed, 1s);
    longest = std::max(longest, now_ - failed);
  }
  EXPECT_GE(longest, 500ms);
  connect_and_register();
  now_ += 3s;
  EXPECT_TRUE(registration_.lost(kRefused, now_)) << "a stable connection starts anew";
  const TimePoint failed = now_;
  ASSERT_EQ(step_after_wait(), Step::kConnect);
  EXPECT_LE(now_ - failed, 100ms);
}

TEST_F(Registration, AChangeDoesNotShortenAPause) {
  ASSERT_EQ(step(), Step::kConnect);
  registration_.lost(kRefused, now_);
  registration_.copies_changed();
  EXPECT_EQ(step(), Step::kWait);
}

TEST_F(Registration, AfterALossItRegistersAndAnnouncesAgain) {
  connect_and_register();
  beat();
  registration_.lost(kRefused, now_);
  EXPECT_FALSE(registration_.is_registered());
  EXPECT_EQ(registration_.last_error().message(), "connection refused");
  ASSERT_EQ(step_after_wait(), Step::kConnect);
  connect_and_register();
  beat();
}

TEST_F(Registration, AnswersAfterALossChangeNothing) {
  connect_and_register();
  ASSERT_EQ(step(), Step::kHeartbeat);
  registration_.lost(kRefused, now_);
  registration_.heartbeat_answered(now_);
  registration_.announced(true, now_);
  registration_.registered(250, 2000, now_);
  EXPECT_EQ(step(), Step::kWait);
  EXPECT_FALSE(registration_.is_registered());
}

TEST_F(Registration, AStoppedOneDoesNothingMore) {
  connect_and_register();
  registration_.stop();
  EXPECT_EQ(step(), Step::kStop);
  EXPECT_FALSE(registration_.lost(kRefused, now_));
  registration_.copies_changed();
  EXPECT_EQ(step(), Step::kStop);
}

TEST(RegistrationOfSeveral, AllAddressesAreTriedBeforeAPause) {
  CoordinatorRegistration registration({"a:1", "b:1", "c:1"}, true, 1);
  const TimePoint now{1h};
  for (const char* address : {"a:1", "b:1", "c:1"}) {
    ASSERT_EQ(registration.next(now).step, Step::kConnect);
    EXPECT_EQ(registration.address(), address);
    EXPECT_LT(registration.connect_deadline(), 1s);
    registration.lost(kRefused, now);
  }
  const auto pause = registration.next(now);
  ASSERT_EQ(pause.step, Step::kWait);
  EXPECT_EQ(registration.next(pause.until).step, Step::kConnect);
  EXPECT_EQ(registration.address(), "a:1");
}

TEST(RegistrationOfSeveral, ACoordinatorThatIsLostIsNotTheNextOne) {
  CoordinatorRegistration registration({"a:1", "b:1"}, true, 1);
  const TimePoint now{1h};
  ASSERT_EQ(registration.next(now).step, Step::kConnect);
  registration.connected(now);
  registration.lost(kRefused, now);
  EXPECT_EQ(registration.next(now).step, Step::kWait);
  EXPECT_EQ(registration.address(), "b:1");
}

TEST(RegistrationOfACommand, ItKeepsAConnectionAndDoesNotRegister) {
  CoordinatorRegistration registration({"a:1"}, /*member=*/false, 1);
  const TimePoint now{1h};
  ASSERT_EQ(registration.next(now).step, Step::kConnect);
  registration.connected(now);
  EXPECT_FALSE(registration.is_registered());
  registration.copies_changed();
  EXPECT_EQ(registration.next(now).step, Step::kWait);
  EXPECT_EQ(registration.next(now + 1s).step, Step::kWait);
}

TEST(RegistrationOfACommand, AWrongNameOrSecretIsHopeless) {
  CoordinatorRegistration registration({"a:1"}, false, 1);
  EXPECT_FALSE(registration.hopeless());
  registration.lost({ErrorCode::kDenied, "wrong secret"}, TimePoint{1h});
  EXPECT_TRUE(registration.hopeless());
  registration.lost(kRefused, TimePoint{2h});
  EXPECT_FALSE(registration.hopeless());
}

class WithCoordinator : public ::testing::Test {
 protected:
  using Answer = Result<std::string>;

  void SetUp() override {
    serve(proto::COORDINATOR_REGISTER, [](const std::string&) -> Answer {
      proto::RegisterResponse response;
      response.set_epoch(1);
      response.set_heartbeat_interval_ms(10);
      response.set_ttl_ms(10'000);
      return response.SerializeAsString();
    });
    serve(proto::COORDINATOR_HEARTBEAT, [](const std::string&) -> Answer {
      proto::HeartbeatResponse response;
      response.set_epoch(1);
      return response.SerializeAsString();
    });
    serve(proto::COORDINATOR_ANNOUNCE, [this](const std::string&) { return announced(); });
    serve(proto::COORDINATOR_RESOLVE, [this](const std::string&) { return resolve_(++resolved_); });
    const auto address = server_->listen("127.0.0.1:0");
    ASSERT_TRUE(address) << address.error().message();
    CoreOptions options;
    options.node_id = "a";
    options.store_directory = store_ / "store";
    options.store_budget_bytes = 1 << 20;
    options.coordinator = *address;
    auto core = AgentCore::create(loop_.executor(), options);
    ASSERT_TRUE(core) << core.error().message();
    core_ = std::move(*core);
    core_->connect_coordinator("", "127.0.0.1:7400");
  }
  void TearDown() override {
    if (core_ != nullptr) loop_.run(core_->stop());
    loop_.run(server_->close(5s));
  }

  void serve(proto::Method method, std::function<Answer(const std::string&)> handler) {
    server_->handle_at_once(
        method,
        [handler = std::move(handler)](const rpc::Peer&, const std::string& body) -> Answer {
          return handler(body);
        });
  }
  Answer announced() {
    ++announced_;
    proto::AnnounceResponse response;
    if (announced_ <= refusals_) {
      auto& conflict = *response.add_conflicts();
      conflict.set_why("no space left");
      conflict.set_again(true);
    }
    return response.SerializeAsString();
  }
  static Answer version(std::uint64_t number) {
    proto::ResolveResponse response;
    *response.mutable_id() = rpc::to_proto(ModelVersion{"m", number});
    return response.SerializeAsString();
  }
  Result<ModelVersion> newest() {
    WorkerHost host(*core_);
    return loop_.run(host.newest("m"));
  }

  rekindle::testing::TempDir store_;
  rpc::testing::Loop loop_;
  std::unique_ptr<rpc::RpcServer> server_ = rpc::RpcServer::create(
      loop_.executor(), rpc::testing::make_identity(proto::ROLE_COORDINATOR, "coordinator"));
  std::function<Answer(int)> resolve_ = [](int) { return version(1); };
  int resolved_ = 0;
  int announced_ = 0;
  int refusals_ = 0;
  std::unique_ptr<AgentCore> core_;
};

TEST_F(WithCoordinator, TheNewestVersionIsAskedForAgainWhileItIsNotKnownYet) {
  resolve_ = [](int asked) {
    return asked < 3 ? Answer(fail(ErrorCode::kUnavailable, "just started")) : version(7);
  };
  const auto id = newest();
  ASSERT_TRUE(id) << id.error().message();
  EXPECT_EQ(*id, (ModelVersion{"m", 7}));
  EXPECT_EQ(resolved_, 3);
}

TEST_F(WithCoordinator, WhereNothingIsReadyTheWorkerIsToldToPublish) {
  resolve_ = [](int) { return Answer(fail(ErrorCode::kNotFound, "no live agent holds it")); };
  const auto id = newest();
  ASSERT_FALSE(id);
  EXPECT_EQ(id.error().code(), ErrorCode::kNotFound);
  EXPECT_THAT(id.error().message(), HasSubstr("no version of m is ready in the fleet; publish"));
}

TEST_F(WithCoordinator, WhatCouldNotBeMadeDurableIsAnnouncedAgainOverTheSameConnection) {
  refusals_ = 1;
  loop_.run_until([&] { return announced_ == 2; });
  EXPECT_EQ(server_->connection_count(), 1u);
}

}  // namespace
}  // namespace rekindle::agent
