// Rows 28 and 29: several coordinators on one etcd, and an etcd that goes away. Real processes.
#include <array>
#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/state.pb.h"
#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/etcd/election.h"
#include "recovery/coordinator/etcd/etcd_state.h"
#include "recovery/coordinator/etcd/gateway.h"
#include "recovery/coordinator/state_records.h"
#include "tests/support/fleet.h"
#include "tests/support/numbered_digest.h"

namespace rekindle::testing {
namespace {

using ::testing::HasSubstr;

const std::string kRekindle = REKINDLE_BINARY;

class Etcd : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists("/usr/bin/etcd")) GTEST_SKIP() << "no etcd here";
    start_etcd();
    make_checkpoint(dir("model"), 4, 1024, 5);
    make_checkpoint(dir("model2"), 4, 1024, 6);
  }

  std::filesystem::path dir(std::string_view name) const { return tmp_ / name; }

  void start_etcd() {
    const std::string client = "http://127.0.0.1:" + std::to_string(etcd_port_);
    const std::string peer = "http://127.0.0.1:" + std::to_string(peer_port_);
    etcd_ = std::make_unique<Process>(
        Spawn{.argv = {"/usr/bin/etcd", "--data-dir", dir("etcd").string(), "--listen-client-urls",
                       client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
                       "--initial-advertise-peer-urls", peer, "--initial-cluster",
                       "default=" + peer, "--log-level", "warn"}});
  }

  // One of two that may lead.
  std::unique_ptr<Process> coordinator(int number) {
    return std::make_unique<Process>(
        Spawn{.argv = {kRekindle, "coordinator", "--listen", address(number), "--etcd",
                       "http://127.0.0.1:" + std::to_string(etcd_port_), "--etcd-ttl", "2s"}});
  }
  std::string address(int number) const {
    return "127.0.0.1:" + std::to_string(number == 1 ? first_port_ : second_port_);
  }
  std::string both() const { return address(1) + "," + address(2); }

  void start_agent(const std::string& name) {
    agents_[name] = std::make_unique<Process>(
        Spawn{.argv = {kRekindle, "agent", "--node-id", name, "--listen", "127.0.0.1:0", "--store",
                       dir("store-" + name).string(), "--coordinator", both()}});
    ASSERT_TRUE(agents_[name]->wait_for_err("coordinator.connected"))
        << agents_[name]->out() << agents_[name]->err();
  }
  Finished publish(const std::string& version, const std::string& from = "model") {
    return run({kRekindle, "publish", version, dir(from).string(), "--store",
                dir("store-a").string(), "--coordinator", both(), "--quiet"});
  }
  Finished pull(const std::string& to) {
    return run(
        {kRekindle, "pull", "m@1", "--to", dir(to).string(), "--coordinator", both(), "--quiet"},
        milliseconds(60'000));
  }
  nlohmann::json status() {
    return nlohmann::json::parse(run({kRekindle, "status", "--json", "--coordinator", both()}).out,
                                 nullptr, false);
  }
  std::uint64_t epoch() {
    const auto now = status();
    return now.is_object() ? now.value("epoch", std::uint64_t{0}) : 0;
  }
  // With all that the fleet knew before.
  bool eventually_leads_with_an_epoch_above(std::uint64_t before) {
    return eventually([&] {
      const auto now = status();
      return now.is_object() && now.value("epoch", std::uint64_t{0}) > before &&
             now.dump().find("\"ready\"") != std::string::npos;
    });
  }

  TempDir tmp_{true};
  const std::uint16_t etcd_port_ = free_port();
  const std::uint16_t peer_port_ = free_port();
  const std::uint16_t first_port_ = free_port();
  const std::uint16_t second_port_ = free_port();
  std::unique_ptr<Process> etcd_;
  std::map<std::string, std::unique_ptr<Process>> agents_;
};

TEST_F(Etcd, Row28TheOtherCoordinatorLeadsWhenTheLeaderIsKilledAndKnowsItsVersions) {
  auto first = coordinator(1);
  ASSERT_TRUE(first->wait_for_out("coordinator listening on")) << first->err();
  const auto second = coordinator(2);
  ASSERT_TRUE(second->wait_for_err("coordinator.standing_by")) << second->err();
  start_agent("a");
  const auto published = publish("m@1");
  ASSERT_EQ(published.exit.code, 0) << published.err;
  const std::uint64_t before = epoch();
  EXPECT_GT(before, 0u);

  first->kill();
  ASSERT_TRUE(second->wait_for_out("coordinator listening on")) << second->err();
  EXPECT_TRUE(eventually_leads_with_an_epoch_above(before)) << status();
  const auto pulled = pull("out");
  EXPECT_EQ(pulled.exit.code, 0) << pulled.err;
  EXPECT_EQ(compare_checkpoints(dir("model"), dir("out")), "");
  // What the first one wrote holds for the second: a version has one root for ever.
  const auto other = publish("m@1", "model2");
  EXPECT_EQ(other.exit.code, 7) << other.err;
}

TEST_F(Etcd, Row28AToldLeaderLetsTheOtherLeadAtOnce) {
  auto first = coordinator(1);
  ASSERT_TRUE(first->wait_for_out("coordinator listening on")) << first->err();
  const auto second = coordinator(2);
  ASSERT_TRUE(second->wait_for_err("coordinator.standing_by"));
  first->signal(SIGTERM);
  const auto exit = first->wait();
  ASSERT_TRUE(exit);
  EXPECT_EQ(exit->code, 0) << first->err();
  EXPECT_TRUE(second->wait_for_out("coordinator listening on")) << second->err();
}

TEST_F(Etcd, Row28ACoordinatorThatCannotListenLetsTheOtherLead) {
  Process holder(Spawn{.argv = {kRekindle, "coordinator", "--listen", address(1), "--state",
                                dir("other").string()}});
  ASSERT_TRUE(holder.wait_for_out("coordinator listening on")) << holder.err();
  const auto first = coordinator(1);
  ASSERT_TRUE(first->wait_for_err("coordinator.term_failed")) << first->err();
  const auto second = coordinator(2);
  EXPECT_TRUE(second->wait_for_out("coordinator listening on")) << second->err();
  EXPECT_TRUE(first->wait_for_err("coordinator.standing_by")) << first->err();
}

TEST_F(Etcd, Row28APausedLeaderFindsThatItHasBeenReplacedAndStandsBy) {
  const auto first = coordinator(1);
  ASSERT_TRUE(first->wait_for_out("coordinator listening on")) << first->err();
  auto second = coordinator(2);
  ASSERT_TRUE(second->wait_for_err("coordinator.standing_by"));
  start_agent("a");
  ASSERT_EQ(publish("m@1").exit.code, 0);
  const std::uint64_t before = epoch();

  first->signal(SIGSTOP);
  ASSERT_TRUE(second->wait_for_out("coordinator listening on")) << second->err();
  first->signal(SIGCONT);
  EXPECT_TRUE(first->wait_for_err("coordinator.standing_by")) << first->err();
  EXPECT_TRUE(eventually_leads_with_an_epoch_above(before)) << status();
  EXPECT_EQ(publish("m@2", "model2").exit.code, 0);

  // And back: nobody is lost for having been replaced once.
  const std::uint64_t then = epoch();
  second->kill();
  EXPECT_TRUE(eventually_leads_with_an_epoch_above(then)) << status();
}

TEST_F(Etcd, Row29C1WhileItIsAwayForLongerThanTheLeaseNobodyAnswersForTheCatalog) {
  const auto leader = coordinator(1);
  ASSERT_TRUE(leader->wait_for_out("coordinator listening on")) << leader->err();
  start_agent("a");
  ASSERT_EQ(publish("m@1").exit.code, 0);
  const std::uint64_t before = epoch();

  etcd_->signal(SIGSTOP);
  EXPECT_TRUE(leader->wait_for_err("coordinator.stopping")) << leader->err();
  EXPECT_THAT(leader->err(), HasSubstr("cannot know that it still leads"));
  EXPECT_EQ(epoch(), 0u) << "it answers nobody";
  constexpr int kUnreachable = 5;  // what scripts retry on
  const auto missed = pull("out");
  EXPECT_EQ(missed.exit.code, kUnreachable) << missed.err;
  EXPECT_THAT(missed.err, HasSubstr("coordinator"));
  const auto refused = publish("m@2", "model2");
  EXPECT_EQ(refused.exit.code, kUnreachable) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("coordinator"));

  etcd_->signal(SIGCONT);
  EXPECT_TRUE(eventually_leads_with_an_epoch_above(before)) << status();
  EXPECT_TRUE(eventually([&] { return publish("m@2", "model2").exit.code == 0; }));
  const auto pulled = pull("out");
  EXPECT_EQ(pulled.exit.code, 0) << pulled.err;
  EXPECT_EQ(compare_checkpoints(dir("model"), dir("out")), "");
}

// What was kept before a release that changed the format is neither misread nor overwritten.
TEST_F(Etcd, AStateOfAnEarlierFormatIsRefusedByNameUntilItsKeyIsDeleted) {
  namespace etcd = coordinator::etcd;
  const auto endpoints = etcd::parse_endpoints("http://127.0.0.1:" + std::to_string(etcd_port_));
  ASSERT_TRUE(endpoints);
  etcd::Gateway gateway(*endpoints);
  const nlohmann::json key = {{"key", etcd::to_base64("/rekindle/state")}};
  nlohmann::json former = key;
  former["value"] = etcd::to_base64("{\"epoch\": 3}");
  ASSERT_TRUE(eventually(
      [&] { return gateway.call("/v3/kv/put", former, milliseconds(1000)).has_value(); }));

  const auto refused = coordinator(1);
  const auto exit = refused->wait();
  ASSERT_TRUE(exit) << refused->out() << refused->err();
  EXPECT_NE(exit->code, 0);
  EXPECT_THAT(refused->err(),
              HasSubstr("/rekindle/state in etcd is of an earlier format, which is not read any "
                        "more; delete the key to begin anew (agents report what they hold)"));
  EXPECT_EQ(refused->out(), "") << "it has led";
  const auto kept = gateway.call("/v3/kv/range", key, milliseconds(1000));
  ASSERT_TRUE(kept) << kept.error().message();
  EXPECT_EQ(kept->value("/kvs/0/value"_json_pointer, ""), former["value"].get<std::string>());

  ASSERT_TRUE(gateway.call("/v3/kv/deleterange", key, milliseconds(1000)));
  const auto anew = coordinator(1);
  EXPECT_TRUE(anew->wait_for_out("coordinator listening on")) << anew->err();
}

// A fleet of two releases: the older coordinator wins the election after the newer one has raised
// the least writer number.
TEST_F(Etcd, C3AStateThatNeedsANewerReleaseIsNotTakenOverAndTheRightToLeadIsGivenBack) {
  namespace etcd = coordinator::etcd;
  const auto endpoints = etcd::parse_endpoints("http://127.0.0.1:" + std::to_string(etcd_port_));
  ASSERT_TRUE(endpoints);
  etcd::Gateway gateway(*endpoints);
  proto::StateMeta newer;
  newer.set_epoch(5);
  newer.set_min_writer(coordinator::kStateWriter + 1);
  newer.set_written_by("rekindle 9.8.7");
  const nlohmann::json meta = {{"key", etcd::to_base64("/rekindle/meta")}};
  nlohmann::json put = meta;
  put["value"] = etcd::to_base64(newer.SerializeAsString());
  ASSERT_TRUE(
      eventually([&] { return gateway.call("/v3/kv/put", put, milliseconds(1000)).has_value(); }));

  const auto older = coordinator(1);
  const auto exit = older->wait();
  ASSERT_TRUE(exit) << older->out() << older->err();
  EXPECT_NE(exit->code, 0);
  EXPECT_EQ(older->out(), "") << "it has led";
  EXPECT_THAT(older->err(),
              HasSubstr("/rekindle/ in etcd: the state was written by rekindle 9.8.7"));
  const auto kept = gateway.call("/v3/kv/range", meta, milliseconds(1000));
  ASSERT_TRUE(kept) << kept.error().message();
  EXPECT_EQ(kept->value("/kvs/0/value"_json_pointer, ""), put["value"].get<std::string>());
  const auto leader = gateway.call("/v3/kv/range", {{"key", etcd::to_base64("/rekindle/leader")}},
                                   milliseconds(1000));
  ASSERT_TRUE(leader) << leader.error().message();
  EXPECT_FALSE(leader->contains("kvs")) << *leader;
}

TEST_F(Etcd, Row29ItComesBackFromItsDiskWithAllThatWasWritten) {
  auto leader = coordinator(1);
  ASSERT_TRUE(leader->wait_for_out("coordinator listening on")) << leader->err();
  start_agent("a");
  ASSERT_EQ(publish("m@1").exit.code, 0);
  const std::uint64_t before = epoch();
  etcd_->kill();
  ASSERT_TRUE(leader->wait_for_err("coordinator.etcd_away")) << leader->err();
  start_etcd();
  EXPECT_TRUE(eventually([&] { return publish("m@2", "model2").exit.code == 0; }));
  leader->kill();
  leader = coordinator(1);
  EXPECT_TRUE(eventually_leads_with_an_epoch_above(before)) << status();
  EXPECT_EQ(publish("m@1", "model2").exit.code, 7) << "another root under a version that is taken";
}

TEST_F(Etcd, Row29ACoordinatorThatStartsWithoutItWaitsForIt) {
  {
    const auto before = coordinator(1);  // etcd is up
    ASSERT_TRUE(before->wait_for_out("coordinator listening on")) << before->err();
  }
  etcd_->kill();
  const auto leader = coordinator(1);
  EXPECT_TRUE(leader->wait_for_err("coordinator.standing_by"));
  EXPECT_THAT(leader->err(), HasSubstr("etcd does not answer"));
  start_etcd();
  EXPECT_TRUE(leader->wait_for_out("coordinator listening on")) << leader->err();
}

class EtcdMembers : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists("/usr/bin/etcd")) GTEST_SKIP() << "no etcd here";
    std::string cluster;
    for (const Member& member : members_) {
      cluster += (cluster.empty() ? "" : ",") + member.name + "=" + member.peer;
      urls_ += (urls_.empty() ? "" : ",") + member.client;
    }
    for (Member& member : members_) {
      member.process = std::make_unique<Process>(Spawn{
          .argv = {"/usr/bin/etcd", "--name", member.name, "--data-dir", tmp_ / member.name,
                   "--listen-client-urls", member.client, "--advertise-client-urls", member.client,
                   "--listen-peer-urls", member.peer, "--initial-advertise-peer-urls", member.peer,
                   "--initial-cluster", cluster, "--log-level", "error"}});
    }
  }

  struct Member {
    std::string name;
    std::string client = "http://127.0.0.1:" + std::to_string(free_port());
    std::string peer = "http://127.0.0.1:" + std::to_string(free_port());
    std::unique_ptr<Process> process;
  };
  TempDir tmp_{true};
  std::array<Member, 3> members_{Member{"e0"}, Member{"e1"}, Member{"e2"}};
  std::string urls_;
};

// As CoordinatorState.C2… with a directory; one member dies in the middle.
TEST_F(EtcdMembers, C2TwentyThousandVersionsPublishedAndRetiredLeaveASmallState) {
  namespace co = coordinator;
  const auto endpoints = co::etcd::parse_endpoints(urls_);
  ASSERT_TRUE(endpoints);
  co::etcd::EtcdOptions options;
  options.ttl = std::chrono::seconds(60);  // nobody else stands, and the machine may be slow
  co::etcd::Election election(options, *endpoints, "test");
  std::optional<co::etcd::Term> term;
  ASSERT_TRUE(eventually([&] {
    if (auto won = election.campaign(milliseconds(1000))) term = *won;
    return term.has_value();
  }));
  co::etcd::EtcdState store(options, *endpoints, *term);
  // An election among the members takes a moment, and a loaded machine makes etcd answer late.
  Result<co::Records> loaded = fail(ErrorCode::kUnavailable, "not read");
  const auto load = [&] {
    return eventually([&] {
      loaded = store.load();
      return loaded || loaded.error().code() != ErrorCode::kUnavailable;
    });
  };
  EXPECT_TRUE(load());
  ASSERT_TRUE(loaded) << loaded.error().message();
  auto records = co::StateRecords::parse(*loaded);
  ASSERT_TRUE(records);
  constexpr std::uint64_t kVersions = 20'000;
  const TimePoint now{std::chrono::hours(1)};
  co::Core core({}, {}, records->state(), [] { return PullId::random(); });
  // As many at once as a busy coordinator gathers while one batch is being written.
  const auto write_all = [&] {
    while (const auto batch = core.take_batch()) {
      (void)election.keep(*term, milliseconds(1000));
      const auto writes = records->encode(batch->change);
      Result<void> written;
      EXPECT_TRUE(eventually([&] {
        written = store.write(writes);
        return written || written.error().code() != ErrorCode::kUnavailable;
      }));
      ASSERT_TRUE(written) << written.error().message();
      records->note(writes);
      (void)core.committed(batch->number, true, now);
    }
  };
  (void)core.start(now);
  write_all();
  for (std::uint64_t first = 1; first <= kVersions && !HasFailure(); first += 100) {
    if (first > kVersions / 2 && members_[0].process->running()) members_[0].process->kill();
    for (std::uint64_t version = first; version < first + 100; ++version) {
      ASSERT_TRUE(core.publish("", {},
                               {{"m", version}, test::numbered_digest(version, 1), {1, 1}, 100},
                               now)
                      .answer);
    }
    write_all();
    for (std::uint64_t version = first; version < first + 100; ++version) {
      ASSERT_TRUE(core.retire({"m", version}, now).answer);
    }
    write_all();
  }
  EXPECT_LT(core.fleet().catalog.all().size(), 500u);
  EXPECT_TRUE(load());
  ASSERT_TRUE(loaded) << loaded.error().message();
  EXPECT_LT(loaded->size(), 1'000u) << "keys";
  const auto again = co::StateRecords::parse(*loaded);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->state(), core.fleet().table.state());
  const co::Core next({}, {}, again->state(), [] { return PullId::random(); });
  for (const std::uint64_t version : {1u, 7u, 10'000u, 19'990u, 20'000u}) {
    EXPECT_TRUE(next.fleet().catalog.is_retired({"m", version})) << version;
  }
  EXPECT_FALSE(next.fleet().catalog.is_retired({"m", kVersions + 1}));
}

}  // namespace
}  // namespace rekindle::testing
