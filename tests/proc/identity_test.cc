#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/rpc/http_client.h"
#include "src/base/clock.h"
#include "tests/recovery/rpc_certificates.h"
#include "tests/support/fleet.h"
#include "tests/support/process.h"

// Daemons and commands that prove who they are, as real processes.
namespace rekindle::testing {
namespace {

using rpc::testing::TestAuthority;
using rpc::testing::TestDirectory;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kOldSecret = "the old secret of a fleet";
constexpr const char* kNewSecret = "the new secret of a fleet";

std::vector<std::string> words_of(const rpc::CredentialOptions& options) {
  return {"--tls-cert", options.certificate_file, "--tls-key", options.key_file,
          "--tls-ca",   options.authority_file};
}

Finished call(std::vector<std::string> words, const std::vector<std::string>& more = {}) {
  words.insert(words.begin(), REKINDLE_BINARY);
  words.insert(words.end(), more.begin(), more.end());
  return run(std::move(words));
}

TEST(Identity, S16ADaemonThatOthersReachNeedsOneOrTheWordThatItDoesNot) {
  const TempDir dir{true};
  for (const std::vector<std::string>& daemon :
       {std::vector<std::string>{"agent", "--listen", "0.0.0.0:0", "--store", dir / "store"},
        {"agent", "--listen", "[::]:0", "--advertise", "127.0.0.1", "--store", dir / "store"},
        {"coordinator", "--listen", "0.0.0.0:0", "--state", dir / "state"}}) {
    const Finished refused = call(daemon);
    EXPECT_EQ(refused.exit.code, 7) << refused.err;
    EXPECT_THAT(refused.err, AllOf(HasSubstr("--secret-file"), HasSubstr("--insecure")));
  }
  std::vector<std::string> words{REKINDLE_BINARY, "coordinator", "--listen",  "0.0.0.0:0",
                                 "--state",       dir / "state", "--insecure"};
  Process trusting({.argv = words});
  EXPECT_NE(trusting.value_after("coordinator listening on "), "") << trusting.err();
}

TEST(Identity, S17AFleetRotatesItsSecretBySighupWithoutARefusal) {
  const TestDirectory files;
  const auto write = [&](const std::string& text) { return files.write("secret", text); };
  const std::string secret = write(kOldSecret);
  const std::string before = files.write("old", kOldSecret);
  const std::string after = files.write("new", kNewSecret);
  Fleet fleet;
  fleet.start_coordinator("127.0.0.1", {"--secret-file", secret});
  auto& agent = fleet.start_agent("a", {"--secret-file", secret});
  const auto status = [&](const std::string& file) {
    return call({"status", "--coordinator", fleet.coordinator_address(), "--secret-file", file})
        .exit.code;
  };
  const auto reload = [&](const std::string& text) {
    write(text);
    for (Process* daemon : {&fleet.coordinator(), agent.process.get()}) {
      const auto reloads = [&] {
        std::size_t count = 0;
        const std::string log = daemon->err();
        for (auto at = log.find("config.reloaded"); at != std::string::npos;
             at = log.find("config.reloaded", at + 1)) {
          ++count;
        }
        return count;
      };
      const std::size_t had = reloads();
      daemon->signal(SIGHUP);
      ASSERT_TRUE(eventually([&] { return reloads() > had; })) << daemon->err();
    }
  };
  EXPECT_EQ(status(before), 0);
  EXPECT_EQ(status(after), 7);
  reload(fmt::format("{}\n{}\n", kOldSecret, kNewSecret));
  EXPECT_EQ(status(before), 0);
  EXPECT_EQ(status(after), 0);
  reload(fmt::format("{}\n{}\n", kNewSecret, kOldSecret));
  EXPECT_EQ(status(before), 0);
  reload(kNewSecret);
  EXPECT_EQ(status(before), 7);
  EXPECT_EQ(status(after), 0);
}

TEST(Identity, AFleetOfCertificatesPullsAndAnAgentHasTheNameInIts) {
  const TestDirectory files;
  TestAuthority authority(files, "fleet");
  const auto issue = [&](const std::string& role, const std::string& name) {
    return words_of(authority.issue(
        name, {.names = fmt::format("URI:spiffe://example.org/rekindle/{}/{}", role, name)}));
  };
  const auto ann = issue("client", "ann");
  Fleet fleet;
  fleet.start_coordinator("127.0.0.1", issue("coordinator", "c1"));
  const auto a = issue("agent", "a");
  fleet.start_agent("a", a);
  const auto b = issue("agent", "b");
  fleet.start_agent("b", b);
  make_checkpoint(fleet.dir("model"), 2, 64, 7);
  const std::string store = fleet.agent("a").store.string();
  auto published = call({"publish", "m@1", fleet.dir("model").string(), "--store", store});
  EXPECT_EQ(published.exit.code, 0) << published.err;
  const auto pulled = call({"pull", "m@1", "--to", (fleet.dir("copy") / "m").string(),
                            "--coordinator", fleet.coordinator_address()},
                           ann);
  EXPECT_EQ(pulled.exit.code, 0) << pulled.err;
  const auto stranger = call({"status", "--coordinator", fleet.coordinator_address()});
  EXPECT_EQ(stranger.exit.code, 7);
  EXPECT_THAT(stranger.err, HasSubstr("--tls-cert"));
  Process misnamed({.argv = {REKINDLE_BINARY, "agent", "--node-id", "c", "--listen", "127.0.0.1:0",
                             "--store", fleet.dir("store-c").string(), "--coordinator",
                             fleet.coordinator_address(), b[0], b[1], b[2], b[3], b[4], b[5]}});
  EXPECT_TRUE(misnamed.wait_for_err("agent c has the certificate of")) << misnamed.err();
}

TEST(Identity, ThePageForOtherHostsIsForCertificatesWithTheRightToReadAll) {
  const TestDirectory files;
  TestAuthority authority(files, "fleet");
  const auto named = [&](const std::string& name) {
    return authority.issue(name, {.names = "URI:spiffe://example.org/rekindle/client/" + name});
  };
  const auto ann = named("ann");
  const auto bob = named("bob");
  const std::string rights = files.write("rights", R"({"rights": [
      {"principals": ["*/client/ann"], "verbs": ["read"]},
      {"principals": ["*/client/bob"], "verbs": ["read"], "models": ["qwen*"]}]})");
  auto words = words_of(authority.issue("coordinator"));
  words.insert(words.end(), {"--http", "0.0.0.0:0", "--metrics", "0.0.0.0:0", "--rights", rights});
  Fleet fleet;
  fleet.start_coordinator("127.0.0.1", words);
  const auto port_of = [&](const char* does) {
    const std::string address = fleet.coordinator().value_after(does);
    return static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  };
  const std::uint16_t metrics = port_of("coordinator answering metrics on ");
  const std::uint16_t page = port_of("coordinator showing the status page on ");
  const auto get = [&](std::uint16_t port, const char* path, const rpc::HttpTlsFiles& tls) {
    rpc::HttpClient client({"127.0.0.1", port}, 1u << 20, tls);
    const auto reply = client.get(path, steady_now() + std::chrono::seconds(20));
    return reply ? fmt::format("{} {}", reply->status, reply->body) : reply.error().message();
  };
  const auto as = [](const rpc::CredentialOptions& options) {
    return rpc::HttpTlsFiles{options.authority_file, options.certificate_file, options.key_file};
  };
  constexpr const char* kFleet = "/api/v1/fleet";
  EXPECT_THAT(get(page, kFleet, as(ann)), AllOf(StartsWith("200 "), HasSubstr("\"leading\":true")));
  EXPECT_THAT(get(page, "/", as(ann)), HasSubstr("<html"));
  EXPECT_THAT(get(page, kFleet, as(bob)), AllOf(StartsWith("403 "), HasSubstr("client/bob")));
  EXPECT_THAT(get(page, kFleet, {.authorities = ann.authority_file}), StartsWith("401 "));
  EXPECT_THAT(get(metrics, "/metrics", as(bob)),
              AllOf(StartsWith("200 "), HasSubstr("rekindle_coordinator_leading")));
  EXPECT_THAT(get(metrics, "/metrics", {.authorities = ann.authority_file}), StartsWith("401 "));
  EXPECT_TRUE(fleet.coordinator().wait_for_err("http.refused"));

  const Finished refused = call({"coordinator", "--listen", "127.0.0.1:0", "--state",
                                 fleet.dir("other").string(), "--metrics", "0.0.0.0:0"});
  EXPECT_EQ(refused.exit.code, 7) << refused.err;
  EXPECT_THAT(refused.err, AllOf(HasSubstr("--metrics 0.0.0.0:0"), HasSubstr("--http-open")));
}

}  // namespace
}  // namespace rekindle::testing
