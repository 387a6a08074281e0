// Updates of a group of workers by broadcast, as processes: an agent or two, their device
// processes, workers that compare every byte.
#include <numeric>
#include <optional>

#include <fmt/format.h>

#include "tests/gpu/round_workers.h"

namespace rekindle::testing {
namespace {

class Updates : public RoundWorkers {
 protected:
  void serve_on_two_devices() {
    start_agents({"a"});
    publish("m@1", old_);
    for (const int device : {0, 1}) begin(add_member("a", device));
    publish("m@2", new_);
  }
  void begin(Member& member) {
    attach(member, 1);
    expect_takes(member, old_.sums());
    ASSERT_TRUE(is_ok(member.client->ask("loaded")));
  }
  // Over the network, for workers, once the copy is whole; by the agent's log.
  std::optional<std::uint64_t> fetched_by(const std::string& agent, const std::string& version) {
    const std::string pulled = "worker.pulled version=" + version + " ";
    const std::string key = "fetched_bytes=";
    std::string log;
    const bool whole = eventually([&] {
      log = fleet_.agent(agent).process->err();
      const auto line = log.find(pulled);
      return line != std::string::npos && log.find('\n', line) != std::string::npos;
    });
    if (!whole) return std::nullopt;
    return std::stoull(log.substr(log.find(key, log.find(pulled)) + key.size()));
  }
  const Checkpoint old_ = plain_checkpoint(16, 21);
  const Checkpoint new_ = plain_checkpoint(16, 22);
};

TEST_F(Updates, BringAVersionToAllDevicesOfAHostByBroadcast) {
  serve_on_two_devices();
  const auto update = move_all(2);
  EXPECT_EQ(update.exit_code, 0) << update.err << update.json;
  EXPECT_EQ(ready_in(update.json), 2) << update.json;
  EXPECT_EQ(broadcast_in(update.json), 2) << update.json;
  for (auto& member : members_) EXPECT_EQ(sums_of(*member->client), new_.sums());
}

TEST_F(Updates, GoBackAndForthBetweenVersions) {
  serve_on_two_devices();
  for (const int version : {2, 1, 2}) {
    const auto update = move_all(version);
    EXPECT_EQ(update.exit_code, 0) << update.err << update.json;
    EXPECT_EQ(broadcast_in(update.json), 2) << update.json;
    for (auto& member : members_) {
      EXPECT_EQ(sums_of(*member->client), (version == 1 ? old_ : new_).sums());
    }
  }
}

TEST_F(Updates, CarryEveryTypeAndSize) {
  const auto odd = odd_checkpoint(23);
  start_agents({"a"});
  publish("m@1", old_);
  for (const int device : {0, 1}) begin(add_member("a", device));
  publish("m@2", odd);
  const auto update = move_all(2);
  EXPECT_EQ(update.exit_code, 0) << update.err << update.json;
  EXPECT_EQ(broadcast_in(update.json), 2) << update.json;
  for (auto& member : members_) EXPECT_EQ(sums_of(*member->client), odd.sums());
}

TEST_F(Updates, ReachAHostThatLacksTheVersionBeforeItHasACopy) {
  start_agents({"a", "b"});
  publish("m@1", old_);
  begin(add_member("a", 0));
  begin(add_member("b", 1));
  publish("m@2", new_);
  const auto update = move_all(2);
  EXPECT_EQ(update.exit_code, 0) << update.err << update.json;
  EXPECT_EQ(broadcast_in(update.json), 2) << update.json;
  for (auto& member : members_) EXPECT_EQ(sums_of(*member->client), new_.sums());
  // Its workers come back from its own copy, which is completed afterwards.
  const auto later = worker("b", {{"REKINDLE_DEVICE", worker_device(1)}});
  expect_loads(*later, "attach m@2 bucket=1048576", new_.sums());
}

TEST_F(Updates, KeepWhatPassesOnAHostThatLacksTheVersion) {
  for (const char* name : {"a", "b"}) {
    start_agent(name, {"--gpu", agent_gpus(2), "--keep-rate", "1000TB"});
  }
  publish("m@1", old_);
  begin(add_member("a", 0));
  begin(add_member("b", 1));
  publish("m@2", new_);
  const auto update = move_all(2);
  EXPECT_EQ(update.exit_code, 0) << update.err << update.json;
  EXPECT_EQ(broadcast_in(update.json), 2) << update.json;
  std::uint64_t bytes = 0;
  std::uint64_t kept = 0;
  for (const auto& member : update.json["members"]) {
    if (member["node"] == "a") {
      EXPECT_EQ(member["kept_bytes"], 0) << "it has all of it";
    }
    if (member["node"] != "b") continue;
    bytes = member["bytes"].get<std::uint64_t>();
    kept = member["kept_bytes"].get<std::uint64_t>();
  }
  EXPECT_GT(kept, 0u) << update.json;
  const auto fetched = fetched_by("b", "m@2");
  ASSERT_TRUE(fetched) << fleet_.agent("b").process->err();
  EXPECT_LT(*fetched, bytes) << fleet_.agent("b").process->err();
  for (auto& member : members_) EXPECT_EQ(sums_of(*member->client), new_.sums());
  const auto later = worker("b", {{"REKINDLE_DEVICE", worker_device(1)}});
  expect_loads(*later, "attach m@2 bucket=1048576", new_.sums());
}

// The only host with the version has no member. Each member's host fetches a share of it, and the
// devices keep what passes.
TEST_F(Updates, LeaveAHostWithoutAMemberOnce) {
  for (const char* name : {"a", "b", "s"}) {
    start_agent(name, {"--gpu", agent_gpus(2), "--keep-rate", "1000TB"});
  }
  publish("m@1", old_);
  begin(add_member("a", 0));
  begin(add_member("b", 1));
  publish("m@2", new_, "s");
  const auto update = move_all(2);
  EXPECT_EQ(update.exit_code, 0) << update.err << update.json;
  EXPECT_EQ(ready_in(update.json), 2) << update.json;
  EXPECT_EQ(broadcast_in(update.json), 2) << update.json;
  for (auto& member : members_) EXPECT_EQ(sums_of(*member->client), new_.sums());
  const auto bytes = update.json["members"][0]["bytes"].get<std::uint64_t>();
  std::uint64_t together = 0;
  for (const char* name : {"a", "b"}) {
    const auto fetched = fetched_by(name, "m@2");
    ASSERT_TRUE(fetched) << fleet_.agent(name).process->err();
    EXPECT_GT(*fetched, bytes / 4) << name;
    together += *fetched;
  }
  EXPECT_LT(together, bytes + bytes / 4) << "one of them fetched what the other one brought";
  const auto later = worker("b", {{"REKINDLE_DEVICE", worker_device(1)}});
  expect_loads(*later, "attach m@2 bucket=1048576", new_.sums());
}

TEST_F(Updates, OfWhatNobodyElseWantsAreUploads) {
  start_agents({"a"});
  publish("m@1", old_);
  for (const int device : {0, 1}) {
    attach(add_member("a", device, "box=plain.00" + std::to_string(device) + "::"), 1);
    ASSERT_TRUE(is_ok(members_.back()->client->ask("take all")));
    ASSERT_TRUE(is_ok(members_.back()->client->ask("loaded")));
  }
  publish("m@2", new_);
  const auto update = move_all(2);
  EXPECT_EQ(update.exit_code, 0) << update.err << update.json;
  EXPECT_EQ(ready_in(update.json), 2) << update.json;
  EXPECT_EQ(broadcast_in(update.json), 0) << update.json;
}

// Ranks of an expert-parallel instance: the same attention, different experts.
class CommonPieces : public Updates {
 protected:
  // Tensors 0 to 7 for all members, and two more for each.
  std::string wants(std::size_t member) const {
    std::string words;
    for (const std::size_t i : tensors_of(member)) words += fmt::format("box=plain.{:03}:: ", i);
    return words;
  }
  static std::vector<std::size_t> tensors_of(std::size_t member) {
    std::vector<std::size_t> tensors(8);
    std::iota(tensors.begin(), tensors.end(), 0u);
    tensors.insert(tensors.end(), {8 + 2 * member, 9 + 2 * member});
    return tensors;
  }
  static Sums some(const Sums& sums, std::size_t member) {
    Sums mine;
    for (const std::size_t i : tensors_of(member)) {
      const auto name = fmt::format("plain.{:03}", i);
      mine.emplace(name, sums.at(name));
    }
    return mine;
  }
  void begin_on(const std::vector<std::string>& agents) {
    for (std::size_t i = 0; i < agents.size(); ++i) {
      Member& member = add_member(agents[i], static_cast<int>(i), wants(i));
      attach(member, 1);
      expect_takes(member, some(old_.sums(), i));
      ASSERT_TRUE(is_ok(member.client->ask("loaded")));
    }
  }
  void expect_new() {
    for (std::size_t i = 0; i < members_.size(); ++i) {
      EXPECT_EQ(sums_of(*members_[i]->client), some(new_.sums(), i)) << "member " << i;
    }
  }
  // Each member's bytes by broadcast are those of the tensors 0 to 7: four fifths.
  void expect_common_by_broadcast(const nlohmann::json& update) {
    for (const auto& member : update["members"]) {
      EXPECT_EQ(member["spread_bytes"].get<std::uint64_t>() * 5,
                member["bytes"].get<std::uint64_t>() * 4)
          << update;
    }
  }
};

TEST_F(CommonPieces, AreUploadedOnceAndTheRestByEachMembersHost) {
  start_agents({"a"});
  publish("m@1", old_);
  begin_on({"a", "a"});
  publish("m@2", new_);
  const auto update = move_all(2);
  EXPECT_EQ(update.exit_code, 0) << update.err << update.json;
  EXPECT_EQ(ready_in(update.json), 2) << update.json;
  expect_common_by_broadcast(update.json);
  expect_new();
}

// No host of a member has the version.
TEST_F(CommonPieces, AreFetchedOnceByTheHostsOfAllMembers) {
  for (const char* name : {"a", "b", "s"}) {
    start_agent(name, {"--gpu", agent_gpus(2), "--keep-rate", "1000TB"});
  }
  publish("m@1", old_);
  begin_on({"a", "b"});
  publish("m@2", new_, "s");
  const auto update = move_all(2);
  EXPECT_EQ(update.exit_code, 0) << update.err << update.json;
  EXPECT_EQ(ready_in(update.json), 2) << update.json;
  expect_common_by_broadcast(update.json);
  expect_new();
  const auto bytes = update.json["members"][0]["bytes"].get<std::uint64_t>();
  std::uint64_t together = 0;
  for (const char* name : {"a", "b"}) {
    const auto fetched = fetched_by(name, "m@2");
    ASSERT_TRUE(fetched) << fleet_.agent(name).process->err();
    together += *fetched;
  }
  EXPECT_LT(together, bytes * 7 / 5) << "of eight common tenths and twice two others";
}

// What the round has left comes with the rest.
TEST_F(CommonPieces, ComeFromTheMembersHostIfTheRoundEndsEarly) {
  start_agents({"a", "b"});
  publish("m@1", old_);
  begin_on({"a", "b"});
  publish("m@2", new_);
  const auto update = update_to_the_middle(2);
  fleet_.agent("b").process->kill();
  EXPECT_TRUE(is_ok(members_[0]->client->ask("take all")));
  EXPECT_EQ(sums_of(*members_[0]->client), some(new_.sums(), 0));
  EXPECT_TRUE(is_ok(members_[0]->client->ask("loaded")));
  const auto answer = finish(*update);
  EXPECT_EQ(ready_in(answer.json), 1) << answer.json;
}

TEST_F(Updates, MayBeAskedForByATrainer) {
  serve_on_two_devices();
  for (auto& member : members_) wait(*member);
  const auto trainer = worker();
  trainer->tell("update m@2 group=g");
  for (auto& member : members_) {
    expect_hears_of(*member, 2);
    tell_attach(*member, 2);
  }
  for (auto& member : members_) EXPECT_TRUE(is_ok(member->client->answer()));
  for (auto& member : members_) member->client->tell("take all");
  for (auto& member : members_) {
    EXPECT_TRUE(is_ok(member->client->answer()));
    EXPECT_TRUE(is_ok(member->client->ask("loaded")));
  }
  const auto said = trainer->answer();
  EXPECT_EQ(said.value("outcome", ""), "OK") << said;
  EXPECT_EQ(said["members"], 2) << said;
  EXPECT_EQ(said["ready"], 2) << said;
  EXPECT_EQ(said["by_broadcast"], 2) << said;
}

TEST_F(Updates, BeginWithoutAWorkerThatDoesNotComeAndNameIt) {
  serve_on_two_devices();
  wait(*members_[0]);
  const auto update = start_update("m@2", {"--gather", "1s"});
  expect_hears_of(*members_[0], 2);
  attach(*members_[0], 2);
  expect_takes(*members_[0], new_.sums());
  EXPECT_TRUE(is_ok(members_[0]->client->ask("loaded")));
  const auto answer = finish(*update);
  EXPECT_NE(answer.exit_code, 0);
  EXPECT_EQ(ready_in(answer.json), 1) << answer.json;
  bool named = false;
  for (const auto& member : answer.json["members"]) {
    named = named || (member["instance"] == "i1" && member["state"] == "left out");
  }
  EXPECT_TRUE(named) << answer.json;
  // It hears of the version when it asks, and gets it by itself.
  const auto heard = members_[1]->client->ask("wait");
  EXPECT_EQ(heard["version"], 2) << heard;
  attach(*members_[1], 2);
  expect_takes(*members_[1], new_.sums());
}

TEST_F(Updates, AreNotHeardOfByReadyVersionsAlone) {
  serve_on_two_devices();  // m@2 is ready
  const auto heard = members_[0]->client->ask("wait 1500");
  EXPECT_EQ(heard["code"], "TIMEOUT") << heard;
  const auto loner = worker();
  ASSERT_TRUE(is_ok(loner->ask("attach m@1")));
  EXPECT_EQ(loner->ask("wait")["version"], 2);
}

TEST_F(Updates, OfNothingAndToNobodyAreRefusedInALine) {
  start_agents({"a"});
  publish("m@1", old_);
  begin(add_member("a", 0));
  for (const auto& [version, group] :
       {std::pair{"m@7", "g"}, std::pair{"m@1", "h"}, std::pair{"n@1", "g"}}) {
    const auto answer = fleet_.run_command({"update", version, "--group", group});
    EXPECT_NE(answer.exit_code, 0) << version;
    EXPECT_FALSE(answer.err.empty());
    EXPECT_EQ(std::ranges::count(answer.err, '\n'), 1) << answer.err;
  }
}

}  // namespace
}  // namespace rekindle::testing
