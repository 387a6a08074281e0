// How copies come to be served and how they are removed: PartialSources and VersionRetirement on a
// real store, without a coordinator and without peers.
#include <gtest/gtest.h>

#include "recovery/agent/partial_sources.h"
#include "recovery/agent/version_retirement.h"
#include "tests/recovery/rpc_fixture.h"
#include "tests/store/store_fixture.h"

namespace rekindle::agent {
namespace {

using namespace std::chrono_literals;

class CopiesOfAHost : public store::StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    parts_.emplace(AgentParts{identity_, *store_, pool_, pool_, registry_, served_, link_, readers_,
                              publishers_});
    serving_.emplace(loop_.executor(), *parts_,
                     [this](const ModelVersion& id) { return retirement_->is_retiring(id); });
    retirement_.emplace(
        *parts_, VersionRetirement::Hooks{
                     .is_being_filled =
                         [this](const ModelVersion& id) { return serving_->is_being_filled(id); },
                     .copies_removed = [this] { ++removals_; }});
  }
  void TearDown() override { loop_.run(serving_->close(5s)); }

  std::unique_ptr<store::PendingVersion> begin_pull() {
    auto pending = begin(store::all_boxes(*checkpoint()));
    held_ = std::make_shared<swarm::HeldTiles>(pending->verified());
    serving_->begin(*pending, held_, /*for_round=*/false);
    return pending;
  }
  // Starts to retire the version and waits until its workers are asked to end.
  void retire_until_workers_are_asked(std::optional<Result<std::uint64_t>>& outcome) {
    readers_.set_workers({.count = [](const ModelVersion&) { return 1u; },
                          .end = [this](ModelVersion) -> async::Task<void> {
                            workers_asked_ = true;
                            while (!workers_ended_) co_await async::sleep_for(1ms);
                          }});
    boost::asio::co_spawn(
        loop_.executor(), retirement_->retire(id_),
        [&outcome](const std::exception_ptr&, Result<std::uint64_t> freed) { outcome = freed; });
    loop_.run_until([this] { return workers_asked_; });
  }

  rpc::testing::Loop loop_;
  const rpc::Identity identity_ = rpc::testing::make_identity(proto::ROLE_AGENT, "a");
  GrantClock grant_clock_;
  WorkerPool pool_{"t-blocking", 2, 16};
  transport::SegmentRegistry registry_;
  ServedVersions served_{registry_};
  CoordinatorLink link_{loop_.executor(), identity_, grant_clock_, ""};
  VersionReaders readers_;
  const PublisherKeys publishers_;
  std::optional<AgentParts> parts_;
  std::optional<PartialSources> serving_;
  std::optional<VersionRetirement> retirement_;
  std::shared_ptr<swarm::HeldTiles> held_;
  int removals_ = 0;
  bool workers_asked_ = false;
  bool workers_ended_ = false;
};

TEST_F(CopiesOfAHost, APulledCopyIsServedWhileItIsFilledAndAfterItsCommit) {
  auto pending = begin_pull();
  const CopyKey key = key_of(pending->manifest());
  ASSERT_NE(served_.find(key), nullptr);
  EXPECT_FALSE(served_.find(key)->complete());
  EXPECT_TRUE(serving_->is_being_filled(id_));
  store::fill_all(*pending, *source_);
  const auto stored = store_->commit(std::move(pending));
  ASSERT_TRUE(stored) << stored.error().message();
  ASSERT_TRUE(loop_.run(serving_->commit(*stored, "pulled")));
  EXPECT_TRUE(served_.find(key)->complete());
  EXPECT_FALSE(serving_->is_being_filled(id_));
}

TEST_F(CopiesOfAHost, AnAbandonedCopyIsNotServed) {
  auto pending = begin_pull();
  const CopyKey key = key_of(pending->manifest());
  const auto regions = served_.find(key)->regions;
  loop_.run(serving_->abandon(key));
  EXPECT_EQ(served_.find(key), nullptr);
  EXPECT_FALSE(serving_->is_being_filled(id_));
  EXPECT_FALSE(registry_.lookup(regions[0]));
}

TEST_F(CopiesOfAHost, ARetiredVersionIsNeitherServedNorStored) {
  const auto stored = pull(store::all_boxes(*checkpoint()));
  ASSERT_TRUE(loop_.run(serving_->commit(stored, "pulled")));
  const auto freed = loop_.run(retirement_->retire(id_));
  ASSERT_TRUE(freed) << freed.error().message();
  EXPECT_GT(*freed, 0u);
  EXPECT_TRUE(served_.all().empty());
  EXPECT_TRUE(store_->find(id_).empty());
  EXPECT_EQ(removals_, 1);
}

TEST_F(CopiesOfAHost, ACopyThatArrivesDuringARetirementIsRemovedWithIt) {
  std::optional<Result<std::uint64_t>> outcome;
  retire_until_workers_are_asked(outcome);
  EXPECT_TRUE(retirement_->is_retiring(id_));
  EXPECT_EQ(retirement_->check_not_retiring(id_).error().code(), ErrorCode::kUnavailable);
  const auto late = loop_.run(serving_->commit(pull(store::all_boxes(*checkpoint())), "pulled"));
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code(), ErrorCode::kStale);
  EXPECT_THAT(late.error().message(), ::testing::HasSubstr("was retired while it was pulled"));
  EXPECT_TRUE(served_.all().empty());
  workers_ended_ = true;
  loop_.run_until([&] { return outcome.has_value(); });
  EXPECT_FALSE(retirement_->is_retiring(id_));
  EXPECT_TRUE(retirement_->check_not_retiring(id_));
  EXPECT_TRUE(store_->find(id_).empty());
}

TEST_F(CopiesOfAHost, WithoutACopyTheErrorSaysWhetherAPullRuns) {
  EXPECT_EQ(loop_.run(retirement_->retire(id_)).error().code(), ErrorCode::kNotFound);
  auto pending = begin_pull();
  const auto filling = loop_.run(retirement_->retire(id_));
  ASSERT_FALSE(filling);
  EXPECT_EQ(filling.error().code(), ErrorCode::kUnavailable);
  EXPECT_THAT(filling.error().message(), ::testing::HasSubstr("a pull of it is under way"));
}

TEST_F(CopiesOfAHost, ADroppedCopyGoesAlone) {
  const auto whole = pull(store::all_boxes(*checkpoint()));
  const auto shard = pull(store::shard_boxes(*checkpoint()));
  ASSERT_TRUE(loop_.run(serving_->commit(whole, "pulled")));
  ASSERT_TRUE(loop_.run(serving_->commit(shard, "pulled")));
  ASSERT_TRUE(loop_.run(retirement_->drop(whole)));
  EXPECT_EQ(served_.find(key_of(whole->manifest)), nullptr);
  EXPECT_NE(served_.find(key_of(shard->manifest)), nullptr);
}

}  // namespace
}  // namespace rekindle::agent
