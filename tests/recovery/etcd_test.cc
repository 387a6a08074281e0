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
#include "tests/support/dumped_memory.h"
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

// An etcd that speaks TLS and asks for certificates, all of one authority.
class EtcdOverTls : public Etcd {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists("/usr/bin/etcd")) GTEST_SKIP() << "no etcd here";
    certs({"init", ca()});
    certs({"issue", ca(), "coordinator", "etcd", "--ip", "127.0.0.1"});
    certs({"issue", ca(), "coordinator", "c"});
    certs({"issue", ca(), "coordinator", "elsewhere", "--dns", "etcd.example.org"});
    certs({"init", dir("other").string()});
    certs({"issue", dir("other").string(), "coordinator", "c"});
    write_secret("password", kPassword);
    write_secret("wrong-password", "not the password of etcd");
    write_secret("state-key", kStateKey);
  }
  static constexpr const char* kPassword = "a password for etcd's user";
  static constexpr const char* kStateKey = "the key of the state in etcd";

  void certs(std::vector<std::string> words) {
    words.insert(words.begin(), {kRekindle, "certs"});
    const auto done = run(std::move(words));
    ASSERT_EQ(done.exit.code, 0) << done.err;
  }
  std::string ca(const char* file = "") const { return (dir("ca") / file).string(); }
  void write_secret(const std::string& name, const std::string& text) const {
    write_file(dir(name), text);
    std::filesystem::permissions(dir(name), std::filesystem::perms(0600));
  }
  std::string url() const { return "https://127.0.0.1:" + std::to_string(etcd_port_); }
  void start_tls(const char* certificate = "coordinator-etcd.pem") {
    const std::string peer = "http://127.0.0.1:" + std::to_string(peer_port_);
    etcd_ = std::make_unique<Process>(Spawn{.argv = {"/usr/bin/etcd",
                                                     "--data-dir",
                                                     dir("etcd").string(),
                                                     "--listen-client-urls",
                                                     url(),
                                                     "--advertise-client-urls",
                                                     url(),
                                                     "--cert-file",
                                                     ca(certificate),
                                                     "--key-file",
                                                     ca(certificate),
                                                     "--client-cert-auth",
                                                     "--trusted-ca-file",
                                                     ca("ca.crt"),
                                                     "--listen-peer-urls",
                                                     peer,
                                                     "--initial-advertise-peer-urls",
                                                     peer,
                                                     "--initial-cluster",
                                                     "default=" + peer,
                                                     "--log-level",
                                                     "error"}});
  }
  std::unique_ptr<Process> leader(std::vector<std::string> more) {
    std::vector<std::string> words = {kRekindle, "coordinator", "--listen",   address(1),
                                      "--etcd",  url(),         "--etcd-ttl", "2s"};
    words.insert(words.end(), more.begin(), more.end());
    return std::make_unique<Process>(Spawn{.argv = std::move(words)});
  }
  std::vector<std::string> own_certificate() const {
    return {"--etcd-ca",  ca("ca.crt"),           "--etcd-cert", ca("coordinator-c.pem"),
            "--etcd-key", ca("coordinator-c.pem")};
  }
  std::vector<std::string> with_password(const char* file) const {
    auto words = own_certificate();
    const std::vector<std::string> more = {"--etcd-user", "rekindle", "--etcd-password-file",
                                           dir(file).string()};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  coordinator::etcd::Access access() const {
    auto access = coordinator::etcd::parse_endpoints(url());
    EXPECT_TRUE(access);
    access->tls = {ca("ca.crt"), ca("coordinator-c.pem"), ca("coordinator-c.pem")};
    return *access;
  }
  // A user who may use the keys of Rekindle, and nothing else.
  void demand_a_user() {
    namespace etcd = coordinator::etcd;
    etcd::Gateway gateway(access());
    ASSERT_TRUE(eventually([&] {
      return gateway.call("/v3/kv/range", {{"key", "YQ=="}}, milliseconds(1000)).has_value();
    }));
    const nlohmann::json own = {{"permType", "READWRITE"},
                                {"key", etcd::to_base64("/rekindle/")},
                                {"range_end", etcd::to_base64("/rekindle0")}};
    const std::pair<const char*, nlohmann::json> calls[] = {
        {"/v3/auth/user/add", {{"name", "root"}, {"password", "root's long password"}}},
        {"/v3/auth/role/add", {{"name", "root"}}},
        {"/v3/auth/user/grant", {{"user", "root"}, {"role", "root"}}},
        {"/v3/auth/user/add", {{"name", "rekindle"}, {"password", kPassword}}},
        {"/v3/auth/role/add", {{"name", "fleet"}}},
        {"/v3/auth/role/grant", {{"name", "fleet"}, {"perm", own}}},
        {"/v3/auth/user/grant", {{"user", "rekindle"}, {"role", "fleet"}}},
        {"/v3/auth/enable", nlohmann::json::object()}};
    for (const auto& [path, body] : calls) {
      const auto done = gateway.call(path, body, milliseconds(5000));
      ASSERT_TRUE(done) << path << done.error().message();
    }
  }
};

TEST_F(EtcdOverTls, ACoordinatorWithACertificateOfItsAuthorityLeads) {
  start_tls();
  const auto first = leader(own_certificate());
  EXPECT_TRUE(first->wait_for_out("coordinator listening on")) << first->err();
}

TEST_F(EtcdOverTls, S14AnEtcdOfAnotherAuthorityIsNotBelieved) {
  start_tls();
  const auto first = leader({"--etcd-ca", (dir("other") / "ca.crt").string()});
  EXPECT_TRUE(first->wait_for_err("TLS: the server's certificate:")) << first->err();
  EXPECT_EQ(first->out(), "");
}

TEST_F(EtcdOverTls, AnEtcdWithTheCertificateOfAnotherHostIsNotBelieved) {
  start_tls("coordinator-elsewhere.pem");
  const auto first = leader(own_certificate());
  EXPECT_TRUE(first->wait_for_err("TLS: the server's certificate: IP address mismatch"))
      << first->err();
  EXPECT_EQ(first->out(), "");
}

TEST_F(EtcdOverTls, WithoutACertificateNobodyIsLetIn) {
  start_tls();
  const auto first = leader({"--etcd-ca", ca("ca.crt")});
  EXPECT_TRUE(first->wait_for_err("certificate")) << first->err();
  EXPECT_EQ(first->out(), "");
}

TEST_F(EtcdOverTls, ALeaderStaysWhenItsTokenEndsAndAWrongPasswordDoesNotLead) {
  start_tls();
  demand_a_user();
  {
    const auto nobody = leader(own_certificate());
    EXPECT_TRUE(nobody->wait_for_err("see --etcd-user and --etcd-password-file")) << nobody->err();
    const auto wrong = leader(with_password("wrong-password"));
    EXPECT_TRUE(wrong->wait_for_err("etcd refuses the user rekindle")) << wrong->err();
    EXPECT_EQ(nobody->out() + wrong->out(), "");
  }
  const auto first = leader(with_password("password"));
  ASSERT_TRUE(first->wait_for_out("coordinator listening on")) << first->err();
  make_checkpoint(dir("model"), 4, 1024, 5);
  start_agent("a");
  ASSERT_EQ(publish("m@1").exit.code, 0);
  // Tokens end with the life of etcd that gave them.
  etcd_->kill();
  start_tls();
  EXPECT_TRUE(eventually([&] { return publish("m@2").exit.code == 0; })) << first->err();
  EXPECT_THAT(first->err(), ::testing::Not(HasSubstr(kPassword)));
}

TEST_F(EtcdOverTls, ACoreDumpHasNeitherThePasswordNorAKey) {
  start_tls();
  demand_a_user();
  auto words = with_password("password");
  words.insert(words.end(), {"--etcd-state-key", dir("state-key").string()});
  const auto first = leader(words);
  ASSERT_TRUE(first->wait_for_out("coordinator listening on")) << first->err();
  const DumpedMemory dumped(first->pid());
  EXPECT_TRUE(dumped.has(dir("password").string())) << "the name of the file is no secret";
  auto hidden = forms_of_key("the key of the certificate", ca("coordinator-c.pem"));
  hidden.push_back({"the password", kPassword});
  hidden.push_back({"the key of the state", kStateKey});
  for (const auto& [what, bytes] : hidden) EXPECT_FALSE(dumped.has(bytes)) << what;
}

TEST_F(EtcdOverTls, S14WhoeverCanWriteToEtcdCannotInventAVersion) {
  namespace etcd = coordinator::etcd;
  start_tls();
  auto words = own_certificate();
  words.insert(words.end(), {"--etcd-state-key", dir("state-key").string()});
  auto first = leader(words);
  ASSERT_TRUE(first->wait_for_out("coordinator listening on")) << first->err();
  make_checkpoint(dir("model"), 4, 1024, 5);
  start_agent("a");
  ASSERT_EQ(publish("m@1").exit.code, 0);
  first->signal(SIGTERM);
  ASSERT_TRUE(first->wait());
  first = leader(words);
  ASSERT_TRUE(first->wait_for_out("coordinator listening on")) << first->err();
  ASSERT_EQ(publish("m@1").exit.code, 0) << "it is known";
  first->signal(SIGTERM);
  ASSERT_TRUE(first->wait());

  etcd::Gateway gateway(access());
  const nlohmann::json all = {{"key", etcd::to_base64("/rekindle/versions/")},
                              {"range_end", etcd::to_base64("/rekindle/versions0")}};
  const auto found = gateway.call("/v3/kv/range", all, milliseconds(5000));
  ASSERT_TRUE(found) << found.error().message();
  const nlohmann::json record = found->value("/kvs/0"_json_pointer, nlohmann::json::object());
  ASSERT_TRUE(record.contains("value")) << *found;
  const std::string known = *etcd::from_base64(record["key"].get<std::string>());
  ASSERT_TRUE(gateway.call("/v3/kv/put",
                           {{"key", etcd::to_base64(known.substr(0, known.size() - 1) + "9")},
                            {"value", record["value"]}},
                           milliseconds(5000)));
  const auto refused = leader(words);
  const auto exit = refused->wait();
  ASSERT_TRUE(exit) << refused->err();
  EXPECT_NE(exit->code, 0);
  EXPECT_EQ(refused->out(), "");
  EXPECT_THAT(refused->err(), HasSubstr("in etcd was not written with this --etcd-state-key"));
}

TEST_F(EtcdOverTls, OptionsThatDoNotFitAreRefusedBeforeAnythingRuns) {
  struct Case {
    std::vector<std::string> words;
    int code;
    const char* says;
  };
  const std::string own = ca("coordinator-c.pem");
  const std::string open_to_all = ca("ca.crt");
  const Case cases[] = {
      {{"--etcd", "http://127.0.0.1:1", "--etcd-ca", open_to_all}, 2, "need addresses with https"},
      {{"--etcd-cert", own}, 2, "--etcd-cert and --etcd-key belong together"},
      {{"--etcd-ca", dir("nothing").string()}, 2, "nothing"},
      {{"--etcd-ca", dir("state-key").string()}, 2, "state-key"},
      {{"--etcd-cert", own, "--etcd-key", ca("coordinator-etcd.pem")}, 2, "key in"},
      {{"--etcd-user", "u"}, 2, "--etcd-user and --etcd-password-file belong together"},
      {{"--etcd-user", "u", "--etcd-password-file", open_to_all}, 7, "--etcd-password-file"},
      {{"--etcd-state-key", open_to_all}, 7, "--etcd-state-key"},
      {{"--etcd-adopt-unsigned"}, 2, "--etcd-adopt-unsigned needs --etcd-state-key"}};
  for (const auto& [words, code, says] : cases) {
    std::vector<std::string> line = {kRekindle, "coordinator", "--listen", address(1)};
    if (words.front() != "--etcd") line.insert(line.end(), {"--etcd", url()});
    line.insert(line.end(), words.begin(), words.end());
    const auto done = run(std::move(line));
    EXPECT_EQ(done.exit.code, code) << says << done.err;
    EXPECT_THAT(done.err, HasSubstr(says));
    EXPECT_EQ(done.out, "") << says;
  }
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
