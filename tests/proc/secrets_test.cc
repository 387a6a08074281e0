// Where the secrets of daemons must not be: in the part of their memory that a core dump has, in
// `ps`, in environments, in logs, and in the output of commands.
#include <filesystem>
#include <map>

#include <gtest/gtest.h>

#include "recovery/rpc/http_client.h"
#include "tests/recovery/rpc_certificates.h"
#include "tests/support/dumped_memory.h"
#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

using rpc::testing::TestAuthority;
using rpc::testing::TestDirectory;

const std::string kFirst = "7c1f4be0d2a96f35-the-first-secret";
const std::string kSecond = "e83a05d7719cb264-the-second-secret";
const std::string kToken = "59d02c6bb1f7e448-the-token-of-a-reader";

std::vector<Hidden> forms_of_secret(const std::string& name, const std::string& secret) {
  return {{name, secret},
          {name + " as key of TLS", std::string(rpc::SharedKey(secret).key.reveal())}};
}

enum class By { kSecret, kCertificate };

// A coordinator and the agents a and b, which prove themselves by secrets or certificates.
class Secrets : public ::testing::TestWithParam<By> {
 protected:
  Secrets() {
    make_checkpoint(fleet_.dir("model"), 2, 256, 5);
    EXPECT_EQ(fleet_.run_command({"keys", "new", sign_key_}).exit_code, 0);
    add(forms_of_key("the key of the publisher", sign_key_));
    renew(kFirst, "first");
  }

  // New secrets and certificates of all processes.
  void renew(const std::string& lines, const std::string& which) {
    files_.write("secret", lines);
    for (const auto& [name, role] :
         {std::pair("c", "coordinator"), {"a", "agent"}, {"b", "agent"}, {"user", "client"}}) {
      const auto issued = authority_.issue(
          "new", {.names = fmt::format("URI:spiffe://example.org/rekindle/{}/{},IP:127.0.0.1", role,
                                       name)});
      // One file has both, as `rekindle certs issue` writes it.
      const std::string file =
          files_.write(fmt::format("{}.pem", name),
                       read_file(issued.certificate_file) + read_file(issued.key_file));
      if (is_by_secret()) continue;
      add(forms_of_key(fmt::format("the {} key of {}", which, name), file));
    }
  }
  void add(std::vector<Hidden> more) { hidden_.insert(hidden_.end(), more.begin(), more.end()); }
  static bool is_by_secret() { return GetParam() == By::kSecret; }

  std::vector<std::string> proof_of(const std::string& name) const {
    if (is_by_secret()) return {"--secret-file", files_.file("secret")};
    const std::string both = files_.file(name + ".pem");
    return {"--tls-cert", both, "--tls-key", both, "--tls-ca", files_.file("authority.ca")};
  }

  void start() {
    if (is_by_secret()) add(forms_of_secret("the first secret", kFirst));
    auto words = proof_of("c");
    words.insert(words.end(), {"--log-level", "trace", "--audit", fleet_.dir("audit").string()});
    if (!is_by_secret()) {
      add({{"the token of a reader", kToken}});
      words.insert(words.end(),
                   {"--http", "0.0.0.0:0", "--http-token-file", files_.write("token", kToken)});
    }
    fleet_.start_coordinator("127.0.0.1", words);
    for (const char* const name : {"a", "b"}) {
      words = proof_of(name);
      words.insert(words.end(), {"--sign-key", sign_key_, "--log-level", "trace"});
      fleet_.start_agent(name, std::move(words));
    }
  }
  std::vector<std::pair<std::string, Process*>> daemons() {
    return {{"the coordinator", &fleet_.coordinator()},
            {"agent a", fleet_.agent("a").process.get()},
            {"agent b", fleet_.agent("b").process.get()}};
  }

  Finished command(std::vector<std::string> words, const std::string& agent = "a") {
    words.insert(words.begin(), REKINDLE_BINARY);
    const auto proof = proof_of("user");
    words.insert(words.end(), proof.begin(), proof.end());
    words.insert(words.end(), {"--coordinator", fleet_.coordinator_address(), "--store",
                               fleet_.agent(agent).store.string()});
    return run(std::move(words), 2 * kPatience);
  }
  // Moves a version from a to b, over encrypted streams.
  void transfer(const std::string& version) {
    const auto published =
        command({"publish", version, fleet_.dir("model").string(), "--sign-key", sign_key_});
    ASSERT_EQ(published.exit.code, 0) << published.err;
    const auto pulled = command({"pull", version, "--transport", "tcp", "--encrypt"}, "b");
    ASSERT_EQ(pulled.exit.code, 0) << pulled.err;
  }
  // The page of a coordinator that has a certificate.
  void read_page() {
    if (is_by_secret()) return;
    const std::string address = fleet_.coordinator().value_after("showing the status page on ");
    const auto port = static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
    rpc::HttpClient client({"127.0.0.1", port}, 1u << 20,
                           rpc::HttpTlsFiles{.authorities = files_.file("authority.ca")});
    const auto page = client.get("/api/v1/fleet", steady_now() + kPatience, "Bearer " + kToken);
    ASSERT_TRUE(page) << page.error().message();
    ASSERT_EQ(page->status, 200) << page->body;
    seen_.push_back({"the status page", page->body});
  }

  const TestDirectory files_;
  TestAuthority authority_{files_, "authority"};
  const std::string sign_key_ = files_.file("publisher");
  Fleet fleet_;
  std::vector<Hidden> hidden_;
  // Texts in which nothing hidden may be.
  std::vector<Hidden> seen_;
};

TEST_P(Secrets, ACoreDumpHasNone) {
  start();
  ASSERT_NO_FATAL_FAILURE(transfer("m@1"));
  ASSERT_NO_FATAL_FAILURE(read_page());
  renew(kFirst + "\n" + kSecond + "\n", "second");
  if (is_by_secret()) add(forms_of_secret("the second secret", kSecond));
  for (const auto& [name, process] : daemons()) {
    if (is_by_secret()) process->signal(SIGHUP);
    ASSERT_TRUE(process->wait_for_err(is_by_secret() ? "config.reloaded" : "tls.reloaded"))
        << name << process->err();
  }
  ASSERT_NO_FATAL_FAILURE(transfer("m@2"));
  for (const auto& [name, process] : daemons()) {
    const DumpedMemory dumped(process->pid());
    EXPECT_TRUE(dumped.has(files_.file(""))) << "the directory of the files is no secret";
    for (const auto& [what, bytes] : hidden_) {
      EXPECT_FALSE(dumped.has(bytes)) << what << " in the memory of " << name;
    }
  }
}

TEST_P(Secrets, NoLogNoProcessListAndNoCommandShowsThem) {
  start();
  ASSERT_NO_FATAL_FAILURE(transfer("m@1"));
  ASSERT_NO_FATAL_FAILURE(read_page());
  const std::string bundle = fleet_.dir("bundle.tar.gz");
  const std::vector<std::vector<std::string>> commands = {{"doctor"},
                                                          {"status", "--json"},
                                                          {"trace", "m@1"},
                                                          {"explain", "publication", "m@1"},

                                                          {"whoami"},
                                                          {"config", "show", "agent"},
                                                          {"auth", "check", "uid:0", "read"},
                                                          {"support-bundle", "--to", bundle}};
  for (const auto& words : commands) {
    const auto done = command(words);
    seen_.push_back({words.front(), done.out + done.err});
    EXPECT_GT(seen_.back().bytes.size(), 10u) << words.front();
  }
  const auto unpacked = run({"tar", "-xzOf", bundle});
  ASSERT_EQ(unpacked.exit.code, 0) << unpacked.err;
  seen_.push_back({"the support bundle", unpacked.out});
  seen_.push_back({"the audit log", read_file(fleet_.dir("audit"))});
  for (const auto& [name, process] : daemons()) {
    const std::string own = fmt::format("/proc/{}/", process->pid());
    seen_.push_back({"arguments of " + name, read_file(own + "cmdline")});
    seen_.push_back({"environment of " + name, read_file(own + "environ")});
    seen_.push_back({"log of " + name, process->out() + process->err()});
  }
  for (const auto& [where, text] : seen_) {
    EXPECT_FALSE(text.empty()) << where;
    for (const auto& [what, bytes] : hidden_) {
      EXPECT_EQ(text.find(bytes), std::string::npos) << what << " in " << where;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, Secrets, ::testing::Values(By::kSecret, By::kCertificate),
                         [](const auto& kind) {
                           return kind.param == By::kSecret ? "BySecret" : "ByCertificate";
                         });

}  // namespace
}  // namespace rekindle::testing
