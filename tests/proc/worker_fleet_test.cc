// An instance whose ranks live on several hosts, and workers of other users.
#include <filesystem>

#include <unistd.h>

#include "tests/proc/worker_fixture.h"

namespace rekindle::testing {
namespace {

class WorkerFleet : public WithWorkers {
 protected:
  void SetUp() override { make_checkpoint(fleet_.dir("model"), 4, 512, 9); }
  // a holds m@1, b nothing.
  void start_two_hosts() {
    fleet_.start_coordinator();
    fleet_.start_agent("a");
    fleet_.publish("a", "m@1", fleet_.dir("model"));
    fleet_.start_agent("b");
  }
};

TEST_F(WorkerFleet, AnInstanceOverTwoHostsIsReadyOnBothOnlyWhileAllItsRanksAre) {
  start_two_hosts();
  const auto first = rank_on("a", 0, 2);
  ASSERT_TRUE(first->wait_for_out("took all")) << first->out() << first->err();
  EXPECT_FALSE(std::filesystem::exists(ready_file("a"))) << "its other rank is not there";
  auto second = rank_on("b", 1, 2);
  const auto sum = sum_of(*second);
  EXPECT_EQ(sum.size(), 32u) << second->out() << second->err();
  EXPECT_EQ(sum_of(*first), sum);
  EXPECT_TRUE(eventually_state("a", "COMMITTED")) << instance_at("a", "i");
  EXPECT_TRUE(eventually_state("b", "COMMITTED")) << instance_at("b", "i");
  EXPECT_TRUE(std::filesystem::exists(ready_file("a")));

  second->kill();
  ASSERT_TRUE(eventually_state("a", "UNFIT")) << instance_at("a", "i");
  EXPECT_FALSE(std::filesystem::exists(ready_file("a")));
  EXPECT_NE(instance_at("a", "i")["why"].get<std::string>().find("rank 1"), std::string::npos)
      << instance_at("a", "i");
  EXPECT_TRUE(first->running()) << "its session goes on";

  second = rank_on("b", 1, 2);
  EXPECT_EQ(sum_of(*second), sum);
  EXPECT_TRUE(eventually_state("a", "COMMITTED")) << instance_at("a", "i");
  EXPECT_TRUE(eventually([&] { return std::filesystem::exists(ready_file("a")); }));
}

TEST_F(WorkerFleet, AnInstanceIsNotReadyWhileARankOnAnotherHostAttachesAnew) {
  start_two_hosts();
  const auto first = rank_on("a", 0, 2);
  const auto second = rank_on("b", 1, 2);
  ASSERT_EQ(sum_of(*first).size(), 32u) << first->out() << first->err();
  ASSERT_TRUE(eventually_state("b", "COMMITTED")) << instance_at("b", "i");
  // In the place of one that lives: nothing has failed in between.
  const auto anew = rank_on("b", 1, 2, {"hang"});
  ASSERT_TRUE(anew->wait_for_out("took all")) << anew->out() << anew->err();
  EXPECT_TRUE(eventually_state("a", "LOADING")) << instance_at("a", "i");
  EXPECT_FALSE(std::filesystem::exists(ready_file("a")));
  EXPECT_TRUE(first->running());
}

TEST_F(WorkerFleet, ARestartOfTheCoordinatorTakesBackNoReadiness) {
  start_two_hosts();
  const auto first = rank_on("a", 0, 2);
  const auto second = rank_on("b", 1, 2);
  ASSERT_EQ(sum_of(*first).size(), 32u) << first->out() << first->err();
  ASSERT_TRUE(eventually_state("b", "COMMITTED")) << instance_at("b", "i");
  fleet_.coordinator().kill();
  fleet_.start_coordinator();
  // Once it has committed j it has heard of all ranks of i, too.
  const auto j_on = [&](const std::string& agent, const char* rank) {
    return worker(agent, {},
                  {{"REKINDLE_INSTANCE", "j"}, {"REKINDLE_RANK", rank}, {"REKINDLE_WORLD", "2"}});
  };
  const auto third = j_on("a", "0");
  const auto fourth = j_on("b", "1");
  ASSERT_EQ(sum_of(*third).size(), 32u) << third->out() << third->err();
  for (const std::string agent : {"a", "b"}) {
    EXPECT_EQ(instance_at(agent, "i")["state"], "COMMITTED");
    for (const auto& event : events_of(agent)) EXPECT_NE(event["event"], "unfit") << event;
  }
}

TEST_F(WorkerFleet, TheDeathOfAHostMakesItsInstanceUnfitEverywhere) {
  start_two_hosts();
  const auto first = rank_on("a", 0, 2);
  const auto second = rank_on("b", 1, 2);
  ASSERT_EQ(sum_of(*first).size(), 32u) << first->out() << first->err();
  fleet_.agent("b").process->kill();
  ASSERT_TRUE(eventually_state("a", "UNFIT")) << instance_at("a", "i");
  EXPECT_FALSE(std::filesystem::exists(ready_file("a")));
  EXPECT_TRUE(first->running());
}

TEST_F(WorkerFleet, WorkersOfAnotherUserAreServedOnlyWhenTheyAreAllowed) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can start a worker of another user";
  constexpr const char* kNobody = "65534";
  // Where that user can read and run them.
  namespace fs = std::filesystem;
  const auto all = fs::perms::owner_all | fs::perms::group_read | fs::perms::group_exec |
                   fs::perms::others_read | fs::perms::others_exec;
  fs::create_directory(fleet_.dir("bin"));
  for (fs::path path = fleet_.dir("bin"); path != "/dev/shm"; path = path.parent_path()) {
    fs::permissions(path, all);
  }
  const auto place = [&](const fs::path& from, const char* name) {
    fs::copy_file(from, fleet_.dir("bin") / name, fs::copy_options::overwrite_existing);
    fs::permissions(fleet_.dir("bin") / name, all);
  };
  place(WORKER_MAIN, "worker");
  place(LIBREKINDLE, "librekindle.so.1");
  const auto as_nobody = [&] {
    Spawn spawn{.argv = {"setpriv", "--reuid", kNobody, "--regid", kNobody, "--clear-groups",
                         (fleet_.dir("bin") / "worker").string()}};
    spawn.env = {{"REKINDLE_STORE", fleet_.agent("a").store.string()},
                 {"LD_LIBRARY_PATH", fleet_.dir("bin").string()}};
    spawn.cwd = "/";
    return std::make_unique<Process>(std::move(spawn));
  };
  fleet_.start_agent("a", {"--allow-uid", kNobody});
  fleet_.publish("a", "m@1", fleet_.dir("model"));
  const auto allowed = as_nobody();
  EXPECT_EQ(sum_of(*allowed).size(), 32u) << allowed->out() << allowed->err();
  const auto ours = worker("a");
  EXPECT_EQ(sum_of(*ours).size(), 32u) << ours->out() << ours->err();

  fleet_.agent("a").process->kill();
  fleet_.start_agent("a", {"--allow-uid", "1"});
  const auto denied = as_nobody();
  EXPECT_TRUE(denied->wait_for_out("lost DENIED")) << denied->out() << denied->err();

  fleet_.agent("a").process->kill();
  fleet_.start_agent("a");
  const auto shut_out = as_nobody();
  EXPECT_TRUE(shut_out->wait_for_out("lost ")) << shut_out->out() << shut_out->err();
  EXPECT_EQ(shut_out->out().find("ready m@1"), std::string::npos);
}

}  // namespace
}  // namespace rekindle::testing
