// Who owns what an agent uses: the directories above its store, and its name in the fleet.
#include <filesystem>
#include <fstream>

#include <sys/stat.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/recovery/rpc_certificates.h"
#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;
using rpc::testing::TestAuthority;
using rpc::testing::TestDirectory;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr uid_t kAlice = 12345, kBob = 12346;
constexpr const char* kUp = "agent listening on ";

class Owners : public ::testing::Test {
 protected:
  Owners() { EXPECT_EQ(::chmod(fleet_.dir("").c_str(), 0711), 0); }

  fs::path directory(const std::string& name, uid_t owner, mode_t mode) {
    const fs::path path = fleet_.dir(name);
    fs::create_directory(path);
    EXPECT_EQ(::chown(path.c_str(), owner, owner), 0);
    EXPECT_EQ(::chmod(path.c_str(), mode), 0);
    return path;
  }
  // An agent of that user. `more` ends its command line.
  static std::unique_ptr<Process> agent_of(uid_t user, const fs::path& store,
                                           const std::vector<std::string>& more = {}) {
    const std::string id = std::to_string(user);
    std::vector<std::string> words;
    if (user != 0) words = {"setpriv", "--reuid", id, "--regid", id, "--clear-groups"};
    words.insert(words.end(), {REKINDLE_BINARY, "agent", "--listen", "127.0.0.1:0", "--gpu", "none",
                               "--store", store.string()});
    words.insert(words.end(), more.begin(), more.end());
    return std::make_unique<Process>(Spawn{.argv = words});
  }
  static void expect_up(uid_t user, const fs::path& store) {
    const auto agent = agent_of(user, store);
    EXPECT_NE(agent->value_after(kUp), "") << store << agent->err();
  }
  static std::string refusal_of(uid_t user, const fs::path& store) {
    const auto agent = agent_of(user, store);
    const auto end = agent->wait();
    if (!end) return "it runs";
    EXPECT_EQ(end->code, 7) << agent->err();
    return agent->err();
  }

  Fleet fleet_;
};

TEST_F(Owners, S18AStoreBelowADirectoryOfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives a directory to another user";
  const fs::path home = directory("home", kAlice, 0755);
  const fs::path sticky = directory("sticky", 0, 01777);
  EXPECT_THAT(
      refusal_of(0, home / "deep" / "store"),
      AllOf(HasSubstr(home.string() + " above it belongs to user 12345"), HasSubstr("--store")));
  expect_up(kAlice, home / "store");
  expect_up(kAlice, sticky / "alice");
  expect_up(kBob, sticky / "bob");
  ASSERT_EQ(::chmod((sticky / "alice").c_str(), 0777), 0);
  EXPECT_THAT(refusal_of(kBob, sticky / "alice"), HasSubstr("belongs to user 12345"));
  EXPECT_THAT(refusal_of(kBob, sticky / "alice" / "store"), HasSubstr("belongs to user 12345"));
}

// Outside user namespaces the last user is one like others.
TEST_F(Owners, S18AlsoTheUserNobodyMayNotOwnADirectoryAboveAStore) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives a directory to another user";
  constexpr uid_t kNobody = 65534;
  const fs::path home = directory("nobody", kNobody, 0755);
  EXPECT_THAT(refusal_of(0, home / "store"), HasSubstr("belongs to user 65534"));
}

TEST_F(Owners, S18ALinkOfAnotherUserLeadsToNoStore) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives a link to another user";
  const fs::path sticky = directory("sticky", 0, 01777);
  directory("real", 0, 0755);
  fs::create_directory_symlink(fleet_.dir("real"), sticky / "planted");
  expect_up(0, sticky / "planted");
  ASSERT_EQ(::lchown((sticky / "planted").c_str(), kAlice, kAlice), 0);
  EXPECT_THAT(refusal_of(0, sticky / "planted"), HasSubstr("on the way to it belongs to user"));
  EXPECT_THAT(refusal_of(0, sticky / "planted" / "s"), HasSubstr("on the way to it belongs to"));
}

TEST_F(Owners, NothingIsMadeWhereAnotherUserLeads) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives a directory to another user";
  const fs::path sticky = directory("sticky", 0, 01777);
  const fs::path real = directory("real", 0, 0755);
  const fs::path home = directory("home", kAlice, 0755);
  fs::create_directory_symlink(real, sticky / "planted");
  ASSERT_EQ(::lchown((sticky / "planted").c_str(), kAlice, kAlice), 0);
  EXPECT_THAT(refusal_of(0, sticky / "planted" / "store"), HasSubstr("belongs to user 12345"));
  EXPECT_THAT(refusal_of(0, home / "deep" / "store"), HasSubstr("belongs to user 12345"));
  EXPECT_TRUE(fs::is_empty(real));
  EXPECT_TRUE(fs::is_empty(home));
}

// Its owner could bring an older list back, in which a certificate is not revoked.
TEST_F(Owners, NoLinkOfAnotherUserLeadsToAFileThatSaysWhoIsTrusted) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives a link to another user";
  const fs::path sticky = directory("sticky", 0, 01777);
  const fs::path home = directory("home", kAlice, 0755);
  const fs::path rights = fleet_.dir("rights.json");
  std::ofstream(rights) << R"({"rights": []})";
  fs::create_symlink(rights, sticky / "link");
  ASSERT_EQ(::lchown((sticky / "link").c_str(), kAlice, kAlice), 0);
  fs::create_symlink(rights, home / "link");
  fs::create_symlink(home / "link", sticky / "over");
  const std::vector<std::pair<fs::path, fs::path>> ways{
      {sticky / "link", sticky / "link"}, {home / "link", home}, {sticky / "over", home}};
  for (const auto& [way, foreign] : ways) {
    const auto done =
        run(Spawn{.argv = {REKINDLE_BINARY, "coordinator", "--rights", way.string()}});
    EXPECT_NE(done.exit.code, 0);
    EXPECT_THAT(done.err, HasSubstr(foreign.string() + " on the way to it belongs to user 12345"));
  }
}

TEST_F(Owners, ASecondAgentWithTheSameCertificateIsRefusedAndTheFirstStays) {
  const TestDirectory files;
  TestAuthority authority(files, "authority");
  const auto issue = [&](const std::string& role, const std::string& name) {
    const auto made = authority.issue(
        name,
        {.names = fmt::format("URI:spiffe://example.org/rekindle/{}/{},IP:127.0.0.1", role, name)});
    return std::vector<std::string>{"--tls-cert", made.certificate_file, "--tls-key", made.key_file,
                                    "--tls-ca",   made.authority_file};
  };
  const auto audit = fleet_.dir("audit.jsonl");
  auto of_coordinator = issue("coordinator", "c");
  of_coordinator.insert(of_coordinator.end(), {"--audit", audit.string()});
  fleet_.start_coordinator("127.0.0.1", of_coordinator);
  auto certificate = issue("agent", "gpu-7");
  certificate.insert(certificate.end(), {"--coordinator", fleet_.coordinator_address()});
  const auto first = agent_of(::geteuid() == 0 ? 0 : ::geteuid(), fleet_.dir("first"), certificate);
  const std::string address = first->value_after(kUp);
  ASSERT_TRUE(fleet_.coordinator().wait_for_err("node.registered node=gpu-7")) << first->err();
  const auto second = agent_of(0, fleet_.dir("second"), certificate);
  EXPECT_TRUE(second->wait_for_err("node id 'gpu-7' is in use by a live process at "))
      << second->err();
  EXPECT_THAT(second->err(), AllOf(HasSubstr("spiffe://example.org/rekindle/agent/gpu-7"),
                                   HasSubstr("give each host a certificate of its own")));
  EXPECT_TRUE(first->running());
  EXPECT_THAT(read_file(audit), Not(HasSubstr("replace_node"))) << "a live member stays";
  // The id is free once its holder has gone, and the change is written down.
  first->kill();
  EXPECT_TRUE(fleet_.coordinator().wait_for_err("node.replaced node=gpu-7"));
  EXPECT_TRUE(eventually([&] {
    const std::string log = read_file(audit);
    return log.find("replaces another process at ") != std::string::npos;
  }));
}

}  // namespace
}  // namespace rekindle::testing
