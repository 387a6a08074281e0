#include "tools/cli/fleet_verdict.h"

#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace rekindle::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr double kGigabit = 1e9 / 8;

std::vector<FleetHost> hosts_named(const std::vector<std::string>& names) {
  std::vector<FleetHost> hosts;
  for (const auto& name : names) hosts.push_back({name, {}});
  return hosts;
}

PairReading tcp_read(std::size_t reader, std::size_t source, double gigabits_per_second) {
  PairReading reading;
  reading.hosts = {reader, source};
  reading.transport = "tcp";
  reading.bytes_per_second = gigabits_per_second * kGigabit;
  return reading;
}

PairReading failed_read(std::size_t reader, std::size_t source, const std::string& why) {
  PairReading reading = tcp_read(reader, source, 0);
  reading.error = why;
  return reading;
}

// All pairs of `hosts` at this speed.
std::vector<PairReading> all_at(std::size_t hosts, double gigabits_per_second) {
  std::vector<PairReading> readings;
  for (const auto& round : all_to_all(hosts, hosts)) {
    for (const auto& pair : round) {
      readings.push_back(tcp_read(pair.reader, pair.source, gigabits_per_second));
    }
  }
  return readings;
}

PairReading& of(std::vector<PairReading>& readings, std::size_t reader, std::size_t source) {
  for (auto& reading : readings) {
    if (reading.hosts == HostPair{reader, source}) return reading;
  }
  throw std::out_of_range("no such pair");
}

// Three hosts with two rails each; rail n reads from rail n.
class FleetRails : public ::testing::Test {
 protected:
  FleetRails() {
    for (auto& host : hosts_) {
      host.rails = {{"mlx5_0:1", "", 200 * kGigabit}, {"mlx5_1:1", "", 200 * kGigabit}};
    }
    for (auto& reading : readings_) {
      reading.transport = "verbs";
      reading.rails = {{"mlx5_0:1", "mlx5_0:1", 190 * kGigabit, false},
                       {"mlx5_1:1", "mlx5_1:1", 190 * kGigabit, false}};
    }
  }
  FleetVerdict judge() const { return judge_fleet(hosts_, readings_, 0.5); }

  std::vector<FleetHost> hosts_ = hosts_named({"a", "b", "c"});
  std::vector<PairReading> readings_ = all_at(3, 380);
};

TEST(AllToAll, EachRoundHasEachHostOnceAsReaderAndOnceAsSource) {
  EXPECT_THAT(all_to_all(3, 8),
              ElementsAre(ElementsAre(HostPair{0, 1}, HostPair{1, 2}, HostPair{2, 0}),
                          ElementsAre(HostPair{0, 2}, HostPair{1, 0}, HostPair{2, 1})));
}

TEST(AllToAll, RoundsAreCutToTheMostPairsAtOnce) {
  EXPECT_THAT(
      all_to_all(3, 2),
      ElementsAre(ElementsAre(HostPair{0, 1}, HostPair{1, 2}), ElementsAre(HostPair{2, 0}),
                  ElementsAre(HostPair{0, 2}, HostPair{1, 0}), ElementsAre(HostPair{2, 1})));
  EXPECT_EQ(all_to_all(3, 1).size(), 6u);
}

TEST(AllToAll, NoPairIsLeftOutOrReadTwice) {
  std::multiset<HostPair> pairs;
  for (const auto& round : all_to_all(17, 5)) {
    std::set<std::size_t> readers, sources;
    EXPECT_LE(round.size(), 5u);
    for (const auto& pair : round) {
      EXPECT_NE(pair.reader, pair.source);
      EXPECT_TRUE(readers.insert(pair.reader).second);
      EXPECT_TRUE(sources.insert(pair.source).second);
      pairs.insert(pair);
    }
  }
  EXPECT_EQ(pairs.size(), 17u * 16u);
  EXPECT_EQ(std::set<HostPair>(pairs.begin(), pairs.end()).size(), 17u * 16u);
  EXPECT_THAT(all_to_all(1, 5), IsEmpty());
}

TEST(FleetVerdicts, AnEvenFleetHasNoFindings) {
  auto readings = all_at(4, 90);
  of(readings, 2, 1) = tcp_read(2, 1, 46);
  const auto verdict = judge_fleet(hosts_named({"a", "b", "c", "d"}), readings, 0.5);
  EXPECT_DOUBLE_EQ(verdict.median, 90 * kGigabit);
  EXPECT_DOUBLE_EQ(verdict.usual, 90 * kGigabit);
  EXPECT_THAT(verdict.findings, IsEmpty());
  EXPECT_THAT(verdict.slow, IsEmpty());
  EXPECT_THAT(verdict.unread, IsEmpty());
}

TEST(FleetVerdicts, TheFractionDecidesWhatIsSlow) {
  auto readings = all_at(4, 90);
  of(readings, 2, 1) = tcp_read(2, 1, 46);
  const auto verdict = judge_fleet(hosts_named({"a", "b", "c", "d"}), readings, 0.6);
  EXPECT_THAT(verdict.slow, ElementsAre(HostPair{2, 1}));
  EXPECT_THAT(
      verdict.findings,
      ElementsAre("c reads from b at 46.0 Gb/s, others at 90.0: both are faster with others, "
                  "so look at the way between them"));
}

TEST(FleetVerdicts, AHostFromWhichAllReadSlowlyIsNamedWithItsSendingSide) {
  auto readings = all_at(3, 90);
  of(readings, 0, 2) = tcp_read(0, 2, 8);
  of(readings, 1, 2) = tcp_read(1, 2, 9);
  const auto verdict = judge_fleet(hosts_named({"a", "b", "c"}), readings, 0.5);
  EXPECT_THAT(verdict.slow, ElementsAre(HostPair{0, 2}, HostPair{1, 2}));
  EXPECT_THAT(verdict.findings, ElementsAre("every read from c is slow (8.0 to 9.0 Gb/s, others "
                                            "90.0): the sending side of c"));
}

TEST(FleetVerdicts, TheCapOfASlowSourceIsNamed) {
  auto readings = all_at(3, 90);
  for (const std::size_t reader : {0u, 1u}) {
    of(readings, reader, 2) = tcp_read(reader, 2, 1);
    of(readings, reader, 2).cap_bytes_per_second = kGigabit;
  }
  const auto verdict = judge_fleet(hosts_named({"a", "b", "c"}), readings, 0.5);
  EXPECT_THAT(
      verdict.findings,
      ElementsAre("every read from c is slow (1.0 Gb/s, others 90.0): the sending side of c; "
                  "its agent gives each reader at most 1.0 Gb/s (--max-rate)"));
}

TEST(FleetVerdicts, AHostThatReadsSlowlyFromAllIsNamedWithItsReceivingSideAndItsLink) {
  auto readings = all_at(3, 90);
  for (const std::size_t source : {0u, 1u}) {
    of(readings, 2, source) = tcp_read(2, source, 9);
    of(readings, 2, source).link_bytes_per_second = 10 * kGigabit;
  }
  const auto verdict = judge_fleet(hosts_named({"a", "b", "c"}), readings, 0.5);
  EXPECT_THAT(verdict.findings,
              ElementsAre("every read by c is slow (9.0 Gb/s, others 90.0): the receiving side of "
                          "c; its link has only 10.0 Gb/s"));
}

// The median of the six pairs is slow by then.
TEST(FleetVerdicts, OneOfThreeHostsThatIsSlowBothWaysIsNamed) {
  auto readings = all_at(3, 90);
  for (const std::size_t other : {0u, 1u}) {
    of(readings, 2, other) = tcp_read(2, other, 9);
    of(readings, other, 2) = tcp_read(other, 2, 9);
  }
  const auto verdict = judge_fleet(hosts_named({"a", "b", "c"}), readings, 0.5);
  EXPECT_DOUBLE_EQ(verdict.median, 9 * kGigabit);
  EXPECT_DOUBLE_EQ(verdict.usual, 90 * kGigabit);
  EXPECT_THAT(verdict.findings, ElementsAre("every read to and from c is slow (9.0 Gb/s, others "
                                            "90.0): c itself or its link"));
}

TEST(FleetVerdicts, WithTwoHostsNobodyIsBlamed) {
  const std::vector<PairReading> readings{tcp_read(0, 1, 90), tcp_read(1, 0, 9)};
  const auto verdict = judge_fleet(hosts_named({"a", "b"}), readings, 0.5);
  EXPECT_THAT(verdict.findings, ElementsAre("b reads from a at 9.0 Gb/s, others at 90.0: too few "
                                            "other pairs tell which side is slow"));
}

TEST(FleetVerdicts, AHostWhoseReadsAllFailedIsOneLine) {
  auto readings = all_at(4, 90);
  for (const std::size_t other : {0u, 1u, 3u}) {
    of(readings, 2, other) = failed_read(2, other, "the agent of c does not answer");
    of(readings, other, 2) = failed_read(other, 2, "source c at 10.0.0.3:7400: refused");
  }
  of(readings, 0, 1) = failed_read(0, 1, "the read broke off: no byte for 1 s");
  const auto verdict = judge_fleet(hosts_named({"a", "b", "c", "d"}), readings, 0.5);
  EXPECT_THAT(verdict.unread, ElementsAre("no pair with c was read: the agent of c does not answer",
                                          "a from b: the read broke off: no byte for 1 s"));
  EXPECT_THAT(verdict.findings, IsEmpty());
}

TEST(FleetVerdicts, WithoutAnyFigureThereIsOnlyWhy) {
  const std::vector<PairReading> readings{failed_read(0, 1, "x"), failed_read(1, 0, "y")};
  const auto hosts = hosts_named({"a", "b"});
  const auto verdict = judge_fleet(hosts, readings, 0.5);
  EXPECT_EQ(verdict.usual, 0);
  EXPECT_THAT(verdict.unread, ElementsAre("a from b: x", "b from a: y"));
  EXPECT_THAT(fleet_report(hosts, readings, verdict), Not(HasSubstr("median")));
}

TEST_F(FleetRails, AnEvenFleetHasNoFindings) {
  const auto verdict = judge();
  EXPECT_THAT(verdict.findings, IsEmpty());
  EXPECT_THAT(verdict.remarks, IsEmpty());
}

// The pairs of c lose less than half of their speed: only its rail tells.
TEST_F(FleetRails, ARailThatIsSlowToAllPeersIsNamed) {
  for (const std::size_t other : {0u, 1u}) {
    for (const auto& pair : {HostPair{other, 2}, HostPair{2, other}}) {
      auto& reading = of(readings_, pair.reader, pair.source);
      reading.rails[1].bytes_per_second = 3 * kGigabit;
      reading.bytes_per_second = 193 * kGigabit;
    }
  }
  const auto verdict = judge();
  EXPECT_THAT(verdict.slow, IsEmpty());
  EXPECT_THAT(verdict.findings,
              ElementsAre("rail mlx5_1:1 of c moves 3.0 Gb/s where its other rails move 190"));
}

TEST_F(FleetRails, ARailThatIsSlowInOneDirectionIsNamedWithTheDirection) {
  for (const std::size_t other : {0u, 1u}) {
    of(readings_, other, 2).rails[1].bytes_per_second =
        (3.0 + static_cast<double>(other)) * kGigabit;
  }
  EXPECT_THAT(
      judge().findings,
      ElementsAre("rail mlx5_1:1 of c sends 3.0 to 4.0 Gb/s where its other rails move 190"));
}

TEST_F(FleetRails, ARailThatBreaksIsSlow) {
  for (const std::size_t other : {0u, 1u}) of(readings_, 2, other).rails[0].broken = true;
  EXPECT_THAT(judge().findings,
              ElementsAre(HasSubstr("rail mlx5_0:1 of c receives 0.000 Gb/s where its other")));
}

TEST_F(FleetRails, ARailThatIsSlowToOnePeerIsNamedWithBothEnds) {
  of(readings_, 0, 1).rails[0].bytes_per_second = 20 * kGigabit;
  EXPECT_THAT(judge().findings,
              ElementsAre("rail mlx5_0:1 of a reads from rail mlx5_0:1 of b at 20.0 Gb/s, where "
                          "rails move 190: the cable or switch between them, or one of the two"));
}

TEST_F(FleetRails, ARailThatIsDownIsNamedWithWhy) {
  hosts_[1].rails[1].why_down = "port down";
  for (const std::size_t other : {0u, 2u}) of(readings_, 1, other).rails.pop_back();
  EXPECT_THAT(judge().findings, ElementsAre("rail mlx5_1:1 of b is down: port down"));
}

TEST_F(FleetRails, ARailThatIsUpAndReachesNobodyIsNamed) {
  for (const std::size_t other : {0u, 2u}) of(readings_, 1, other).rails.pop_back();
  EXPECT_THAT(judge().findings, ElementsAre("rail mlx5_1:1 of b is up, and reaches no other host"));
}

TEST_F(FleetRails, ARailThatDoesNotReachOnePeerIsNamedWithThePeer) {
  of(readings_, 1, 2).rails.pop_back();
  EXPECT_THAT(judge().findings, ElementsAre("rail mlx5_1:1 of b is up, and does not reach c"));
}

TEST_F(FleetRails, ARailThatPullsDoNotUseIsNoFault) {
  for (auto& host : hosts_) host.rails.push_back({"bnxt_0:1", "", 25 * kGigabit});
  const auto verdict = judge();
  EXPECT_THAT(verdict.findings, IsEmpty());
  EXPECT_THAT(verdict.remarks, ElementsAre(HasSubstr("rail bnxt_0:1 of a is not used"),
                                           HasSubstr("bnxt_0:1 of b"), HasSubstr("bnxt_0:1 of c")));
}

TEST_F(FleetRails, ACapLeavesTheRatesOfRailsOutOfIt) {
  for (auto& reading : readings_) {
    reading.cap_bytes_per_second = 100 * kGigabit;
    reading.rails[1].bytes_per_second = kGigabit;
  }
  EXPECT_THAT(judge().findings, IsEmpty());
}

TEST_F(FleetRails, ATransportThatIsLostIsAFinding) {
  auto& reading = of(readings_, 0, 1);
  reading.transport = "tcp";
  reading.rails.clear();
  reading.notes = {"verbs to b does not work, trying the next transport: no route"};
  EXPECT_THAT(judge().findings, ElementsAre("a reads from b over tcp: verbs to b does not work, "
                                            "trying the next transport: no route"));
}

TEST(FleetReports, TheMatrixHasReadersInRowsAndMarksWhatIsSlow) {
  auto readings = all_at(3, 90);
  of(readings, 0, 2) = tcp_read(0, 2, 0.5);
  of(readings, 1, 2) = failed_read(1, 2, "refused");
  of(readings, 1, 0).link_bytes_per_second = 100 * kGigabit;
  const auto hosts = hosts_named({"a", "b", "c"});
  const auto report = fleet_report(hosts, readings, judge_fleet(hosts, readings, 0.5));
  EXPECT_THAT(report, HasSubstr("READER     a     b       c     LINK\n"
                                "a          -  90.0  0.500*  unknown\n"
                                "b       90.0     -  failed      100\n"
                                "c       90.0  90.0       -  unknown\n"
                                "median 90.0 Gb/s, usual speed of a host 90.0 Gb/s\n"));
  EXPECT_THAT(report, AllOf(HasSubstr("slow or broken: a reads from c at 0.500 Gb/s"),
                            HasSubstr("not read: b from c: refused")));
}

TEST(FleetReports, OfManyHostsQuantilesAndTheSlowestTenPairsAreShown) {
  std::vector<std::string> names;
  for (int i = 0; i < 17; ++i) names.push_back("host-" + std::to_string(i));
  auto readings = all_at(17, 90);
  of(readings, 4, 7) = tcp_read(4, 7, 46);
  const auto hosts = hosts_named(names);
  const auto report = fleet_report(hosts, readings, judge_fleet(hosts, readings, 0.5));
  EXPECT_THAT(report, AllOf(HasSubstr("slowest  46.0\n"), HasSubstr("50 %     90.0\n"),
                            HasSubstr("READER  SOURCE  Gb/s\nhost-4  host-7  46.0\n"),
                            HasSubstr("every pair was read, and none is slow")));
  std::size_t lines = 0;
  for (const char letter : report) lines += letter == '\n' ? 1 : 0;
  EXPECT_EQ(lines, 7u + 1 + 11 + 2) << report;
}

}  // namespace
}  // namespace rekindle::cli
