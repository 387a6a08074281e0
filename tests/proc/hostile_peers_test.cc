// Attacks on real daemons by peers that speak the protocol as they like, each while an honest
// command works. S9 to S13 are the numbers of the attacks.
#include <cstdlib>
#include <fstream>
#include <set>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/drill.pb.h"
#include "proto/trace.pb.h"
#include "src/base/units.h"
#include "tests/support/dripping_source.h"
#include "tests/support/fleet.h"
#include "tests/support/hostile_peer.h"
#include "tests/support/numbered_digest.h"

namespace rekindle::testing {
namespace {

using rpc::testing::DrippingSource;
using rpc::testing::hostile_identity;
using rpc::testing::HostilePeer;
using rpc::testing::request;
using ::testing::HasSubstr;

constexpr const char* kAttacker = "127.0.0.9";
constexpr std::uint32_t kCallMs = 20'000;

std::uint64_t peak_resident(pid_t pid) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoull(line.substr(6)) * kKiB;
  }
  return 0;
}

// One that calls, too.
class Attacker {
 public:
  explicit Attacker(const std::string& address, proto::Role role = proto::ROLE_AGENT)
      : identity_(hostile_identity(role, "hostile")), peer_(address, kAttacker) {}
  bool greet() { return peer_.connected() && peer_.greet(identity_); }
  HostilePeer& peer() { return peer_; }
  const rpc::Identity& identity() const { return identity_; }
  const std::string& refusal() const { return peer_.refusal(); }

  template <typename Response>
  Result<Response> call(proto::Method method, const google::protobuf::MessageLite& body) {
    if (!peer_.send(request(++calls_, method, kCallMs, body.SerializeAsString()))) {
      return fail(ErrorCode::kPeerLost, "the server has closed the connection");
    }
    TRY(const std::string answer, peer_.answer());
    return rpc::parse_body<Response>(answer);
  }
  template <typename Request>
  Request as_self() const {
    Request request;
    request.set_node_id(identity_.node_id);
    request.set_incarnation(identity_.incarnation.to_bytes());
    return request;
  }
  Result<void> join() {
    proto::RegisterRequest enroll;
    enroll.mutable_node()->set_node_id(identity_.node_id);
    enroll.mutable_node()->set_incarnation(identity_.incarnation.to_bytes());
    enroll.mutable_node()->set_control_endpoint("127.0.0.9:1");
    enroll.mutable_node()->set_host_id("hostile");
    TRY_VOID(call<proto::RegisterResponse>(proto::COORDINATOR_REGISTER, enroll));
    return {};
  }

 private:
  const rpc::Identity identity_;
  HostilePeer peer_;
  std::uint64_t calls_ = 0;
};

class HostilePeers : public ::testing::Test {
 protected:
  void SetUp() override {
    rpc::testing::allow_many_descriptors();
    fleet_.start_coordinator("127.0.0.1", {}, without_quarantine());
    make_checkpoint(fleet_.dir("model"), 2, 512, 5);
    fleet_.start_agent("a");
    fleet_.publish("a", "m@1", fleet_.dir("model"));
  }
  // AddressSanitizer keeps 256 MB of what a process has freed, and tests here measure its memory.
  static std::vector<std::string> without_quarantine() {
    const char* const options = std::getenv("ASAN_OPTIONS");
    return {"env", fmt::format("ASAN_OPTIONS={}:quarantine_size_mb=1", options ? options : "")};
  }
  // A whole new pull, through the coordinator.
  void expect_a_pull() {
    const auto to = fleet_.dir(fmt::format("copy-{}", ++copies_));
    const auto answer =
        fleet_.run_command({"pull", "m@1", "--to", to.string(), "--transport", "tcp"});
    ASSERT_EQ(answer.exit_code, 0) << answer.err;
    EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), to), "");
  }
  pid_t agent() { return fleet_.agent("a").process->pid(); }

  Fleet fleet_;
  int copies_ = 0;
};

TEST_F(HostilePeers, S9OversizeAnnouncesLeaveMemoryAndOtherCallersAlone) {
  const pid_t coordinator = fleet_.coordinator().pid();
  const std::uint64_t before = peak_resident(coordinator);
  std::vector<std::thread> attackers;
  std::atomic<bool> enough = false;
  std::atomic<int> refused = 0;
  for (const std::size_t size : {16u << 20, 16u << 20, 4u << 20, 4u << 20}) {
    attackers.emplace_back([&, size] {
      std::string parts;
      while (parts.size() < size - 1024) parts += std::string_view("\x2a\0", 2);
      const auto frame = request(1, proto::COORDINATOR_ANNOUNCE, kCallMs, parts);
      do {
        Attacker attacker(fleet_.coordinator_address());
        if (!attacker.greet()) continue;
        (void)attacker.peer().send(frame);
        if (!attacker.peer().answer()) ++refused;
      } while (!enough);
    });
  }
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(fleet_.run_command({"status"}).exit_code, 0);
    expect_a_pull();
  }
  enough = true;
  for (auto& attacker : attackers) attacker.join();
  EXPECT_GE(refused, 4);
  // Of the four frames at a time that are received, and nothing for their parts.
  EXPECT_LT(peak_resident(coordinator), before + 128 * kMiB);
}

TEST_F(HostilePeers, S10VersionsOfOneMemberAreCapped) {
  Attacker attacker(fleet_.coordinator_address());
  ASSERT_TRUE(attacker.greet());
  ASSERT_TRUE(attacker.join());
  int taken = 0;
  std::string why;
  for (std::uint64_t version = 1; version <= 300; ++version) {
    auto claim = attacker.as_self<proto::PublishRequest>();
    *claim.mutable_id() = rpc::to_proto(ModelVersion{"squatted", version});
    *claim.mutable_root() = rpc::to_proto(test::numbered_digest(version, 1));
    *claim.mutable_tensor_set() = rpc::to_proto(test::numbered_digest(version, 2));
    claim.set_checkpoint_bytes(1);
    const auto answer = attacker.call<proto::PublishResponse>(proto::COORDINATOR_PUBLISH, claim);
    if (answer) {
      ++taken;
    } else {
      why = answer.error().message();
    }
  }
  EXPECT_EQ(taken, 256);
  EXPECT_THAT(why, HasSubstr("--max-open-claims"));
  fleet_.publish("a", "m@2", fleet_.dir("model"));
  expect_a_pull();
}

TEST_F(HostilePeers, S10TheMemoryForAMemberIsCapped) {
  const pid_t coordinator = fleet_.coordinator().pid();
  Attacker attacker(fleet_.coordinator_address());
  ASSERT_TRUE(attacker.greet());
  ASSERT_TRUE(attacker.join());
  const std::uint64_t before = peak_resident(coordinator);
  std::string why;
  for (std::uint64_t number = 0; number < 60; ++number) {
    auto announce = attacker.as_self<proto::AnnounceRequest>();
    for (std::uint64_t version = 0; version < 24; ++version) {
      auto& holding = *announce.add_add();
      *holding.mutable_id() = rpc::to_proto(ModelVersion{"m", 1000 + number * 100 + version});
      *holding.mutable_root() = rpc::to_proto(test::numbered_digest(1));
      *holding.mutable_layout() = rpc::to_proto(test::numbered_digest(2));
      holding.set_checkpoint_tiles(1u << 30);
      for (std::uint32_t run = 0; run < 16'000; ++run) {
        holding.mutable_held()->add_begin(run * 3);
        holding.mutable_held()->add_end(run * 3 + 1);
      }
    }
    const auto answer =
        attacker.call<proto::AnnounceResponse>(proto::COORDINATOR_ANNOUNCE, announce);
    if (!answer) why = answer.error().message();
  }
  EXPECT_THAT(why, HasSubstr("are allowed"));
  EXPECT_LT(peak_resident(coordinator), before + 128 * kMiB);
  expect_a_pull();
}

TEST_F(HostilePeers, S11OneAddressDoesNotGetAllConnections) {
  for (const auto& port : {fleet_.coordinator_address(), fleet_.agent("a").control}) {
    std::vector<std::unique_ptr<Attacker>> greeted;
    std::string why;
    for (int i = 0; i < 1100; ++i) {
      auto attacker = std::make_unique<Attacker>(port);
      if (attacker->greet()) {
        greeted.push_back(std::move(attacker));
      } else {
        why = attacker->refusal();
      }
    }
    EXPECT_EQ(greeted.size(), 1024u);
    EXPECT_THAT(why, HasSubstr("127.0.0.9 has 1024 connections"));
    expect_a_pull();
  }
}

class ReadingAttacker : public Attacker {
 public:
  explicit ReadingAttacker(const std::string& address) : Attacker(address, proto::ROLE_PULLER) {}

  Result<proto::OpenDirectResponse> find() {
    proto::OpenDirectRequest ask;
    ask.set_model("m");
    ask.set_version(1);
    ask.set_puller_incarnation(identity().incarnation.to_bytes());
    return call<proto::OpenDirectResponse>(proto::AGENT_OPEN_DIRECT, ask);
  }
  Result<proto::OpenSessionResponse> open(const proto::OpenDirectResponse& found) {
    const auto& source = found.sources(0);
    proto::OpenSessionRequest open;
    open.set_source_incarnation(source.node().incarnation());
    *open.mutable_id() = found.id();
    *open.mutable_root() = found.root();
    *open.mutable_layout() = source.layout();
    *open.mutable_grant() = source.grant();
    open.add_transports("tcp");
    return call<proto::OpenSessionResponse>(proto::AGENT_OPEN_SESSION, open);
  }
};

TEST_F(HostilePeers, S11OneAddressDoesNotGetAllPullerSessions) {
  std::vector<std::unique_ptr<ReadingAttacker>> attackers;
  int sessions = 0;
  std::string why;
  for (int i = 0; i < 4; ++i) {
    attackers.push_back(std::make_unique<ReadingAttacker>(fleet_.agent("a").control));
    ASSERT_TRUE(attackers.back()->greet());
    const auto found = attackers.back()->find();
    ASSERT_TRUE(found) << found.error().message();
    for (int j = 0; j < 20; ++j) {
      const auto opened = attackers.back()->open(*found);
      if (opened) {
        ++sessions;
      } else {
        why = opened.error().message();
      }
    }
  }
  EXPECT_GE(sessions, 8);
  EXPECT_LE(sessions, 16);
  EXPECT_THAT(why, HasSubstr("127.0.0.9 has"));
  expect_a_pull();
}

TEST(HostileReaders, AnAgentShowsOnlyModelsThatTheCallerMayRead) {
  Fleet fleet;
  write_file(fleet.dir("rights"), R"({"rights": [
      {"principals": ["unproven"], "verbs": ["publish"]},
      {"principals": ["unproven"], "verbs": ["read"], "models": ["open"]}]})");
  fleet.start_coordinator("127.0.0.1", {"--rights", fleet.dir("rights").string()});
  make_checkpoint(fleet.dir("model"), 1, 64, 5);
  fleet.start_agent("a");
  fleet.publish("a", "open@1", fleet.dir("model"));
  // The coordinator does not show it to this test either.
  const auto published = fleet.run_command({"publish", "secret@1", fleet.dir("model").string(),
                                            "--store", fleet.agent("a").store.string()});
  ASSERT_EQ(published.exit_code, 0) << published.err;
  Attacker attacker(fleet.agent("a").control, proto::ROLE_CLIENT);
  ASSERT_TRUE(attacker.greet());
  const auto status =
      attacker.call<proto::AgentStatusResponse>(proto::AGENT_STATUS, proto::AgentStatusRequest());
  ASSERT_TRUE(status) << status.error().message();
  ASSERT_EQ(status->holdings_size(), 1);
  EXPECT_EQ(status->holdings(0).id().model(), "open");
  EXPECT_EQ(status->node().node_id(), "a");
  EXPECT_EQ(status->DebugString().find("secret"), std::string::npos);
  proto::TraceRequest trace;
  trace.set_operation("pull");
  const auto found = attacker.call<proto::TraceResponse>(proto::FIND_TRACE, trace);
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(found.error().message(), HasSubstr("may not read all models"));
}

TEST(HostileDrills, AnAgentFailsForThoseOnlyWhoMayAdministrate) {
  Fleet fleet;
  write_file(fleet.dir("rights"), R"({"rights": [
      {"principals": ["unproven"], "verbs": ["publish", "read"]}]})");
  fleet.start_coordinator("127.0.0.1", {"--rights", fleet.dir("rights").string()});
  fleet.start_agent("a", {"--allow-drills"});
  Attacker attacker(fleet.agent("a").control, proto::ROLE_CLIENT);
  ASSERT_TRUE(attacker.greet());
  proto::DrillRequest kill;
  kill.mutable_kill_self();
  proto::DrillRequest freeze;
  freeze.mutable_freeze()->set_milliseconds(3000);
  proto::DrillRequest routes;
  routes.mutable_list_routes();
  proto::DrillRequest bench;
  bench.mutable_open_bench()->add_transports("tcp");
  for (const auto& drill : {kill, freeze, routes, bench}) {
    const auto done = attacker.call<proto::DrillResponse>(proto::DRILL, drill);
    ASSERT_FALSE(done) << drill.DebugString();
    EXPECT_EQ(done.error().code(), ErrorCode::kDenied) << drill.DebugString();
    EXPECT_THAT(done.error().message(), HasSubstr("`admin`"));
  }
  EXPECT_TRUE(fleet.agent("a").process->running());
  write_file(fleet.dir("rights"), R"({"rights": [
      {"principals": ["unproven"], "verbs": ["read", "admin"]}]})");
  fleet.coordinator().signal(SIGHUP);
  EXPECT_TRUE(eventually(
      [&] { return attacker.call<proto::DrillResponse>(proto::DRILL, routes).has_value(); }));
}

TEST_F(HostilePeers, S12ASourceThatDripsMetadataHoldsUpNoPullThatHasAnotherOne) {
  DrippingSource::Options options;
  options.coordinator = fleet_.coordinator_address();
  options.version = {"m", 1};
  const DrippingSource drip(options);
  // Which source a pull asks first depends on its incarnation.
  for (int i = 0; i < 40 && drip.asked() == 0; ++i) expect_a_pull();
  EXPECT_GT(drip.asked(), 0) << "no pull has asked it";
  expect_a_pull();
}

// A call for numbers of one tile, which the agent hashes as a whole for each of them.
Result<std::string> costly_proofs(ReadingAttacker& attacker) {
  TRY(const auto found, attacker.find());
  TRY(const auto session, attacker.open(found));
  proto::ProveRangesRequest prove;
  prove.set_token(session.token());
  *prove.mutable_root() = found.root();
  *prove.mutable_layout() = found.sources(0).layout();
  for (int i = 0; i < 1024; ++i) {
    auto& item = *prove.add_items();
    // Tile 0 is the config file.
    item.set_tile(1);
    for (const std::uint32_t from : {0u, 0u}) item.add_offset(from);
    for (const std::uint32_t size : {1u, 1u}) item.add_extent(size);
  }
  return prove.SerializeAsString();
}

TEST_F(HostilePeers, S13HashingForACallerEndsWhenTheCallerGoes) {
  {
    std::vector<std::unique_ptr<ReadingAttacker>> attackers;
    for (int i = 0; i < 4; ++i) {
      attackers.push_back(std::make_unique<ReadingAttacker>(fleet_.agent("a").control));
      ASSERT_TRUE(attackers.back()->greet());
      const auto proofs = costly_proofs(*attackers.back());
      ASSERT_TRUE(proofs) << proofs.error().message();
      for (std::uint64_t id = 100; id < 160; ++id) {
        ASSERT_TRUE(attackers.back()->peer().send(
            request(id, proto::AGENT_PROVE_RANGES, 300'000, *proofs)));
      }
    }
    // The agent is at it.
    const auto busy = [&] { return cpu_time(agent()).total_s(); };
    const auto begin = busy();
    ASSERT_TRUE(eventually([&] { return busy() > begin + 0.2; }));
  }
  EXPECT_TRUE(eventually([&] {
    const auto ticks = cpu_time(agent()).total_s();
    std::this_thread::sleep_for(300ms);
    return cpu_time(agent()).total_s() == ticks;
  })) << "nobody waits for the other tiles";
  expect_a_pull();
}

}  // namespace
}  // namespace rekindle::testing
