#include "recovery/worker/core/instance.h"

#include <map>
#include <random>
#include <set>

#include <gtest/gtest.h>

namespace rekindle::worker {
namespace {

using Choice = Instance::Choice;

class InstanceTest : public ::testing::Test {
 protected:
  Instance instance_{"i"};

  Instance::Change attach(std::uint32_t rank, SessionId session, std::uint32_t world = 2,
                          std::uint64_t generation = 5) {
    auto change = instance_.attach({rank, world, generation, "m"}, session);
    EXPECT_TRUE(change) << change.error().message();
    return change ? *change : Instance::Change{};
  }
  ErrorCode refused(const Instance::Rank& rank) {
    const auto change = instance_.attach(rank, 99);
    EXPECT_FALSE(change);
    return change ? ErrorCode::kInternal : change.error().code();
  }
  void commit_both() {
    attach(0, 10);
    attach(1, 11);
    ASSERT_TRUE(instance_.choose(10, 41));
    (void)instance_.loaded(10);
    ASSERT_EQ(instance_.loaded(11).commit, (std::vector<SessionId>{10, 11}));
  }
};

TEST_F(InstanceTest, IsCommittedOnceEveryRankHasLoaded) {
  EXPECT_EQ(instance_.state(), InstanceState::kAbsent);
  attach(0, 10);
  EXPECT_TRUE(instance_.loaded(10).commit.empty());
  EXPECT_EQ(instance_.state(), InstanceState::kLoading);
  EXPECT_EQ(instance_.why(), "rank 1 of 2 has not attached");
  attach(1, 11);
  EXPECT_EQ(instance_.why(), "rank 1 of 2 has not loaded");
  EXPECT_EQ(instance_.loaded(11).commit, (std::vector<SessionId>{10, 11}));
  EXPECT_EQ(instance_.state(), InstanceState::kCommitted);
  EXPECT_EQ(instance_.why(), "");
}

TEST_F(InstanceTest, ADeadRankMakesItUnfitUntilThatRankHasLoadedAgain) {
  commit_both();
  EXPECT_TRUE(instance_.failed(11, "died (SIGKILL)").refuse.empty());
  EXPECT_EQ(instance_.state(), InstanceState::kUnfit);
  EXPECT_EQ(instance_.unfit_rank(), 1u);
  EXPECT_EQ(instance_.why(), "rank 1 died (SIGKILL)");
  attach(1, 12);
  EXPECT_EQ(instance_.state(), InstanceState::kUnfit);
  EXPECT_EQ(instance_.loaded(12).commit, (std::vector<SessionId>{12})) << "survivors keep theirs";
  EXPECT_EQ(instance_.state(), InstanceState::kCommitted);
}

TEST_F(InstanceTest, ThoseThatWaitAreToldWhichRankFailedAndWhy) {
  attach(0, 10);
  attach(1, 11);
  (void)instance_.loaded(10);
  const auto change = instance_.failed(11, "hangs");
  ASSERT_EQ(change.refuse.size(), 1u);
  EXPECT_EQ(change.refuse[0].first, 10u);
  EXPECT_EQ(change.refuse[0].second.code(), ErrorCode::kUnavailable);
  EXPECT_NE(change.refuse[0].second.message().find("rank 1 hangs"), std::string::npos);
  attach(1, 12);
  EXPECT_EQ(instance_.loaded(12).commit, (std::vector<SessionId>{10, 12}))
      << "what rank 0 has loaded stays loaded";
}

TEST_F(InstanceTest, ARankThatAttachesAgainReplacesItsOldSession) {
  commit_both();
  const auto change = attach(1, 12);
  ASSERT_EQ(change.ended.size(), 1u);
  EXPECT_EQ(change.ended[0].first, 11u);
  EXPECT_EQ(change.ended[0].second.code(), ErrorCode::kStale);
  EXPECT_EQ(instance_.state(), InstanceState::kLoading);
  (void)instance_.failed(11, "died late");
  EXPECT_EQ(instance_.state(), InstanceState::kLoading) << "the old session is nobody any more";
  EXPECT_TRUE(instance_.loaded(11).commit.empty());
  EXPECT_EQ(instance_.loaded(12).commit, (std::vector<SessionId>{12}));
}

TEST_F(InstanceTest, IsNotFitWhileARankElsewhereLoadsAnew) {
  attach(0, 10);
  ASSERT_TRUE(instance_.choose(10, 41));
  EXPECT_TRUE(instance_.others_loading().commit.empty());
  (void)instance_.loaded(10);
  EXPECT_EQ(instance_.why(), "rank 1 of 2 has not attached");
  ASSERT_EQ(instance_.others_loaded().commit, (std::vector<SessionId>{10}));
  EXPECT_TRUE(instance_.others_loading().ended.empty());
  EXPECT_EQ(instance_.state(), InstanceState::kLoading);
  EXPECT_EQ(instance_.why(), "a rank on another host has not loaded");
  EXPECT_TRUE(instance_.others_loaded().commit.empty()) << "rank 0 keeps what it has";
  EXPECT_EQ(instance_.state(), InstanceState::kCommitted);
}

TEST_F(InstanceTest, AllOfWhoseRanksAreHereDoesNotMindOthers) {
  commit_both();
  (void)instance_.others_loaded();
  (void)instance_.others_loading();
  EXPECT_EQ(instance_.state(), InstanceState::kCommitted);
}

TEST_F(InstanceTest, AHigherGenerationEndsAllOldSessions) {
  commit_both();
  const auto change = attach(0, 20, 2, 6);
  EXPECT_EQ(change.ended.size(), 2u);
  EXPECT_EQ(instance_.state(), InstanceState::kLoading);
  EXPECT_FALSE(instance_.version()) << "its version is chosen anew";
  EXPECT_EQ(refused({1, 2, 5, "m"}), ErrorCode::kStale);
}

TEST_F(InstanceTest, RanksThatContradictEachOtherAreRefused) {
  attach(0, 10);
  EXPECT_EQ(refused({1, 3, 5, "m"}), ErrorCode::kInvalid);
  EXPECT_EQ(refused({1, 2, 5, "other"}), ErrorCode::kInvalid);
  EXPECT_EQ(refused({2, 2, 5, "m"}), ErrorCode::kInvalid);
  EXPECT_EQ(refused({0, 0, 5, "m"}), ErrorCode::kInvalid);
  EXPECT_EQ(instance_.choose(10, 41), Choice::kGiven);
  attach(1, 11);
  EXPECT_EQ(instance_.choose(11, 42).error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(instance_.choose(11, 41), Choice::kGiven);
}

TEST_F(InstanceTest, LatestIsChosenByTheFirstRankForAll) {
  attach(0, 10);
  attach(1, 11);
  EXPECT_EQ(instance_.choose(10, {}), Choice::kChoose);
  EXPECT_EQ(instance_.choose(11, {}), Choice::kWait);
  ASSERT_TRUE(instance_.chosen(10, {"m", 41}));
  EXPECT_EQ(instance_.choose(11, {}), Choice::kGiven);
  EXPECT_EQ(instance_.version(), (ModelVersion{"m", 41}));
  EXPECT_EQ(instance_.chosen(11, {"m", 42}).error().code(), ErrorCode::kStale);
}

TEST_F(InstanceTest, WhenTheChoosingRankFailsTheNextOneChooses) {
  attach(0, 10);
  attach(1, 11);
  EXPECT_EQ(instance_.choose(10, {}), Choice::kChoose);
  (void)instance_.failed(10, "died");
  EXPECT_EQ(instance_.choose(11, {}), Choice::kChoose);
  instance_.choice_failed(11);
  attach(0, 12);
  EXPECT_EQ(instance_.choose(12, {}), Choice::kChoose);
  EXPECT_EQ(instance_.chosen(10, {"m", 40}).error().code(), ErrorCode::kStale);
}

TEST_F(InstanceTest, ARankThatComesBackGetsTheVersionOfTheOthers) {
  commit_both();
  (void)instance_.failed(11, "died");
  attach(1, 12);
  EXPECT_EQ(instance_.choose(12, {}), Choice::kGiven);
  EXPECT_EQ(instance_.version(), (ModelVersion{"m", 41}));
}

TEST_F(InstanceTest, WhenNobodyIsLeftTheVersionIsChosenAnewButWhatFailedIsKnown) {
  commit_both();
  (void)instance_.failed(10, "died (SIGKILL)");
  (void)instance_.failed(11, "died (SIGKILL)");
  EXPECT_EQ(instance_.state(), InstanceState::kUnfit);
  attach(0, 20);
  EXPECT_EQ(instance_.choose(20, {}), Choice::kChoose);
  (void)instance_.loaded(20);
  EXPECT_EQ(instance_.unfit_rank(), 1u);
}

TEST_F(InstanceTest, IsAbsentAfterAllRanksHaveDetached) {
  commit_both();
  (void)instance_.left(10);
  EXPECT_EQ(instance_.state(), InstanceState::kUnfit);
  EXPECT_EQ(instance_.why(), "rank 0 has detached");
  (void)instance_.left(11);
  EXPECT_EQ(instance_.state(), InstanceState::kAbsent);
}

TEST_F(InstanceTest, RanksOfOtherHostsAreAsTheCoordinatorSays) {
  attach(0, 10);
  (void)instance_.loaded(10);
  EXPECT_EQ(instance_.others_loaded().commit, (std::vector<SessionId>{10}));
  EXPECT_EQ(instance_.state(), InstanceState::kCommitted);
  EXPECT_TRUE(instance_.others_loaded().commit.empty()) << "said again";
  (void)instance_.others_failed("rank 1 on b: the node died");
  EXPECT_EQ(instance_.state(), InstanceState::kUnfit);
  EXPECT_EQ(instance_.why(), "rank 1 on b: the node died");
  EXPECT_TRUE(instance_.others_loaded().commit.empty()) << "rank 0 may serve already";
  EXPECT_EQ(instance_.state(), InstanceState::kCommitted);
}

TEST_F(InstanceTest, OthersLoadedIsNotEnoughAndIsForgottenWhenARankHereFails) {
  attach(0, 10, 3);
  attach(1, 11, 3);
  EXPECT_TRUE(instance_.others_loaded().commit.empty());
  (void)instance_.loaded(10);
  EXPECT_EQ(instance_.loaded(11).commit, (std::vector<SessionId>{10, 11}));
  (void)instance_.failed(11, "died");
  EXPECT_EQ(instance_.state(), InstanceState::kUnfit);
  attach(1, 12, 3);
  EXPECT_TRUE(instance_.loaded(12).commit.empty()) << "the others may have changed meanwhile";
  EXPECT_EQ(instance_.others_loaded().commit, (std::vector<SessionId>{12}));
}

TEST_F(InstanceTest, WhereAllRanksAreHereNobodyElseHasASay) {
  commit_both();
  (void)instance_.others_failed("rank 1 on b: died");
  EXPECT_EQ(instance_.state(), InstanceState::kCommitted);
}

TEST_F(InstanceTest, ThoseThatWaitHearOfAFailureElsewhereOnce) {
  attach(0, 10);
  (void)instance_.loaded(10);
  EXPECT_EQ(instance_.others_failed("rank 1 on b: died").refuse.size(), 1u);
  EXPECT_TRUE(instance_.others_failed("rank 1 on b: died").refuse.empty());
}

TEST(InstanceName, IsAPlainFileName) {
  for (const char* good : {"a", "qwen3-0", "A.b_c", "0"}) EXPECT_TRUE(check_instance_name(good));
  for (const char* bad : {"", ".", "..", ".x", "a/b", "a b", "a\n", "\xc3\xa4"}) {
    EXPECT_FALSE(check_instance_name(bad)) << bad;
  }
  EXPECT_TRUE(check_instance_name(std::string(128, 'x')));
  EXPECT_FALSE(check_instance_name(std::string(129, 'x')));
}

// --- random events, checked against a simple model of the promises

struct Worker {
  std::uint32_t rank = 0;
  std::uint64_t generation = 0;
  bool loaded = false;
  bool committed = false;
  std::optional<ModelVersion> version;
};

class Model {
 public:
  explicit Model(std::uint64_t seed)
      : random_(seed), world_(static_cast<std::uint32_t>(1 + random_() % 4)) {}

  void step() {
    const auto what = random_() % 10;
    if (what < 3) {
      attach();
    } else if (what < 6) {
      load();
    } else if (what < 8) {
      choose();
    } else if (!live_.empty()) {
      fail(what == 8);
    }
    check();
  }

 private:
  void attach() {
    const bool bump = random_() % 16 == 0;
    const auto rank = static_cast<std::uint32_t>(random_() % world_);
    const std::uint64_t generation = generation_ + (bump ? 1 : 0);
    const SessionId session = ++last_;
    const auto change = instance_.attach({rank, world_, generation, "m"}, session);
    ASSERT_TRUE(change) << change.error().message();
    generation_ = generation;
    for (const auto& [old, why] : change->ended) {
      ASSERT_EQ(live_.count(old), 1u) << "only who was there can be ended";
      ASSERT_EQ(why.code(), ErrorCode::kStale);
      live_.erase(old);
    }
    for (const auto& [other, worker] : live_) {
      ASSERT_NE(worker.rank, rank) << "two sessions of one rank";
      ASSERT_EQ(worker.generation, generation) << "two generations";
    }
    ASSERT_TRUE(change->commit.empty());
    live_[session] = {rank, generation, false, false, {}};
  }

  void load() {
    const SessionId session = any();
    const auto before = live_;
    const auto change = instance_.loaded(session);
    if (const auto worker = live_.find(session); worker != live_.end())
      worker->second.loaded = true;
    apply(change);
    ASSERT_TRUE(change.refuse.empty());
    ASSERT_TRUE(before.count(session) == 1 || change.commit.empty());
  }

  void choose() {
    const SessionId session = any();
    const auto choice = instance_.choose(session, {});
    ASSERT_EQ(choice.has_value(), live_.count(session) == 1);
    if (!choice || *choice == Instance::Choice::kWait) return;
    if (*choice == Instance::Choice::kChoose) {
      if (random_() % 3 == 0) return instance_.choice_failed(session);
      ASSERT_TRUE(instance_.chosen(session, {"m", ++newest_}));
    }
    ASSERT_TRUE(instance_.version());
    live_[session].version = instance_.version();
  }

  void fail(bool detach) {
    const SessionId session = any();
    const bool was_live = live_.erase(session) == 1;
    const auto change = detach ? instance_.left(session) : instance_.failed(session, "died");
    apply(change);
    ASSERT_TRUE(change.commit.empty()) << "a failure makes nobody ready";
    ASSERT_TRUE(was_live || change.refuse.empty());
    for (const auto& [other, why] : change.refuse) {
      ASSERT_TRUE(live_.at(other).loaded && !live_.at(other).committed);
    }
  }

  void apply(const Instance::Change& change) {
    for (const SessionId session : change.commit) {
      ASSERT_EQ(live_.count(session), 1u);
      ASSERT_TRUE(live_[session].loaded && !live_[session].committed);
      live_[session].committed = true;
    }
  }

  void check() {
    std::set<std::uint32_t> loaded;
    std::set<ModelVersion> versions;
    for (const auto& [session, worker] : live_) {
      ASSERT_TRUE(instance_.is_current(session));
      if (worker.loaded) loaded.insert(worker.rank);
      if (worker.version) versions.insert(*worker.version);
    }
    ASSERT_LE(versions.size(), 1u) << "two versions in one generation";
    const bool fit = loaded.size() == world_;
    ASSERT_EQ(instance_.state() == InstanceState::kCommitted, fit);
    ASSERT_EQ(instance_.why().empty(), fit);
    ASSERT_EQ(instance_.has_sessions(), !live_.empty());
    for (const auto& [session, worker] : live_) ASSERT_TRUE(!fit || worker.committed);
  }

  // Sometimes a session that has ended, or never began.
  SessionId any() {
    if (live_.empty() || random_() % 8 == 0) return 1 + random_() % (last_ + 2);
    return std::next(live_.begin(), static_cast<std::ptrdiff_t>(random_() % live_.size()))->first;
  }

  std::mt19937_64 random_;
  const std::uint32_t world_;
  Instance instance_{"i"};
  std::map<SessionId, Worker> live_;
  SessionId last_ = 0;
  std::uint64_t generation_ = 1;
  std::uint64_t newest_ = 0;
};

TEST(InstanceRandom, IsReadyExactlyWhenEveryRankHasLoadedOneVersion) {
  std::random_device device;
  for (int run = 0; run < 400; ++run) {
    const std::uint64_t seed = device();
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Model model(seed);
    for (int step = 0; step < 200; ++step) {
      model.step();
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace rekindle::worker
