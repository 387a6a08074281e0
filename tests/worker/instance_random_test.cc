// An instance under random events, beside a model that keeps only what the promises speak of.
#include <map>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "recovery/worker/core/instance.h"

namespace rekindle::worker {
namespace {

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

  SessionId any() {  // sometimes one that is gone, or never was
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
