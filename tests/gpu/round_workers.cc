#include "tests/gpu/round_workers.h"

#include <algorithm>
#include <cstdlib>

namespace rekindle::testing {

namespace {
constexpr milliseconds kRoundPatience{180'000};
}

void RoundWorkers::SetUp() {
  const std::string why = gpus_missing(devices_);
  if (why.empty()) {
    fleet_.start_coordinator();
    return;
  }
  if (std::getenv("REKINDLE_REQUIRE_GPU") != nullptr) FAIL() << why;
  GTEST_SKIP() << why;
}

void RoundWorkers::start_agents(const std::vector<std::string>& names) {
  for (const auto& name : names) start_agent(name, {"--gpu", agent_gpus(devices_)});
}

RoundWorkers::Member& RoundWorkers::add_member(const std::string& agent, int device,
                                               const std::string& more) {
  auto member = std::make_unique<Member>();
  member->agent = agent;
  member->client = worker(agent, {{"REKINDLE_DEVICE", worker_device(device)}});
  member->attach = " bucket=1048576 group=g " + more;
  if (more.find("instance=") == std::string::npos) {
    member->attach += " instance=i" + std::to_string(members_.size());
  }
  members_.push_back(std::move(member));
  return *members_.back();
}

void RoundWorkers::tell_attach(Member& member, int version) {
  member.client->tell("attach m@" + std::to_string(version) + member.attach +
                      " generation=" + std::to_string(member.generation++));
}

void RoundWorkers::attach(Member& member, int version) {
  tell_attach(member, version);
  const auto attached = member.client->answer();
  ASSERT_TRUE(is_ok(attached)) << attached;
}

void RoundWorkers::expect_hears_of(Member& member, int version) {
  const auto heard = member.client->answer();
  ASSERT_TRUE(is_ok(heard)) << heard;
  EXPECT_EQ(heard["version"], version);
}

void RoundWorkers::expect_takes(Member& member, const Sums& sums) {
  const auto taken = member.client->ask("take all");
  ASSERT_TRUE(is_ok(taken)) << taken;
  EXPECT_EQ(taken.value("path", ""), "ipc") << taken;
  EXPECT_EQ(sums_of(*member.client), sums);
}

std::unique_ptr<Process> RoundWorkers::start_update(const std::string& version,
                                                    std::vector<std::string> more) {
  std::vector<std::string> arguments{"update", version, "--group", "g"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return std::make_unique<Process>(fleet_.command(arguments));
}

Fleet::Answer RoundWorkers::finish(Process& update) {
  const auto exit = update.wait(kRoundPatience);
  return Fleet::answer_of({exit.value_or(Exit{}), !exit, update.out(), update.err()});
}

Fleet::Answer RoundWorkers::move_all(int version, std::vector<std::string> more) {
  for (auto& member : members_) wait(*member);
  const auto update = start_update("m@" + std::to_string(version), std::move(more));
  for (auto& member : members_) expect_hears_of(*member, version);
  for (auto& member : members_) tell_attach(*member, version);
  const auto all_ok = [&](const char* what) {
    for (auto& member : members_) {
      const auto answer = member->client->answer();
      EXPECT_TRUE(is_ok(answer)) << what << ": " << answer;
    }
  };
  all_ok("attach");
  for (auto& member : members_) member->client->tell("take all");
  all_ok("take");
  for (auto& member : members_) member->client->tell("loaded");
  all_ok("loaded");
  return finish(*update);
}

std::unique_ptr<Process> RoundWorkers::update_to_the_middle(int version) {
  for (auto& member : members_) wait(*member);
  auto update = start_update("m@" + std::to_string(version));
  for (auto& member : members_) {
    expect_hears_of(*member, version);
    tell_attach(*member, version);
  }
  for (auto& member : members_) EXPECT_TRUE(is_ok(member->client->answer()));
  for (auto& member : members_) member->client->tell("take 2");
  for (auto& member : members_) EXPECT_EQ(member->client->answer().value("more", false), true);
  return update;
}

int RoundWorkers::ready_in(const nlohmann::json& update) {
  int ready = 0;
  for (const auto& member : update.value("members", nlohmann::json::array())) {
    ready += member.value("state", "") == "ready" ? 1 : 0;
  }
  return ready;
}

int RoundWorkers::broadcast_in(const nlohmann::json& update) {
  int all = 0;
  for (const auto& member : update.value("members", nlohmann::json::array())) {
    const bool by = member.value("state", "") == "ready" && member.value("party", 0) > 0 &&
                    member.value("spread_bytes", 0) > 0 &&
                    member["spread_bytes"] == member["bytes"];
    all += by ? 1 : 0;
  }
  return all;
}

void FaultyRounds::into_the_middle(const std::vector<std::string>& agents,
                                   const std::vector<std::string>& holders) {
  std::vector<std::string> names = agents;  // those of an agent lie side by side
  names.erase(std::unique(names.begin(), names.end()), names.end());
  start_agents(names);
  publish("m@1", old_, names[0]);
  for (std::size_t i = 0; i < agents.size(); ++i) {
    auto& member = add_member(agents[i], static_cast<int>(i));
    attach(member, 1);
    ASSERT_TRUE(is_ok(member.client->ask("take all")));
    ASSERT_TRUE(is_ok(member.client->ask("loaded")));
  }
  publish("m@2", new_, holders.empty() ? names[0] : holders[0]);
  for (std::size_t i = 1; i < holders.size(); ++i) {
    const auto files = fleet_.dir("again-" + holders[i]);
    new_.write(files);
    fleet_.publish(holders[i], "m@2", files);
  }
  update_ = update_to_the_middle(2);
}

// At once: one that waits for another's turn would keep a bucket for too long.
void FaultyRounds::expect_finish(const std::vector<std::size_t>& members) {
  for (const std::size_t i : members) members_[i]->client->tell("take all");
  for (const std::size_t i : members) {
    const auto taken = members_[i]->client->answer();
    ASSERT_TRUE(is_ok(taken)) << i << taken;
    EXPECT_EQ(taken.value("path", ""), "ipc") << taken;
  }
  for (const std::size_t i : members) {
    EXPECT_EQ(sums_of(*members_[i]->client), new_.sums()) << i;
    EXPECT_TRUE(is_ok(members_[i]->client->ask("loaded"))) << i;
  }
}

}  // namespace rekindle::testing
