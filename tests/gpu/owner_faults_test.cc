// Updates in which no host of a member has the version, so each member's host fetches a share. In
// each phase of such an update, something is killed or frozen.
#include <csignal>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "tests/chaos/leaks.h"
#include "tests/gpu/round_workers.h"
#include "tests/support/fault_proxy.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;

enum class Who { kDeviceProcess, kAgent, kCoordinator };
enum class How { kKilled, kFrozen };
enum class Phase {
  // The victim's worker has joined. The other one has not attached.
  kGathering,
  // The ranks wait for the victim's device.
  kMeeting,
  // The hosts have a small part of their shares.
  kFetching,
  // The workers hold a bucket amid the version, and devices verify and keep behind it.
  kKeeping,
  // The workers have every byte, and have not said so.
  kCommitting,
};

constexpr const char* kMemfd = "/memfd:rekindle-";
constexpr const char* kMeetingMemfd = "/memfd:rekindle-meeting";
// The size of each version.
constexpr std::uint64_t kBytes = 32 << 20;
constexpr std::uint64_t kTrickle = 2 << 20;

// Without those of meetings: an id by which no ranks have met is kept for a minute.
int memfds_of(pid_t pid) {
  int count = 0;
  std::error_code gone;
  fs::directory_iterator item("/proc/" + std::to_string(pid) + "/fd", gone);
  for (; !gone && item != fs::directory_iterator(); item.increment(gone)) {
    std::error_code closed;
    const std::string file = fs::read_symlink(item->path(), closed).string();
    if (file.starts_with(kMemfd) && !file.starts_with(kMeetingMemfd)) ++count;
  }
  return count;
}

// Communicators, alive or not.
int meetings_of(pid_t pid) {
  int count = 0;
  std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(kMeetingMemfd) != std::string::npos) ++count;
  }
  return count;
}

// The first rank's device process makes the id by which all ranks meet.
enum class Rank { kFirst, kSecond };
using Fault = std::tuple<Rank, Who, How, Phase>;

class OwnerFaults : public RoundWorkers, public ::testing::WithParamInterface<Fault> {
 protected:
  Who who() const { return std::get<Who>(GetParam()); }
  How how() const { return std::get<How>(GetParam()); }
  Phase phase() const { return std::get<Phase>(GetParam()); }
  bool is_unharmed(const Member& member) const {
    return &member == &survivor() || who() == Who::kCoordinator;
  }
  bool is_first() const { return std::get<Rank>(GetParam()) == Rank::kFirst; }
  Member& survivor() const { return *members_[is_first() ? 1 : 0]; }
  Member& victim() const { return *members_[is_first() ? 0 : 1]; }

  // The source is another host behind a link that can be slow, so its bytes come over TCP.
  void start_fleet() {
    if (!user_namespaces()) GTEST_SKIP() << "no user namespaces: nothing here is another host";
    const std::uint16_t port = free_port();
    link_ = std::make_unique<FaultProxy>(port);
    fleet_.start_agent("s",
                       {"--gpu", "none", "--data-listen", "127.0.0.1:" + std::to_string(port),
                        "--data-advertise", link_->address()},
                       "127.0.0.1:0", on_host(fleet_.dir("hosts"), 1));
    for (const std::string name : {"a", "b"}) start_owner(name);
    offer(1);
    for (const std::string name : {"a", "b"}) {
      Member& member = add_member(name, static_cast<int>(members_.size()));
      attach(member, 1);
      expect_takes(member, checkpoints_[0].sums());
      ASSERT_TRUE(is_ok(member.client->ask("loaded")));
    }
    for (const auto& member : members_) {
      ASSERT_TRUE(eventually_no_sessions(member->agent)) << devices(member->agent);
      ASSERT_TRUE(eventually_whole(member->agent, 1));
      used_[member->agent] = device_bytes_used(device_process(member->agent));
      memfds_[member->agent] = memfds_of(device_process(member->agent)) +
                               memfds_of(fleet_.agent(member->agent).process->pid()) +
                               memfds_of(member->client->process().pid());
    }
    offer(2);
  }
  void start_owner(const std::string& name) {
    start_agent(name, {"--gpu", agent_gpus(2), "--keep-rate", "1000TB"});
  }
  void offer(int version) {
    const std::string id = "m@" + std::to_string(version);
    checkpoints_.at(static_cast<std::size_t>(version) - 1).write(fleet_.dir(id));
    fleet_.publish("s", id, fleet_.dir(id));
  }

  // --- into a phase
  void begin_update() {
    for (auto& member : members_) wait(*member);
    if (phase() == Phase::kFetching) link_->limit(kTrickle);
    fetched_before_ = link_->bytes_passed();
    update_ = start_update("m@2", {"--gather", "60s"});
    for (auto& member : members_) expect_hears_of(*member, 2);
    attach(victim(), 2);
    ASSERT_TRUE(eventually_event(victim(), "joined"));
    if (phase() == Phase::kGathering) return;
    if (phase() == Phase::kMeeting) freeze(device_process(victim().agent));
    attach(survivor(), 2);
    ASSERT_TRUE(eventually_event(survivor(), "joined"));
    if (is_first() && phase() == Phase::kMeeting) return;
    for (const auto& member : members_) ASSERT_TRUE(eventually_event(*member, "spreading"));
    if (phase() == Phase::kFetching) {
      for (auto& member : members_) tell_take_all(*member);
      ASSERT_TRUE(eventually([&] { return link_->bytes_passed() > fetched_before_ + kTrickle; }));
    }
    if (phase() == Phase::kKeeping) take("take 12");
    if (phase() == Phase::kCommitting) take("take all");
  }
  // A worker that keeps a bucket for long counts as hung, so it takes before anybody waits.
  void tell_take_all(Member& member) {
    if (taking_.insert(&member).second) member.client->tell("take all");
  }
  nlohmann::json take_all(Member& member) {
    tell_take_all(member);
    taking_.erase(&member);
    return member.client->answer();
  }
  void take(const std::string& order) {
    for (auto& member : members_) member->client->tell(order);
    for (auto& member : members_) {
      const auto taken = member->client->answer();
      ASSERT_TRUE(is_ok(taken)) << taken;
      ASSERT_EQ(taken.value("more", false), phase() == Phase::kKeeping) << taken;
    }
  }
  bool eventually_event(const Member& member, const std::string& kind) {
    const std::string store = fleet_.agent(member.agent).store.string();
    return eventually([&] {
      Process events(fleet_.command({"events", "--store", store}));
      EXPECT_TRUE(events.wait(kPatience));
      return events.out().find("\"event\":\"" + kind + "\"") != std::string::npos;
    });
  }

  // --- the fault
  void strike() {
    const pid_t device = device_process(victim().agent);
    const pid_t agent = fleet_.agent(victim().agent).process->pid();
    const pid_t pid = who() == Who::kDeviceProcess ? device
                      : who() == Who::kAgent       ? agent
                                                   : fleet_.coordinator().pid();
    ASSERT_GT(pid, 0);
    if (how() == How::kFrozen) {
      freeze(pid);
    } else {
      ASSERT_EQ(::kill(pid, SIGKILL), 0);
    }
    if (who() != Who::kDeviceProcess) thaw(device);
    if (phase() == Phase::kFetching) {
      EXPECT_LT(link_->bytes_passed(), fetched_before_ + kBytes / 2) << "too late";
    }
    link_->limit(0);
  }
  void freeze(pid_t pid) {
    ASSERT_EQ(::kill(pid, SIGSTOP), 0);
    frozen_.insert(pid);
  }
  void thaw(pid_t pid) {
    if (frozen_.erase(pid) > 0) (void)::kill(pid, SIGCONT);
  }
  std::string state_of(const std::string& agent) {
    const auto status = fleet_.run_command({"status"}).json;
    for (const auto& node : status.value("nodes", nlohmann::json::array())) {
      if (node["node"] == agent) return node["state"];
    }
    return "unknown";
  }
  void end_fault() {
    if (who() == Who::kAgent) {
      ASSERT_TRUE(eventually([&] { return state_of(victim().agent) == "dead"; }));
    }
    while (!frozen_.empty()) thaw(*frozen_.begin());
    if (how() != How::kKilled) return;
    if (who() == Who::kCoordinator) fleet_.start_coordinator();
    if (who() == Who::kAgent) {
      fleet_.agent(victim().agent).process->kill();
      start_owner(victim().agent);
    }
  }

  // --- after it
  // Those that the fault does not concern get all bytes with the attach that they have, and are
  // ready.
  void expect_unharmed_finish() {
    std::vector<Member*> unharmed;
    for (auto& member : members_) {
      if (is_unharmed(*member)) unharmed.push_back(member.get());
    }
    if (phase() == Phase::kGathering) attach(survivor(), 2);
    for (Member* const member : unharmed) tell_take_all(*member);
    for (Member* const member : unharmed) {
      const auto taken = take_all(*member);
      ASSERT_TRUE(is_ok(taken)) << taken;
      EXPECT_EQ(taken.value("path", ""), "ipc") << taken;
    }
    for (Member* const member : unharmed) {
      EXPECT_EQ(sums_of(*member->client), checkpoints_[1].sums());
      const auto loaded = member->client->ask("loaded");
      EXPECT_TRUE(is_ok(loaded)) << loaded;
    }
  }
  // It may have to attach again.
  void expect_comes_back(Member& member) {
    nlohmann::json said;
    const bool back = eventually(
        [&] {
          said = take_all(member);
          if (is_ok(said)) said = member.client->ask("loaded");
          if (is_ok(said)) return true;
          if (said.value("code", "") == "PEER_LOST") said = member.client->ask("connect");
          tell_attach(member, 2);
          said = member.client->answer();
          return false;
        },
        3 * kPatience);
    EXPECT_TRUE(back) << said;
    EXPECT_EQ(sums_of(*member.client), checkpoints_[1].sums());
  }
  void expect_ends_with_reasons(const Fleet::Answer& update) {
    EXPECT_NE(update.exit_code, -2) << "it did not end: " << update.err;
    if (!update.json.is_object() || !update.json.contains("members")) {
      EXPECT_EQ(who(), Who::kCoordinator) << update.err;
      EXPECT_NE(update.err.find("unknown"), std::string::npos) << update.err;
      return;
    }
    for (const auto& member : update.json["members"]) {
      EXPECT_TRUE(member["state"] == "ready" || member["why"] != "") << update.json;
      if (!is_unharmed(member["node"] == victim().agent ? victim() : survivor())) continue;
      EXPECT_EQ(member["state"], "ready") << update.json;
      if (phase() != Phase::kKeeping) continue;
      EXPECT_GT(member["kept_bytes"], 0) << update.json;
    }
  }
  // A copy in the store, compared with the files that were published.
  bool eventually_whole(const std::string& agent, int version) {
    const std::string id = "m@" + std::to_string(version);
    const fs::path copies = fleet_.agent(agent).store / "models" / id;
    fs::path copy;
    const bool whole = eventually(
        [&] {
          std::error_code gone;
          for (fs::directory_iterator item(copies, gone), end; !gone && item != end;
               item.increment(gone)) {
            if (fs::exists(item->path() / "rekindle.manifest")) copy = item->path();
          }
          return !copy.empty();
        },
        3 * kPatience);
    if (!whole) return false;
    EXPECT_EQ(compare_checkpoints(fleet_.dir(id), copy), "") << agent;
    return true;
  }
  void expect_nothing_left(int version) {
    for (const auto& member : members_) {
      const std::string& agent = member->agent;
      EXPECT_TRUE(eventually_whole(agent, version)) << agent << " lacks m@" << version;
      EXPECT_TRUE(eventually_no_sessions(agent)) << devices(agent);
      const pid_t device = device_process(agent);
      EXPECT_TRUE(eventually([&] { return device_bytes_used(device) <= used_[agent]; }))
          << agent << ": " << device_bytes_used(device) << " > " << used_[agent];
      EXPECT_LE(meetings_of(device), 1) << agent;
      const auto memfds = [&] {
        return memfds_of(device) + memfds_of(fleet_.agent(agent).process->pid()) +
               memfds_of(member->client->process().pid());
      };
      EXPECT_TRUE(eventually([&] { return memfds() <= memfds_[agent]; }))
          << agent << ": " << memfds() << " > " << memfds_[agent];
      EXPECT_TRUE(eventually([&] {
        return chaos::unfinished_files(fleet_.agent(agent).store).empty();
      })) << agent
          << ": " << ::testing::PrintToString(chaos::unfinished_files(fleet_.agent(agent).store));
    }
    nlohmann::json status;
    EXPECT_TRUE(eventually([&] {
      status = fleet_.run_command({"status"}).json;
      if (!status.is_object()) return false;
      for (const auto& round : status["rounds"]) {
        if (round["phase"] != "over") return false;
      }
      return status["pulls"].empty();
    })) << status;
  }

  std::vector<Checkpoint> checkpoints_{plain_checkpoint(32, 61), plain_checkpoint(32, 62),
                                       plain_checkpoint(32, 63)};
  std::unique_ptr<FaultProxy> link_;
  std::unique_ptr<Process> update_;
  std::uint64_t fetched_before_ = 0;
  std::set<pid_t> frozen_;
  std::set<Member*> taking_;
  // By agent, before the update.
  std::map<std::string, std::uint64_t> used_;
  std::map<std::string, int> memfds_;
};

TEST_P(OwnerFaults, Row43LeaveRightBytesAndNoRubbishAndTheNextUpdateWorks) {
  ASSERT_NO_FATAL_FAILURE(start_fleet());
  if (IsSkipped()) return;
  ASSERT_NO_FATAL_FAILURE(begin_update());
  ASSERT_NO_FATAL_FAILURE(strike());
  ASSERT_NO_FATAL_FAILURE(expect_unharmed_finish());
  ASSERT_NO_FATAL_FAILURE(end_fault());
  for (auto& member : members_) {
    if (!is_unharmed(*member)) expect_comes_back(*member);
  }
  expect_ends_with_reasons(finish(*update_));
  expect_nothing_left(2);
  offer(3);
  const auto next = move_all(3);
  EXPECT_EQ(next.exit_code, 0) << next.err << next.json;
  EXPECT_EQ(broadcast_in(next.json), 2) << next.json;
  for (auto& member : members_) EXPECT_EQ(sums_of(*member->client), checkpoints_[2].sums());
  expect_nothing_left(3);
}

std::string name_of(const ::testing::TestParamInfo<Fault>& info) {
  constexpr const char* kWho[] = {"ADeviceProcess", "AnAgent", "TheCoordinator"};
  constexpr const char* kHow[] = {"Killed", "Frozen"};
  constexpr const char* kPhase[] = {"Gathering", "Meeting", "Fetching", "Keeping", "Committing"};
  const auto& [rank, who, how, phase] = info.param;
  return std::string(kWho[static_cast<int>(who)]) + kHow[static_cast<int>(how)] + "While" +
         kPhase[static_cast<int>(phase)];
}

using ::testing::Combine;
using ::testing::Values;

const auto kHow = Values(How::kKilled, How::kFrozen);

INSTANTIATE_TEST_SUITE_P(OfTheSecondRank, OwnerFaults,
                         Combine(Values(Rank::kSecond), Values(Who::kDeviceProcess, Who::kAgent),
                                 kHow,
                                 Values(Phase::kGathering, Phase::kMeeting, Phase::kFetching,
                                        Phase::kKeeping, Phase::kCommitting)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(OfTheFirstRank, OwnerFaults,
                         Combine(Values(Rank::kFirst), Values(Who::kDeviceProcess, Who::kAgent),
                                 kHow, Values(Phase::kMeeting)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(OfAllRanks, OwnerFaults,
                         Combine(Values(Rank::kSecond), Values(Who::kCoordinator), kHow,
                                 Values(Phase::kFetching, Phase::kKeeping)),
                         name_of);

}  // namespace
}  // namespace rekindle::testing
