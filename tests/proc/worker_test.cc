// Workers that attach to an agent, die, hang and come back. Real processes.
#include <atomic>
#include <csignal>
#include <filesystem>
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/descriptors.h"
#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

const std::string kWorker = WORKER_MAIN;
const std::string kRekindle = REKINDLE_BINARY;

class Workers : public ::testing::Test {
 protected:
  void SetUp() override { make_checkpoint(fleet_.dir("model"), 6, 1024, 5); }

  // An agent by itself that holds m@1.
  AgentProcess& serving_agent(std::vector<std::string> more = {}) {
    auto& agent = fleet_.start_agent("a", std::move(more));
    fleet_.publish("a", "m@1", fleet_.dir("model"));
    return agent;
  }

  std::unique_ptr<Process> worker(const std::string& agent, std::vector<std::string> arguments = {},
                                  std::vector<std::pair<std::string, std::string>> env = {}) {
    Spawn spawn;
    spawn.argv = {kWorker};
    spawn.argv.insert(spawn.argv.end(), arguments.begin(), arguments.end());
    spawn.env = std::move(env);
    spawn.env.emplace_back("REKINDLE_STORE", fleet_.agent(agent).store.string());
    return std::make_unique<Process>(std::move(spawn));
  }
  std::unique_ptr<Process> rank(int number, int world, std::vector<std::string> arguments = {}) {
    return worker("a", std::move(arguments),
                  {{"REKINDLE_INSTANCE", "i"},
                   {"REKINDLE_RANK", std::to_string(number)},
                   {"REKINDLE_WORLD", std::to_string(world)}});
  }

  nlohmann::json status(const std::string& agent) {
    return fleet_.run_command({"status", "--agent", fleet_.agent(agent).control}).json;
  }
  nlohmann::json instance(const std::string& name) {
    const auto all = status("a");
    if (!all.is_object() || !all.contains("instances")) return {};
    for (const auto& one : all["instances"]) {
      if (one["instance"] == name) return one;
    }
    return {};
  }
  bool eventually_state(const std::string& state, milliseconds patience = kPatience) {
    return eventually(
        [&] {
          const auto now = instance("i");
          return now.is_object() && now["state"] == state;
        },
        patience);
  }
  Finished wait_ready(const std::string& timeout, std::vector<std::string> more = {}) {
    std::vector<std::string> argv = {
        kRekindle,   "wait-ready", "i", "--store", fleet_.agent("a").store.string(),
        "--timeout", timeout};
    argv.insert(argv.end(), more.begin(), more.end());
    return run(argv);
  }
  std::filesystem::path ready_file() { return fleet_.agent("a").store / "agent/ready/i"; }

  Fleet fleet_;
};

std::string sum_of(Process& worker) { return worker.value_after("ready m@1 "); }

TEST_F(Workers, GetTheBytesThatWerePublishedFromTheirHostAndFromPeers) {
  fleet_.start_coordinator();
  serving_agent();
  fleet_.start_agent("b");
  const auto here = worker("a");
  const auto there = worker("b");
  EXPECT_TRUE(here->wait_for_out("attached m@1 local")) << here->out() << here->err();
  EXPECT_TRUE(there->wait_for_out("attached m@1 peers")) << there->out() << there->err();
  const std::string sum = sum_of(*here);
  EXPECT_EQ(sum.size(), 32u);
  EXPECT_EQ(sum_of(*there), sum);
  const auto again = worker("b");
  EXPECT_TRUE(again->wait_for_out("attached m@1 local")) << "the pull's copy stays";
  EXPECT_EQ(sum_of(*again), sum);
}

TEST_F(Workers, Row42InstanceIsReadyOnlyWhileAllItsRanksAre) {
  serving_agent();
  const auto first = rank(0, 2);
  ASSERT_TRUE(first->wait_for_out("took all"));
  EXPECT_TRUE(eventually([&] {  // before it has said so, it is rank 0 that is waited for
    const auto early = wait_ready("300ms");
    EXPECT_EQ(early.exit.code, 5);
    return early.err.find("rank 1 of 2 has not attached") != std::string::npos;
  }));
  EXPECT_FALSE(std::filesystem::exists(ready_file()));

  auto second = rank(1, 2);
  const auto ready = wait_ready("20s", {"--version", "m@1"});
  EXPECT_EQ(ready.exit.code, 0) << ready.err;
  EXPECT_EQ(sum_of(*first), sum_of(*second));
  ASSERT_TRUE(eventually([&] { return std::filesystem::exists(ready_file()); }));
  EXPECT_EQ(nlohmann::json::parse(read_file(ready_file()))["version"], 1);

  second->kill();
  ASSERT_TRUE(eventually([&] { return !std::filesystem::exists(ready_file()); }));
  ASSERT_TRUE(eventually_state("UNFIT"));
  const auto unfit = instance("i");
  EXPECT_TRUE(unfit["why"].get<std::string>().starts_with("rank 1 ")) << unfit;
  EXPECT_EQ(unfit["sessions"].size(), 1u) << "the survivor keeps its session: " << unfit;

  second = rank(1, 2);
  EXPECT_EQ(wait_ready("20s").exit.code, 0);
  EXPECT_TRUE(eventually([&] { return std::filesystem::exists(ready_file()); }));
  EXPECT_TRUE(first->running());
}

TEST_F(Workers, HealthEndpointSaysWhetherAnInstanceIsReady) {
  const std::string port = std::to_string(free_port());
  serving_agent({"--health", "127.0.0.1:" + port});
  const auto status_line = [&] {
    return run({"/bin/bash", "-c",
                "exec 3<>/dev/tcp/127.0.0.1/" + port +
                    "; printf 'GET /ready/i HTTP/1.0\\r\\n\\r\\n' >&3; head -n 1 <&3"})
        .out;
  };
  EXPECT_NE(status_line().find(" 503 "), std::string::npos) << status_line();
  auto first = rank(0, 2);
  ASSERT_TRUE(first->wait_for_out("attached"));
  EXPECT_NE(status_line().find(" 503 "), std::string::npos) << status_line();
  const auto second = rank(1, 2);
  EXPECT_TRUE(eventually([&] { return status_line().find(" 200 ") != std::string::npos; }))
      << status_line();
  first->kill();
  EXPECT_TRUE(eventually([&] { return status_line().find(" 503 ") != std::string::npos; }))
      << status_line();
}

TEST_F(Workers, Row39RankThatDiesBeforeItHasLoadedLeavesNothingBehind) {
  auto& agent = serving_agent();
  const auto idle = [&] {
    const auto now = instance("i");
    return now.is_object() && now["sessions"].empty();
  };
  {  // what the first one leaves for good: the instance, a thread's descriptor
    const auto first = rank(0, 2, {"hang"});
    ASSERT_TRUE(first->wait_for_out("took all"));
    first->kill();
    ASSERT_TRUE(eventually(idle)) << instance("i");
  }
  const auto descriptors = open_descriptors(agent.process->pid());
  for (int i = 0; i < 5; ++i) {
    const auto loading = rank(0, 2, {"hang"});
    ASSERT_TRUE(loading->wait_for_out("took all"));
    loading->kill();
    ASSERT_TRUE(eventually(idle)) << instance("i");
  }
  EXPECT_TRUE(eventually([&] { return open_descriptors(agent.process->pid()) <= descriptors; }));
  EXPECT_EQ(instance("i")["state"], "UNFIT");
  const auto one = rank(0, 2);
  const auto two = rank(1, 2);
  EXPECT_EQ(sum_of(*one).size(), 32u) << one->out() << one->err();
}

TEST_F(Workers, Row40RankThatHangsFailsItselfOnly) {
  serving_agent({"--load-timeout", "4s"});  // plenty for the other one, also on a busy machine
  const auto hanging = rank(0, 2, {"hang"});
  const auto fine = worker("a", {}, {{"REKINDLE_INSTANCE", "other"}});
  ASSERT_TRUE(eventually_state("UNFIT"));
  EXPECT_NE(instance("i")["why"].get<std::string>().find("rank 0 did not load m@1"),
            std::string::npos);
  EXPECT_EQ(sum_of(*fine).size(), 32u);
  EXPECT_TRUE(fine->running());
}

TEST_F(Workers, Row40StoppedRankIsFoundByItsSilence) {
  serving_agent();
  const auto stopped = rank(0, 2);
  const auto other = rank(1, 2);
  ASSERT_EQ(wait_ready("20s").exit.code, 0);
  stopped->signal(SIGSTOP);
  // Silence is 10 s, and what an agent that was starved itself did not hear counts for nothing.
  ASSERT_TRUE(eventually_state("UNFIT", 3 * kPatience));
  EXPECT_NE(instance("i")["why"].get<std::string>().find("rank 0 has been silent"),
            std::string::npos);
  EXPECT_TRUE(other->running());
  stopped->signal(SIGCONT);
  EXPECT_TRUE(stopped->wait_for_out("lost ")) << "it learns that it was given up";
}

TEST_F(Workers, Row41WorkersOfAKilledAgentFindItsCopiesAgainInItsNextLife) {
  serving_agent();
  const auto before = rank(0, 1);
  const std::string sum = sum_of(*before);
  ASSERT_EQ(sum.size(), 32u);
  fleet_.agent("a").process->kill();
  EXPECT_TRUE(before->wait_for_out("lost PEER_LOST")) << before->out();
  fleet_.start_agent("a");
  EXPECT_FALSE(std::filesystem::exists(ready_file())) << "nobody is ready in a new life";
  const auto after = rank(0, 1);
  EXPECT_EQ(sum_of(*after), sum) << after->out() << fleet_.agent("a").process->err();
  EXPECT_NE(after->out().find("attached m@1"), std::string::npos);
}

TEST_F(Workers, Row41SupervisedWorkerComesBackAfterAnAgentThatWasAwayForLong) {
  serving_agent();
  Spawn spawn;
  spawn.argv = {kRekindle,      "run",  "--model", "m@1",
                "--crash-loop", "1",    "--store", fleet_.agent("a").store.string(),
                "--",           kWorker};
  Process supervisor(std::move(spawn));
  const std::string sum = sum_of(supervisor);
  ASSERT_EQ(sum.size(), 32u) << supervisor.err();
  fleet_.agent("a").process->kill();
  ASSERT_TRUE(supervisor.wait_for_err("no agent listens")) << supervisor.err();
  fleet_.start_agent("a");
  EXPECT_TRUE(eventually([&] {
    const std::string out = supervisor.out();
    return out.find("ready m@1 " + sum, out.find("lost PEER_LOST")) != std::string::npos;
  })) << supervisor.out()
      << supervisor.err();
}

TEST_F(Workers, WorkerThatStartsBeforeItsAgentWaitsForIt) {
  serving_agent();
  fleet_.agent("a").process->kill();
  const auto early = worker("a");
  EXPECT_FALSE(early->wait_for_out("attached", milliseconds(300)));
  fleet_.start_agent("a");
  EXPECT_EQ(sum_of(*early).size(), 32u) << early->out() << early->err();
}

TEST_F(Workers, AdoptedCopyWithAWrongByteIsNeverReadyAndIsFetchedAnew) {
  fleet_.start_coordinator();
  serving_agent();
  fleet_.start_agent("b");
  std::string sum;
  {
    const auto first = worker("b");
    sum = sum_of(*first);
    ASSERT_EQ(sum.size(), 32u);
  }
  fleet_.agent("b").process->kill();
  const auto file = find_file(fleet_.agent("b").store, "model.safetensors");
  std::string bytes = read_file(file);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  write_file(file, bytes);
  fleet_.start_agent("b");
  EXPECT_TRUE(eventually([&] {
    const auto again = worker("b");
    const std::string now = sum_of(*again);
    EXPECT_TRUE(now.empty() || now == sum) << "wrong bytes were handed out as ready";
    return now == sum;
  }));
}

TEST_F(Workers, AnAdoptedCopyWithAWrongByteTakesNoOtherCopyAlong) {
  fleet_.start_coordinator();
  serving_agent();
  fleet_.start_agent("b");
  const auto copies = [&] {
    std::set<std::filesystem::path> found;
    for (const auto& item :
         std::filesystem::directory_iterator(fleet_.agent("b").store / "models/m@1")) {
      found.insert(item.path());
    }
    return found;
  };
  const auto shard = [&](const std::string& which) {
    return worker("b", {},
                  {{"REKINDLE_SHARD", which},
                   {"WORKER_SPEC", R"({"name": "rows", "rules": )"
                                   R"([{"match": "**.weight", "kind": "split", "dim": 0}]})"}});
  };
  const auto first = shard("tp=0/2");
  const std::string good_sum = sum_of(*first);
  ASSERT_EQ(good_sum.size(), 32u) << first->out() << first->err();
  const auto good = copies();
  ASSERT_EQ(good.size(), 1u);
  const std::string other_sum = sum_of(*shard("tp=1/2"));
  auto bad = copies();
  ASSERT_EQ(bad.size(), 2u);
  bad.erase(*good.begin());
  fleet_.agent("b").process->kill();
  for (const auto& item : std::filesystem::directory_iterator(*bad.begin())) {
    if (item.file_size() < (1u << 20)) continue;  // not the manifest
    std::string bytes = read_file(item.path());
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
    write_file(item.path(), bytes);
  }
  fleet_.start_agent("b");
  const auto reader = shard("tp=0/2");
  ASSERT_EQ(sum_of(*reader), good_sum) << reader->out() << reader->err();
  EXPECT_TRUE(eventually([&] { return sum_of(*shard("tp=1/2")) == other_sum; }));
  EXPECT_TRUE(reader->running()) << "its copy had nothing to do with it: " << reader->out();
  EXPECT_TRUE(std::filesystem::exists(*good.begin()));
  EXPECT_TRUE(reader->out().find("attached m@1 adopted") != std::string::npos ||
              reader->out().find("attached m@1 local") != std::string::npos)
      << reader->out();
}

TEST_F(Workers, LearnOfNewVersionsAndOfTheEndOfTheirs) {
  serving_agent();
  const auto one = worker("a");
  ASSERT_TRUE(one->wait_for_out("ready m@1"));
  make_checkpoint(fleet_.dir("next"), 6, 1024, 6);
  fleet_.publish("a", "m@2", fleet_.dir("next"));
  EXPECT_TRUE(one->wait_for_out("newer 2"));
  const auto retired =
      fleet_.run_command({"retire", "m@1", "--store", fleet_.agent("a").store.string()});
  EXPECT_EQ(retired.exit_code, 0) << retired.err;
  EXPECT_TRUE(one->wait_for_out("lost STALE")) << one->out();
}

TEST_F(Workers, B2NothingThatWasReportedAsPublishedIsLostToARetireThatWaited) {
  serving_agent();
  const auto one = worker("a");  // the retire waits for it
  ASSERT_TRUE(one->wait_for_out("ready m@1"));
  const std::string store = fleet_.agent("a").store.string();
  const std::vector<std::string> publish = {"publish", "m@1", fleet_.dir("model").string(),
                                            "--store", store};
  std::atomic<bool> retired = false;
  std::thread retiring([&] {
    EXPECT_EQ(fleet_.run_command({"retire", "m@1", "--store", store}).exit_code, 0);
    retired = true;
  });
  bool refused = false;
  EXPECT_TRUE(eventually([&] {
    const bool over = retired;
    const auto answer = fleet_.run_command(publish);
    if (answer.exit_code != 0) {
      EXPECT_THAT(answer.err, ::testing::HasSubstr("m@1 is being retired"));
      refused = true;
    }
    return over && answer.exit_code == 0;
  }));
  retiring.join();
  EXPECT_TRUE(refused);
  const auto again = worker("a");
  EXPECT_EQ(sum_of(*again).size(), 32u) << again->out() << again->err();
}

// A fleet-wide retire waits for the workers that are there, so it lets no more come.
TEST_F(Workers, B3ARetireInTheFleetRefusesNewWorkersAndEndsWithTheLastOneThatIsThere) {
  fleet_.start_coordinator();
  serving_agent();
  const auto one = worker("a");
  ASSERT_TRUE(one->wait_for_out("ready m@1")) << one->out() << one->err();
  ASSERT_EQ(fleet_.run_command({"retire", "m@1", "--everywhere"}).exit_code, 0);
  // The agent hears of it with a heartbeat.
  std::string said;
  EXPECT_TRUE(eventually([&] {
    const auto late = worker("a", {}, {{"REKINDLE_MODEL", "m@1"}});
    (void)eventually([&] {
      said = late->out();
      return said.find("ready m@1") != said.npos || said.find("lost ") != said.npos;
    });
    return said.find("lost ") != said.npos;
  }));
  EXPECT_THAT(said, ::testing::HasSubstr("lost STALE: attach m@1: "));
  EXPECT_THAT(said, ::testing::HasSubstr("being retired in the fleet; attach to another version"));
  EXPECT_TRUE(one->running()) << one->out();
  EXPECT_EQ(one->out().find("lost"), std::string::npos) << one->out();
  const auto copies = fleet_.agent("a").store / "models/m@1";
  EXPECT_TRUE(std::filesystem::exists(copies)) << "it is being read";
  one->kill();
  EXPECT_TRUE(eventually([&] { return !std::filesystem::exists(copies); }));
}

TEST_F(Workers, B3AForcedRetireEndsTheWorkersThatAreThere) {
  fleet_.start_coordinator();
  serving_agent();
  const auto one = worker("a");
  ASSERT_TRUE(one->wait_for_out("ready m@1")) << one->out() << one->err();
  ASSERT_EQ(fleet_.run_command({"retire", "m@1", "--everywhere", "--force"}).exit_code, 0);
  EXPECT_TRUE(one->wait_for_out("lost STALE")) << one->out();
  const auto copies = fleet_.agent("a").store / "models/m@1";
  EXPECT_TRUE(eventually([&] { return !std::filesystem::exists(copies); }));
}

// Who was asked and said that it is retired is believed, whatever lies in the own store.
TEST_F(Workers, B4ARetiredVersionIsNotTakenFromTheOwnStore) {
  fleet_.start_coordinator();
  serving_agent();
  const std::vector<std::string> pull = {"pull", "m@1", "--store", fleet_.dir("own").string()};
  const auto before = fleet_.run_command(pull);
  ASSERT_EQ(before.exit_code, 0) << before.err;
  ASSERT_EQ(fleet_.run_command({"retire", "m@1", "--everywhere"}).exit_code, 0);
  const auto after = fleet_.run_command(pull);
  EXPECT_EQ(after.exit_code, 3) << after.err;
  EXPECT_THAT(after.err, ::testing::HasSubstr("retired"));
  // Nobody can be asked: what is here may do.
  fleet_.coordinator().kill();
  const auto alone = fleet_.run_command(pull);
  EXPECT_EQ(alone.exit_code, 0) << alone.err;
}

TEST_F(Workers, VersionOfAWorkersMemoryIsServedLikeAnyOther) {
  fleet_.start_agent("a");
  const auto trainer = worker("a", {"publish"});
  ASSERT_TRUE(trainer->wait_for_out("published m@7")) << trainer->out() << trainer->err();
  const auto one = worker("a", {}, {{"REKINDLE_MODEL", "m@7"}});
  EXPECT_EQ(one->value_after("ready m@7 ").size(), 32u) << one->out();
}

TEST_F(Workers, NothingIsFoundForAVersionThatNobodyHas) {
  fleet_.start_agent("a");
  const auto one = worker("a", {}, {{"REKINDLE_MODEL", "m@3"}});
  EXPECT_TRUE(one->wait_for_out("lost "));
  const auto exit = one->wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 3);
}

}  // namespace
}  // namespace rekindle::testing
