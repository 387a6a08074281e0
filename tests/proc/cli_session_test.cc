#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/proc/cluster.h"

// A coordinator, agents and the commands against them.
namespace rekindle::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class CliSession : public ::testing::Test {
 protected:
  void SetUp() override {
    coordinator_ = start_coordinator(dir_ / "state");
    a_ = start_agent("a", dir_ / "a", coordinator_->address());
    b_ = start_agent("b", dir_ / "b", coordinator_->address());
    write_safetensors(dir_ / "in/model.safetensors",
                      {{"w", DType::kBF16, {512, 1024}}, {"x", DType::kF32, {7}}}, 3);
    write_file(dir_ / "in/config.json", "{\"model_type\": \"none\"}");
  }
  Finished publish(const std::string& id, const char* in = "in") {
    return rekindle({"publish", id, dir_ / in, "--store", dir_ / "a", "--json"});
  }
  TempDir dir_;
  std::unique_ptr<Daemon> coordinator_, a_, b_;
};

TEST_F(CliSession, PublishedOnOneHostPulledOnAnotherAndIntoADirectory) {
  const Finished published = publish("m@3");
  ASSERT_EQ(published.exit.code, 0) << published.err;
  const Finished pulled = rekindle({"pull", "m", "--store", dir_ / "b", "--json"});
  ASSERT_EQ(pulled.exit.code, 0) << pulled.err;
  EXPECT_EQ(json_of(pulled)["root"], json_of(published)["root"]);
  EXPECT_EQ(json_of(pulled)["version"], 3);
  // config.json is no tensor.
  EXPECT_EQ(json_of(published)["tensors"], 2);
  EXPECT_EQ(json_of(pulled)["tensors"], 2);

  const Finished copied = rekindle(
      {"pull", "m@3", "--to", dir_ / "out", "--coordinator", coordinator_->address(), "--json"});
  ASSERT_EQ(copied.exit.code, 0) << copied.err;
  // Which of the two is quick enough to be asked for so little is open.
  EXPECT_GE(json_of(copied)["sources"].size(), 1U);
  EXPECT_EQ(read_file(dir_ / "out/config.json"), read_file(dir_ / "in/config.json"));
  EXPECT_EQ(rekindle({"verify", dir_ / "out"}).exit.code, 0);

  const Json cluster =
      json_of(rekindle({"status", "--json", "--coordinator", coordinator_->address()}));
  EXPECT_EQ(cluster["nodes"].size(), 2U);
  EXPECT_EQ(cluster["versions"][0]["whole_copies"], 2);
  const Finished agent = rekindle({"status", "--store", dir_ / "b"});
  EXPECT_THAT(agent.out, ContainsRegex("m@3 +ready +whole"));
}

TEST(FleetEvents, ThoseOfACoordinatorThatHasLostItsStateAreAllFollowed) {
  TempDir dir;
  const std::string address = fmt::format("127.0.0.1:{}", free_port());
  const auto lead = [&](const char* state) {
    return std::make_unique<Daemon>(
        "coordinator", std::vector<std::string>{"--listen", address, "--state", dir / state});
  };
  auto coordinator = lead("first");
  Process follower(rekindle_spawn(
      {"events", "--fleet", "--follow", "--json", "--coordinator", coordinator->address()}));
  // The first event of a term, which is in the first epoch each time.
  const auto seen = [&] {
    std::size_t count = 0;
    const std::string out = follower.out();
    for (auto at = out.find("coordinator_leads"); at != std::string::npos;
         at = out.find("coordinator_leads", at + 1)) {
      ++count;
    }
    return count;
  };
  ASSERT_TRUE(eventually([&] { return seen() == 1; })) << follower.err();
  coordinator->process().kill();
  coordinator = lead("second");
  EXPECT_TRUE(eventually([&] { return seen() == 2; })) << follower.out() << follower.err();
}

TEST_F(CliSession, StraightFromAPeerWithoutACoordinator) {
  ASSERT_EQ(publish("m@3").exit.code, 0);
  // The model may come after --from, too.
  const Finished done =
      rekindle({"pull", "--to", dir_ / "out", "--from", a_->address(), "m@3", "--json"});
  ASSERT_EQ(done.exit.code, 0) << done.err;
  EXPECT_EQ(json_of(done)["sources"][0]["name"], "a");
  EXPECT_EQ(rekindle({"verify", dir_ / "out"}).exit.code, 0);
}

TEST_F(CliSession, ADryRunTransfersNothing) {
  ASSERT_EQ(publish("m@3").exit.code, 0);
  const std::vector<std::string> call = {
      "pull",     "m@3",      "--tensors",     "^w$",
      "--store",  dir_ / "c", "--coordinator", coordinator_->address(),
      "--dry-run"};
  const Finished text = rekindle(call);
  EXPECT_EQ(text.exit.code, 0) << text.err;
  EXPECT_THAT(text.out, AllOf(ContainsRegex("w +BF16 +\\[512, 1024\\]"), HasSubstr("SOURCE")));
  std::vector<std::string> with_json = call;
  with_json.push_back("--json");
  const Json json = json_of(rekindle(with_json));
  ASSERT_TRUE(json.is_object());
  EXPECT_EQ(json["complete"], true);
  EXPECT_GE(json["wanted_bytes"].get<std::uint64_t>(), 1U << 20);
  EXPECT_EQ(json["tensors"], 1);
  std::vector<std::string> into = with_json;
  into.insert(into.end(), {"--to", dir_ / "out"});
  EXPECT_EQ(json_of(rekindle(into))["complete"], true);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "c"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
}

TEST_F(CliSession, WhatNobodyHoldsIsNotFound) {
  const Finished done = rekindle(
      {"pull", "absent@1", "--to", dir_ / "out", "--coordinator", coordinator_->address()});
  EXPECT_EQ(done.exit.code, 3) << done.err;
  EXPECT_THAT(done.err, HasSubstr("absent@1"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out"));
  // A directory that was there before stays as it was.
  EXPECT_EQ(
      rekindle({"pull", "absent@1", "--to", dir_ / "in", "--coordinator", coordinator_->address()})
          .exit.code,
      7);
  write_file(dir_ / "mine/notes", "mine");
  EXPECT_EQ(rekindle({"pull", "absent@1", "--to", dir_ / "mine", "--coordinator",
                      coordinator_->address()})
                .exit.code,
            3);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "mine/.rekindle"));
  EXPECT_EQ(read_file(dir_ / "mine/notes"), "mine");
}

TEST_F(CliSession, TheSameVersionWithOtherBytesIsRefused) {
  ASSERT_EQ(publish("m@3").exit.code, 0);
  EXPECT_EQ(publish("m@3").exit.code, 0);  // the same bytes: nothing to do
  write_safetensors(dir_ / "other/model.safetensors", {{"w", DType::kBF16, {512, 1024}}}, 4);
  const Finished again = publish("m@3", "other");
  EXPECT_EQ(again.exit.code, 7) << again.err;
  EXPECT_THAT(again.err, HasSubstr("m@3"));
}

// Its root is taken for ever, so nobody is sent to retire it once more.
TEST_F(CliSession, ARetiredVersionWithOtherBytesIsRefusedWithTheOneWayOut) {
  const auto retired_on_a = [&] { return !std::filesystem::exists(dir_ / "a/models/m@3"); };
  ASSERT_EQ(publish("m@3").exit.code, 0);
  ASSERT_EQ(rekindle({"retire", "m@3", "--everywhere", "--coordinator", coordinator_->address()})
                .exit.code,
            0);
  ASSERT_TRUE(eventually(retired_on_a));
  write_safetensors(dir_ / "other/model.safetensors", {{"w", DType::kBF16, {512, 1024}}}, 4);
  const std::vector<std::string> call = {"publish", "m@3",      dir_ / "other",
                                         "--store", dir_ / "a", "--quiet"};
  const Finished refused = rekindle(call);
  EXPECT_EQ(refused.exit.code, 7) << refused.err;
  EXPECT_THAT(refused.err,
              ContainsRegex("m@3 was published before with other contents \\(root [0-9a-f]+, this "
                            "one [0-9a-f]+\\); publish under a new version"));
  EXPECT_EQ(std::ranges::count(refused.err, '\n'), 1) << refused.err;
  EXPECT_THAT(refused.err, ::testing::Not(HasSubstr("retire")));
  EXPECT_TRUE(retired_on_a()) << "something of it was kept";
  // Nor where the copies were let go of by hand, while the fleet still counts on the version.
  ASSERT_EQ(publish("m@4").exit.code, 0);
  ASSERT_EQ(rekindle({"retire", "m@4", "--store", dir_ / "a"}).exit.code, 0);
  const Finished by_hand = rekindle({"publish", "m@4", dir_ / "other", "--store", dir_ / "a"});
  EXPECT_EQ(by_hand.exit.code, 7) << by_hand.err;
  EXPECT_THAT(by_hand.err, AllOf(HasSubstr("m@4 was published before with other contents"),
                                 HasSubstr("publish under a new version")));
  // What it says is so: the same bytes again, or others under a new version.
  EXPECT_EQ(publish("m@3").exit.code, 0);
  EXPECT_EQ(publish("m@5", "other").exit.code, 0);
}

TEST_F(CliSession, TheSameBytesAsTwoVersionsAreReadyBothAndRetiredApart) {
  ASSERT_EQ(publish("m@1").exit.code, 0);
  ASSERT_EQ(publish("m@2").exit.code, 0);
  const Json status =
      json_of(rekindle({"status", "--json", "--coordinator", coordinator_->address()}));
  ASSERT_EQ(status["versions"].size(), 2U);
  for (const Json& version : status["versions"]) {
    EXPECT_EQ(version["state"], "ready") << version.dump();
  }
  const auto pull = [&](const std::string& id) {
    return rekindle({"pull", id, "--store", dir_ / "b", "--json"});
  };
  EXPECT_EQ(pull("m@1").exit.code, 0);
  ASSERT_EQ(rekindle({"retire", "m@1", "--store", dir_ / "a"}).exit.code, 0);
  const Finished newest = pull("m");
  ASSERT_EQ(newest.exit.code, 0) << newest.err;
  EXPECT_EQ(json_of(newest)["version"], 2);
}

TEST_F(CliSession, ATerminalShowsABarAndAPipeLines) {
  ASSERT_EQ(publish("m@3").exit.code, 0);
  Spawn spawn = rekindle_spawn(
      {"pull", "m@3", "--to", dir_ / "out", "--coordinator", coordinator_->address()});
  spawn.terminal = true;
  const Finished bar = run(std::move(spawn));
  EXPECT_EQ(bar.exit.code, 0);
  EXPECT_THAT(bar.out, AllOf(HasSubstr("\r\x1b[K"), HasSubstr("pulled m@3")));
  const Finished lines =
      rekindle({"pull", "m@3", "--to", dir_ / "out2", "--coordinator", coordinator_->address()});
  EXPECT_THAT(lines.err, ::testing::Not(HasSubstr("\x1b")));
  const Finished quiet = rekindle(
      {"pull", "m@3", "--to", dir_ / "out3", "-q", "--coordinator", coordinator_->address()});
  EXPECT_EQ(quiet.err, "");
}

TEST_F(CliSession, WatchGoesOnUntilItIsInterrupted) {
  Process watch(rekindle_spawn({"status", "--watch", "--interval", "20ms", "--json",
                                "--coordinator", coordinator_->address()}));
  ASSERT_TRUE(eventually([&] { return std::ranges::count(watch.out(), '\n') >= 3; }));
  const std::string first = watch.out().substr(0, watch.out().find('\n'));
  EXPECT_TRUE(Json::parse(first, nullptr, false).is_object()) << first;
  watch.signal(SIGINT);
  EXPECT_EQ(watch.wait(), (Exit{0, 0}));
}

TEST_F(CliSession, APortInUseIsNamed) {
  const Finished agent = rekindle({"agent", "--listen", a_->address(), "--store", dir_ / "c"});
  EXPECT_EQ(agent.exit.code, 5) << agent.err;
  EXPECT_THAT(agent.err, HasSubstr(a_->address()));
  const Finished coordinator =
      rekindle({"coordinator", "--listen", coordinator_->address(), "--state", dir_ / "state2"});
  EXPECT_EQ(coordinator.exit.code, 5) << coordinator.err;
  EXPECT_THAT(coordinator.err, HasSubstr(coordinator_->address()));
}

TEST_F(CliSession, AStoreHasOneAgent) {
  const Finished second = rekindle({"agent", "--listen", "127.0.0.1:0", "--store", dir_ / "a"});
  EXPECT_NE(second.exit.code, 0);
  EXPECT_FALSE(second.timed_out);
  EXPECT_THAT(second.err, HasSubstr((dir_ / "a").string()));
}

TEST_F(CliSession, SecretsMustMatch) {
  write_file(dir_ / "secret", "0123456789abcdef0123456789abcdef");
  std::filesystem::permissions(dir_ / "secret", std::filesystem::perms(0600));
  const Finished done = rekindle(
      {"status", "--coordinator", coordinator_->address(), "--secret-file", dir_ / "secret"});
  EXPECT_EQ(done.exit.code, 7) << done.err;
}

TEST_F(CliSession, RetiredEverywhereIsGone) {
  ASSERT_EQ(publish("m@3").exit.code, 0);
  ASSERT_EQ(rekindle({"pull", "m@3", "--store", dir_ / "b"}).exit.code, 0);
  const Finished done =
      rekindle({"retire", "m@3", "--everywhere", "--coordinator", coordinator_->address()});
  EXPECT_EQ(done.exit.code, 0) << done.err;
  EXPECT_TRUE(eventually([&] {
    return !std::filesystem::exists(dir_ / "a/models/m@3") &&
           !std::filesystem::exists(dir_ / "b/models/m@3");
  }));
}

TEST_F(CliSession, DaemonsEndCleanlyOnSigterm) {
  EXPECT_EQ(a_->stop(), 0);
  EXPECT_EQ(coordinator_->stop(), 0);
  EXPECT_EQ(b_->stop(), 0);
}

TEST_F(CliSession, ReadinessIsJsonWhenAskedFor) {
  Process agent(rekindle_spawn(
      {"agent", "--json", "--listen", "127.0.0.1:0", "--store", dir_ / "c", "--node-id", "c"}));
  ASSERT_TRUE(agent.wait_for_out("\n"));
  const Json ready = Json::parse(agent.out(), nullptr, false);
  EXPECT_EQ(ready["event"], "ready");
  EXPECT_THAT(ready["data"].get<std::string>(), HasSubstr("127.0.0.1:"));
}

}  // namespace
}  // namespace rekindle::testing
