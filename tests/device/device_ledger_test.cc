#include "recovery/device/device_ledger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle::device {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr TimePoint kStart{1h};

std::shared_ptr<const void> a_lease() { return std::make_shared<int>(0); }

class DeviceLedgerTest : public ::testing::Test {
 protected:
  // Whether the ledger keeps what the session was lent.
  bool lent() const { return !lease_.expired(); }
  void begin(std::uint64_t session) {
    auto lease = a_lease();
    lease_ = lease;
    ledger_.begin(session, std::move(lease));
  }

  DeviceLedger ledger_;
  std::weak_ptr<const void> lease_;
};

TEST_F(DeviceLedgerTest, ASessionThatIsOverGivesItsLeaseBack) {
  begin(1);
  EXPECT_TRUE(ledger_.is_open(1));
  EXPECT_EQ(ledger_.open_sessions(), 1u);
  EXPECT_TRUE(ledger_.over(1, false));
  EXPECT_FALSE(lent());
  EXPECT_FALSE(ledger_.is_open(1));
  EXPECT_FALSE(ledger_.over(1, false)) << "only once";
}

TEST_F(DeviceLedgerTest, ASessionThatTheAgentEndedKeepsItsLeaseUntilTheProcessIsDone) {
  begin(1);
  EXPECT_TRUE(ledger_.end(1));
  EXPECT_FALSE(ledger_.end(1));
  EXPECT_TRUE(lent());
  EXPECT_FALSE(ledger_.over(1, false)) << "nobody waits for it";
  EXPECT_FALSE(lent());
}

TEST_F(DeviceLedgerTest, ALostDeviceKeepsItsLeaseUntilTheProcessIsReaped) {
  begin(1);
  EXPECT_TRUE(ledger_.over(1, true));
  EXPECT_TRUE(lent());
  EXPECT_THAT(ledger_.lose_all().sessions, IsEmpty());
  EXPECT_TRUE(lent());
  ledger_.reaped();
  EXPECT_FALSE(lent());
}

TEST_F(DeviceLedgerTest, ASpreadOutlastsTheEndOfItsSession) {
  begin(1);
  ledger_.spread(1);
  EXPECT_TRUE(ledger_.end(1));
  EXPECT_TRUE(ledger_.is_spreading(1));
  EXPECT_TRUE(ledger_.spread_over(1));
  EXPECT_FALSE(ledger_.spread_over(1));
  EXPECT_FALSE(ledger_.is_spreading(1));
}

TEST_F(DeviceLedgerTest, OnlySessionsThatAreHereAreStopped) {
  EXPECT_FALSE(ledger_.stop(1, kStart));
  begin(1);
  EXPECT_TRUE(ledger_.stop(1, kStart)) << "it waits for its round";
  EXPECT_FALSE(ledger_.overdue(kStart + 1h, 60s)) << "no SpreadOver is expected";
}

TEST_F(DeviceLedgerTest, AStopIsOverdueAfterItsLimit) {
  begin(1);
  ledger_.spread(1);
  EXPECT_FALSE(ledger_.overdue(kStart + 1h, 60s));
  EXPECT_TRUE(ledger_.stop(1, kStart));
  EXPECT_TRUE(ledger_.stop(1, kStart + 50s)) << "the first stop counts";
  EXPECT_FALSE(ledger_.overdue(kStart + 60s, 60s));
  EXPECT_TRUE(ledger_.overdue(kStart + 61s, 60s));
  ledger_.excuse(kStart + 61s);
  EXPECT_FALSE(ledger_.overdue(kStart + 121s, 60s));
  EXPECT_TRUE(ledger_.spread_over(1));
  EXPECT_FALSE(ledger_.overdue(kStart + 1h, 60s));
}

TEST_F(DeviceLedgerTest, TheEndOfTheProcessAnswersForEverything) {
  begin(1);
  begin(2);
  ledger_.spread(2);
  begin(3);
  ledger_.spread(3);
  ledger_.end(3);
  ledger_.ask_for_id(9);
  const auto lost = ledger_.lose_all();
  EXPECT_THAT(lost.sessions, ElementsAre(1, 2));
  EXPECT_THAT(lost.spreads, ElementsAre(2, 3));
  EXPECT_THAT(lost.ids, ElementsAre(9));
  EXPECT_FALSE(ledger_.id_made(9));
  EXPECT_TRUE(lent());
  ledger_.reaped();
  EXPECT_FALSE(lent());
  EXPECT_THAT(ledger_.lose_all().sessions, IsEmpty());
}

TEST_F(DeviceLedgerTest, AnIdIsAnsweredOnce) {
  EXPECT_FALSE(ledger_.id_made(4));
  ledger_.ask_for_id(4);
  EXPECT_TRUE(ledger_.id_made(4));
  EXPECT_FALSE(ledger_.id_made(4));
}

}  // namespace
}  // namespace rekindle::device
