// Agents and pullers that die, fill up or run dry.
#include <thread>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <gtest/gtest.h>

#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

class AgentFaults : public ::testing::Test {
 protected:
  void SetUp() override { fleet_.start_coordinator(); }
  Fleet fleet_;
  std::size_t sessions_ = 0;
};

std::vector<UniqueFd> flood(const std::string& address, int count) {
  sockaddr_in target{};
  target.sin_family = AF_INET;
  target.sin_port =
      htons(static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  target.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::vector<UniqueFd> sockets;
  for (int i = 0; i < count; ++i) {
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    (void)connect(fd.get(), reinterpret_cast<sockaddr*>(&target), sizeof target);
    sockets.push_back(std::move(fd));
  }
  return sockets;
}

// Row 52, and invariant 3: a verified tile is never fetched again.
TEST_F(AgentFaults, Row52PullKilledHalfwayResumesWhereItWas) {
  const auto total = make_checkpoint(fleet_.dir("model"), 12, 4096, 3);
  fleet_.start_agent("a", {"--max-rate", "24MB"});
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  const std::vector<std::string> pull = {"pull",        "m@1", "--to", fleet_.dir("out").string(),
                                         "--transport", "tcp"};
  {
    Process first(fleet_.command(pull));
    ASSERT_TRUE(fleet_.agent("a").process->wait_for_err("session.open"));
    std::this_thread::sleep_for(1200ms);
    ASSERT_TRUE(first.running()) << first.out() << first.err();
    first.kill();
  }
  const auto answer = fleet_.run_command(pull);
  ASSERT_EQ(answer.exit_code, 0) << answer.err;
  EXPECT_GT(answer.json["resumed_bytes"], 0);
  EXPECT_EQ(answer.json["resumed_bytes"].get<std::uint64_t>() +
                answer.json["fetched_bytes"].get<std::uint64_t>(),
            answer.json["bytes"].get<std::uint64_t>());
  EXPECT_GE(answer.json["bytes"], total);
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
}

// Ctrl-C, and what service managers send.
TEST_F(AgentFaults, InterruptedPullSaysSoAndKeepsWhatHasVerified) {
  make_checkpoint(fleet_.dir("model"), 12, 4096, 3);
  fleet_.start_agent("a", {"--max-rate", "24MB"});
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  for (const int signal : {SIGINT, SIGTERM}) {
    const auto out = fleet_.dir("out-" + std::to_string(signal)).string();
    const std::vector<std::string> pull = {"pull", "m@1", "--to", out, "--transport", "tcp"};
    Process first(fleet_.command(pull));
    ASSERT_TRUE(eventually([&] { return fleet_.agent("a").sessions_opened() > sessions_; }));
    sessions_ = fleet_.agent("a").sessions_opened();
    std::this_thread::sleep_for(1200ms);
    first.signal(signal);
    const auto exit = first.wait();
    ASSERT_TRUE(exit);
    EXPECT_EQ(exit->code, 128 + signal) << first.err();
    EXPECT_NE(first.err().find("interrupted; verified bytes are kept"), std::string::npos)
        << first.err();
    EXPECT_FALSE(std::filesystem::exists(std::filesystem::path(out) / "model.safetensors"));
    const auto answer = fleet_.run_command(pull);
    ASSERT_EQ(answer.exit_code, 0) << answer.err;
    sessions_ = fleet_.agent("a").sessions_opened();
    EXPECT_GT(answer.json["resumed_bytes"], 0);
    EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), out), "");
  }
}

TEST_F(AgentFaults, PullInterruptedAtItsAgentStopsThereToo) {
  make_checkpoint(fleet_.dir("model"), 12, 4096, 3);
  fleet_.start_agent("a", {"--max-rate", "24MB"});
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  fleet_.start_agent("b");
  const std::vector<std::string> pull = {"pull",        "m@1", "--store", fleet_.agent("b").store,
                                         "--transport", "tcp"};
  Process first(fleet_.command(pull));
  ASSERT_TRUE(fleet_.agent("a").process->wait_for_err("session.open"));
  std::this_thread::sleep_for(1200ms);
  first.signal(SIGINT);
  const auto exit = first.wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 128 + SIGINT) << first.err();
  EXPECT_TRUE(fleet_.agent("a").process->wait_for_err("session.end"));
  const auto answer = fleet_.run_command(pull);
  ASSERT_EQ(answer.exit_code, 0) << answer.err;
  EXPECT_GT(answer.json["resumed_bytes"], 0);
}

// By another process: a fault of this host, not of the source.
TEST_F(AgentFaults, DestinationTruncatedEndsThatPullOnly) {
  make_checkpoint(fleet_.dir("model"), 12, 4096, 3);
  fleet_.start_agent("a", {"--max-rate", "24MB"});
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  auto& agent = fleet_.start_agent("b");
  const std::vector<std::string> pull = {"pull",      "m@1",         "--store",
                                         agent.store, "--transport", "tcp"};
  Process first(fleet_.command(pull));
  ASSERT_TRUE(fleet_.agent("a").process->wait_for_err("session.open"));
  std::this_thread::sleep_for(500ms);
  const auto partial = find_file(agent.store, "model.safetensors.partial");
  std::filesystem::resize_file(partial, 1 << 20);
  const auto exit = first.wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 1) << first.err();
  for (const auto& part : {partial.string(), std::string("start the same command again")}) {
    EXPECT_NE(first.err().find(part), std::string::npos) << first.err();
  }
  EXPECT_TRUE(agent.process->running());
  const auto answer = fleet_.run_command(pull);
  ASSERT_EQ(answer.exit_code, 0) << answer.err;
  EXPECT_EQ(answer.json["sources"][0]["name"], "a") << answer.json;
  EXPECT_FALSE(answer.json["sources"][0]["lost"]) << answer.json;
  EXPECT_EQ(fleet_.run_command({"verify", answer.json["path"]}).exit_code, 0);
  EXPECT_EQ(agent.process->err().find("source_lost"), std::string::npos) << agent.process->err();
}

TEST_F(AgentFaults, AgentToldToStopDuringAPullEndsItAndExits) {
  make_checkpoint(fleet_.dir("model"), 12, 4096, 3);
  fleet_.start_agent("a", {"--max-rate", "24MB"});
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  fleet_.start_agent("b");
  Process pull(
      fleet_.command({"pull", "m@1", "--store", fleet_.agent("b").store, "--transport", "tcp"}));
  ASSERT_TRUE(fleet_.agent("a").process->wait_for_err("session.open"));
  std::this_thread::sleep_for(500ms);
  // The source, too, while it serves.
  for (const std::string name : {"b", "a"}) fleet_.agent(name).process->signal(SIGTERM);
  for (const std::string name : {"b", "a"}) {
    EXPECT_EQ(fleet_.agent(name).process->wait(), (Exit{.code = 0})) << name;
  }
  const auto exit = pull.wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 5) << pull.err();
}

TEST_F(AgentFaults, FrozenAgentDoesNotHoldItsCallers) {
  make_checkpoint(fleet_.dir("model"), 12, 4096, 3);
  fleet_.start_agent("a", {"--max-rate", "8MB"});
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  fleet_.start_agent("b");
  Process pull(
      fleet_.command({"pull", "m@1", "--store", fleet_.agent("b").store, "--transport", "tcp"}));
  ASSERT_TRUE(fleet_.agent("a").process->wait_for_err("session.open"));
  fleet_.agent("b").process->signal(SIGSTOP);
  const auto exit = pull.wait();
  fleet_.agent("b").process->signal(SIGCONT);
  ASSERT_TRUE(exit) << "it hangs";
  EXPECT_EQ(exit->code, 5) << pull.err();
}

TEST_F(AgentFaults, Row52KilledAgentReAdoptsItsStore) {
  make_checkpoint(fleet_.dir("model"), 2, 1024, 5);
  fleet_.start_agent("a");
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  fleet_.agent("a").process->kill();
  fleet_.start_agent("a");
  EXPECT_TRUE(eventually([&] {
    return fleet_.run_command({"pull", "m", "--to", fleet_.dir("out").string()}).exit_code == 0;
  }));
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
}

// Row 8: at every step of the commit; the next try finds all bytes there.
TEST_F(AgentFaults, Row8PullKilledAtCommitIsOldOrNewNeverHalf) {
  make_checkpoint(fleet_.dir("model"), 2, 1024, 5);
  fleet_.start_agent("a");
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  for (const std::string step :
       {"store.commit.start", "store.commit.after_manifest", "store.commit.between_segments",
        "store.commit.before_manifest_rename", "store.commit.after_manifest_rename"}) {
    SCOPED_TRACE(step);
    const auto store = fleet_.dir("store-" + step).string();
    Spawn spawn = fleet_.command({"pull", "m@1", "--store", store});
    spawn.env = {{"REKINDLE_FAILPOINTS", step + "=kill"}};
    EXPECT_EQ(run(std::move(spawn)).exit.signal, SIGKILL);
    const auto answer = fleet_.run_command({"pull", "m@1", "--store", store});
    ASSERT_EQ(answer.exit_code, 0) << answer.err;
    EXPECT_EQ(answer.json["fetched_bytes"], 0);
    const auto verified = fleet_.run_command({"verify", answer.json["path"].get<std::string>()});
    EXPECT_EQ(verified.exit_code, 0) << verified.err;
  }
}

TEST_F(AgentFaults, Row49FullStoreKeepsWhatItHasAndNamesTheBytes) {
  make_checkpoint(fleet_.dir("small"), 2, 1024, 5);
  make_checkpoint(fleet_.dir("large"), 12, 4096, 6);
  fleet_.start_agent("a", {"--budget", "32M"});
  fleet_.publish("a", "m@1", fleet_.dir("small"));
  const auto refused = fleet_.run_command({"publish", "m@2", fleet_.dir("large").string(),
                                           "--store", fleet_.agent("a").store.string()});
  EXPECT_EQ(refused.exit_code, 6) << refused.err;
  EXPECT_NE(refused.err.find("MiB"), std::string::npos) << refused.err;
  EXPECT_EQ(fleet_.run_command({"pull", "m@1", "--to", fleet_.dir("out").string()}).exit_code, 0);
}

TEST_F(AgentFaults, Row50AgentOutOfDescriptorsShedsLoadAndRecovers) {
  make_checkpoint(fleet_.dir("model"), 2, 1024, 5);
  fleet_.start_agent("a");
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  auto& agent = fleet_.agent("a");
  const rlimit few{48, 48};
  ASSERT_EQ(prlimit(agent.process->pid(), RLIMIT_NOFILE, &few, nullptr), 0);
  {
    const auto control = flood(agent.control, 100);
    const auto data = flood(agent.data, 100);
    std::this_thread::sleep_for(500ms);
    EXPECT_TRUE(agent.process->running());
  }
  EXPECT_TRUE(eventually([&] {
    return fleet_.run_command({"pull", "m@1", "--to", fleet_.dir("out").string()}).exit_code == 0;
  }));
}

TEST_F(AgentFaults, Row51PortInUseIsNamed) {
  auto& first = fleet_.start_agent("a");
  const auto second = run({REKINDLE_BINARY, "agent", "--listen", first.control, "--store",
                           fleet_.dir("other").string()});
  EXPECT_FALSE(second.timed_out);
  EXPECT_NE(second.exit.code, 0);
  EXPECT_NE(second.err.find(first.control), std::string::npos) << second.err;
}

TEST_F(AgentFaults, Row51UnknownCoordinatorHostIsNamed) {
  const auto answer = run({REKINDLE_BINARY, "pull", "m@1", "--coordinator",
                           "no-such-host.invalid:7300", "--store", fleet_.dir("other").string()});
  EXPECT_FALSE(answer.timed_out);
  EXPECT_NE(answer.exit.code, 0);
  EXPECT_NE(answer.err.find("coordinator"), std::string::npos) << answer.err;
}

TEST_F(AgentFaults, Row33SecondAgentOfTheSameNameIsRefusedTheFirstKeepsIt) {
  fleet_.start_agent("a");
  Process second(Spawn{.argv = {REKINDLE_BINARY, "agent", "--node-id", "a", "--listen",
                                "127.0.0.1:0", "--store", fleet_.dir("other").string(),
                                "--coordinator", fleet_.coordinator_address()}});
  EXPECT_TRUE(second.wait_for_err("in use by a live process")) << second.err();
  const auto status = fleet_.run_command({"status"});
  EXPECT_EQ(status.json["nodes"].size(), 1u) << status.json;
}

TEST_F(AgentFaults, SameVersionWithOtherBytesIsRefused) {
  make_checkpoint(fleet_.dir("model"), 2, 1024, 5);
  make_checkpoint(fleet_.dir("other"), 2, 1024, 6);
  fleet_.start_agent("a");
  fleet_.start_agent("b");
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  const auto answer = fleet_.run_command({"publish", "m@1", fleet_.dir("other").string(), "--store",
                                          fleet_.agent("b").store.string()});
  EXPECT_EQ(answer.exit_code, 7) << answer.err;
}

TEST_F(AgentFaults, PullStraightFromAPeerNeedsNoCoordinator) {
  make_checkpoint(fleet_.dir("model"), 2, 1024, 5);
  fleet_.start_agent("a");
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  fleet_.coordinator().kill();
  Spawn spawn{.argv = {REKINDLE_BINARY, "pull", "m", "--from", fleet_.agent("a").control, "--to",
                       fleet_.dir("out").string()}};
  const auto answer = run(std::move(spawn));
  EXPECT_EQ(answer.exit.code, 0) << answer.err;
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
}

}  // namespace
}  // namespace rekindle::testing
