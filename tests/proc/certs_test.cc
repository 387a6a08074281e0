// `rekindle certs`, as OpenSSL and a daemon's operator see it.
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <sys/stat.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/proc/cluster.h"

namespace rekindle::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Certs : public ::testing::Test {
 protected:
  Finished certs(std::vector<std::string> words) {
    words.insert(words.begin() + 1, ca().string());
    words.insert(words.begin(), "certs");
    return rekindle(std::move(words));
  }
  void must(std::vector<std::string> words) {
    const Finished done = certs(std::move(words));
    ASSERT_EQ(done.exit.code, 0) << done.err;
  }
  std::filesystem::path ca(const char* file = "") const { return tmp_ / "ca" / file; }
  Finished openssl(std::vector<std::string> words) {
    words.insert(words.begin(), "openssl");
    return run(std::move(words));
  }
  // By the certificates and revocation lists of the directory, or of other files.
  Finished verify(const char* file, std::filesystem::path trusted = {}) {
    return openssl({"verify", "-x509_strict", "-crl_check", "-CAfile",
                    (trusted.empty() ? ca("ca.crt") : trusted).string(), "-CRLfile",
                    ca("ca.crl").string(), ca(file).string()});
  }
  std::string text_of(const char* file) {
    return openssl({"x509", "-noout", "-text", "-in", ca(file).string()}).out;
  }
  std::string state(const std::string& name) {
    const Json all = json_of(certs({"list", "--json"}));
    for (const Json& one : all["certificates"]) {
      if (one["name"] == name && one["state"] != "replaced") return one["state"];
    }
    return "";
  }
  static mode_t mode(const std::filesystem::path& file) {
    struct stat info {};
    return ::stat(file.c_str(), &info) == 0 ? info.st_mode & 07777 : 0;
  }
  TempDir tmp_;
};

TEST_F(Certs, OpensslAcceptsTheChainAndReadsTheNames) {
  must({"init", "--trust-domain", "example.org"});
  must({"issue", "agent", "gpu-7", "--dns", "gpu-7.example.org", "--ip", "10.0.0.7", "--ip",
        "fd00::7"});
  const Finished verified = verify("agent-gpu-7.pem");
  EXPECT_EQ(verified.exit.code, 0) << verified.err;
  const std::string leaf = text_of("agent-gpu-7.pem");
  EXPECT_THAT(leaf, HasSubstr("URI:spiffe://example.org/rekindle/agent/gpu-7, "
                              "DNS:gpu-7.example.org, IP Address:10.0.0.7, IP Address:FD00:"));
  EXPECT_THAT(leaf, HasSubstr("TLS Web Client Authentication, TLS Web Server Authentication"));
  EXPECT_THAT(leaf, AllOf(HasSubstr("CA:FALSE"), HasSubstr("prime256v1")));
  const std::string authority = text_of("ca.crt");
  EXPECT_THAT(authority,
              AllOf(HasSubstr("CA:TRUE, pathlen:0"), HasSubstr("Certificate Sign, CRL Sign"),
                    HasSubstr("URI:example.org")));
  for (const char* purpose : {"sslclient", "sslserver"}) {
    const Finished fits = openssl({"verify", "-purpose", purpose, "-CAfile", ca("ca.crt").string(),
                                   ca("agent-gpu-7.pem").string()});
    EXPECT_EQ(fits.exit.code, 0) << fits.err;
  }
}

TEST_F(Certs, TheFileHasTheKeyOfItsCertificateAndIsForItsUserOnly) {
  must({"init"});
  must({"issue", "puller", "p"});
  const std::string file = ca("puller-p.pem").string();
  EXPECT_EQ(openssl({"pkey", "-in", file, "-pubout"}).out,
            openssl({"x509", "-in", file, "-noout", "-pubkey"}).out);
  EXPECT_EQ(mode(file), 0600u);
  EXPECT_EQ(mode(ca("ca.pem")), 0600u);
  EXPECT_EQ(mode(ca("ca.crt")), 0644u);
  EXPECT_THAT(read_file(ca("ca.crt")), Not(HasSubstr("PRIVATE KEY")));
}

TEST_F(Certs, AnotherAuthorityDoesNotVouchForThem) {
  must({"init"});
  must({"issue", "client", "c"});
  const std::string other = (tmp_ / "other").string();
  ASSERT_EQ(rekindle({"certs", "init", other}).exit.code, 0);
  EXPECT_NE(verify("client-c.pem", tmp_ / "other" / "ca.crt").exit.code, 0);
}

TEST_F(Certs, TheAuthorityCannotVouchForAnotherTrustDomain) {
  must({"init", "--trust-domain", "a.example"});
  const auto request = tmp_ / "request";
  const auto made = tmp_ / "made";
  write_file(tmp_ / "names", "subjectAltName=URI:spiffe://b.example/rekindle/agent/x\n");
  ASSERT_EQ(openssl({"req", "-new", "-newkey", "ed25519", "-nodes", "-subj", "/CN=x", "-keyout",
                     (tmp_ / "key").string(), "-out", request.string()})
                .exit.code,
            0);
  const Finished signed_by_it = openssl(
      {"x509", "-req", "-in", request.string(), "-CA", ca("ca.pem").string(), "-CAkey",
       ca("ca.pem").string(), "-extfile", (tmp_ / "names").string(), "-out", made.string()});
  ASSERT_EQ(signed_by_it.exit.code, 0) << signed_by_it.err;
  const Finished verified = openssl({"verify", "-CAfile", ca("ca.crt").string(), made.string()});
  EXPECT_NE(verified.exit.code, 0);
  EXPECT_THAT(verified.out + verified.err, HasSubstr("permitted subtree violation"));
}

TEST_F(Certs, ARevokedCertificateIsRefusedAlsoInItsFormerLives) {
  must({"init"});
  must({"issue", "agent", "a"});
  must({"issue", "agent", "b"});
  std::filesystem::copy_file(ca("agent-a.pem"), ca("first-life.pem"));
  must({"rotate", "--within", "8000h"});
  EXPECT_EQ(verify("first-life.pem").exit.code, 0);
  must({"revoke", "agent", "a"});
  for (const char* file : {"agent-a.pem", "first-life.pem"}) {
    const Finished verified = verify(file);
    EXPECT_NE(verified.exit.code, 0) << file;
    EXPECT_THAT(verified.out + verified.err, HasSubstr("certificate revoked"));
  }
  EXPECT_EQ(verify("agent-b.pem").exit.code, 0);
  EXPECT_EQ(state("a"), "revoked");
  // A later revocation forgets no earlier one, and a repeated one is no error.
  must({"revoke", "agent", "b"});
  must({"revoke", "agent", "b"});
  EXPECT_NE(verify("first-life.pem").exit.code, 0);
  // It is not renewed.
  const std::string before = read_file(ca("agent-a.pem"));
  must({"rotate", "--within", "8000h"});
  EXPECT_EQ(read_file(ca("agent-a.pem")), before);
}

TEST_F(Certs, RotationRenewsWhatIsDueWithANewKeyAndTheSameNames) {
  must({"init"});
  must({"issue", "agent", "soon", "--days", "1", "--dns", "soon.example.org"});
  must({"issue", "agent", "later", "--days", "300"});
  const std::string later = read_file(ca("agent-later.pem"));
  const std::string key = openssl({"pkey", "-in", ca("agent-soon.pem").string(), "-pubout"}).out;
  EXPECT_THAT(certs({"rotate"}).out, HasSubstr("No certificate is due"));
  const Finished done = certs({"rotate", "--within", "48h", "--json"});
  EXPECT_EQ(json_of(done)["renewed"], Json::array({ca("agent-soon.pem").string()})) << done.err;
  EXPECT_EQ(read_file(ca("agent-later.pem")), later);
  EXPECT_EQ(verify("agent-soon.pem").exit.code, 0);
  EXPECT_THAT(text_of("agent-soon.pem"),
              HasSubstr("URI:spiffe://rekindle.local/rekindle/agent/soon, DNS:soon.example.org"));
  EXPECT_NE(openssl({"pkey", "-in", ca("agent-soon.pem").string(), "-pubout"}).out, key);
}

// What a daemon does that reads the file again at any moment.
TEST_F(Certs, AReaderNeverSeesAKeyWithoutItsCertificate) {
  must({"init"});
  must({"issue", "agent", "a"});
  std::jthread rotator([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) must({"rotate", "--within", "8000h"});
  });
  std::map<std::string, bool> seen;
  ASSERT_TRUE(eventually([&] {
    const auto copy = tmp_ / "copy";
    write_file(copy, read_file(ca("agent-a.pem")));
    const std::string of_key = openssl({"pkey", "-in", copy.string(), "-pubout"}).out;
    EXPECT_NE(of_key, "");
    EXPECT_EQ(of_key, openssl({"x509", "-in", copy.string(), "-noout", "-pubkey"}).out);
    seen[of_key] = true;
    return seen.size() >= 5;
  }));
}

TEST_F(Certs, AnAuthorityIsReplacedInTwoStepsWithoutAGap) {
  must({"init"});
  must({"issue", "agent", "a"});
  must({"issue", "agent", "gone"});
  must({"revoke", "agent", "gone"});
  std::filesystem::copy_file(ca("ca.crt"), tmp_ / "ca-of-a-slow-host");
  must({"rotate", "--ca"});
  EXPECT_EQ(verify("agent-a.pem").exit.code, 0) << "the former authority still counts";
  EXPECT_NE(verify("agent-gone.pem").exit.code, 0) << "it is still revoked";
  EXPECT_EQ(state("a"), "former authority");
  const Finished early = certs({"rotate", "--drop-old-ca"});
  EXPECT_EQ(early.exit.code, 2);
  EXPECT_THAT(early.err, HasSubstr("agent-a.pem is still signed by the former authority"));
  EXPECT_EQ(certs({"rotate", "--ca"}).exit.code, 2) << "one rotation at a time";
  // Revocation goes on in the middle of it.
  must({"issue", "agent", "new"});
  must({"revoke", "agent", "new"});
  EXPECT_NE(verify("agent-new.pem").exit.code, 0);

  must({"rotate"});
  EXPECT_EQ(verify("agent-a.pem").exit.code, 0);
  EXPECT_NE(verify("agent-a.pem", tmp_ / "ca-of-a-slow-host").exit.code, 0);
  must({"rotate", "--drop-old-ca"});
  EXPECT_EQ(verify("agent-a.pem").exit.code, 0);
  EXPECT_NE(verify("agent-new.pem").exit.code, 0);
  EXPECT_FALSE(std::filesystem::exists(ca("ca-old.pem")));
  must({"rotate", "--ca"});
}

// A rotation that was killed before its last step changed nothing that counts, and may be repeated.
TEST_F(Certs, AnInterruptedRotationOfTheAuthorityIsRepeated) {
  must({"init"});
  must({"issue", "agent", "a"});
  std::filesystem::copy_file(ca("ca.pem"), tmp_ / "ca.pem");
  must({"rotate", "--ca"});
  std::filesystem::rename(ca("ca.pem"), ca("ca-next.pem"));
  std::filesystem::copy_file(tmp_ / "ca.pem", ca("ca.pem"));
  EXPECT_EQ(state("a"), "valid");
  must({"rotate", "--ca"});
  EXPECT_EQ(state("a"), "former authority");
  EXPECT_EQ(verify("agent-a.pem").exit.code, 0);
}

TEST_F(Certs, NothingIsOverwrittenUnlessAskedFor) {
  must({"init"});
  must({"issue", "agent", "a"});
  const std::string authority = read_file(ca("ca.pem"));
  const std::string agent = read_file(ca("agent-a.pem"));
  const Finished again = certs({"init"});
  EXPECT_EQ(again.exit.code, 2);
  EXPECT_THAT(again.err, AllOf(HasSubstr("has an authority already"), HasSubstr("--force")));
  const Finished issued = certs({"issue", "agent", "a"});
  EXPECT_EQ(issued.exit.code, 2);
  EXPECT_THAT(issued.err, AllOf(HasSubstr("agent-a.pem exists"), HasSubstr("--force")));
  EXPECT_EQ(read_file(ca("ca.pem")), authority);
  EXPECT_EQ(read_file(ca("agent-a.pem")), agent);
  must({"issue", "agent", "a", "--force"});
  EXPECT_NE(read_file(ca("agent-a.pem")), agent);
}

TEST_F(Certs, ACertificateOfAWholeRoleNamesNoNodeAndIsRenewedAndRevokedLikeOthers) {
  must({"init", "--trust-domain", "example.org"});
  must({"issue", "agent", "*", "--dns", "rekindle-agent"});
  const std::string before = read_file(ca("agent.pem"));
  EXPECT_THAT(openssl({"x509", "-in", ca("agent.pem"), "-noout", "-ext", "subjectAltName"}).out,
              HasSubstr("URI:spiffe://example.org/rekindle/agent, DNS:rekindle-agent"));
  must({"rotate", "--within", "8760h"});
  EXPECT_NE(read_file(ca("agent.pem")), before);
  EXPECT_THAT(certs({"revoke", "agent", "*"}).out,
              HasSubstr("2 certificates of agent * are revoked"));
}

TEST_F(Certs, WrongInputIsRefusedInOneLine) {
  const auto refused = [&](std::vector<std::string> words, int code, const char* says) {
    const Finished done = certs(std::move(words));
    EXPECT_EQ(done.exit.code, code) << says;
    EXPECT_THAT(done.err, HasSubstr(says));
    EXPECT_EQ(std::ranges::count(done.err, '\n'), 1) << done.err;
  };
  refused({"issue", "agent", "a"}, 3, "make an authority: rekindle certs init");
  refused({"init", "--trust-domain", "Example.ORG"}, 2, "--trust-domain 'Example.ORG'");
  refused({"init", "--trust-domain", "a.example,DNS:evil"}, 2, "--trust-domain");
  must({"init", "--days", "30"});
  refused({"issue", "king", "a"}, 2, "'king' is not a role");
  for (const char* name : {"**", "a*", "../a", "a/b", "..", "", "a b", "a\nb", "a%2f"}) {
    refused({"issue", "agent", name}, 2, "is not a name for a certificate");
  }
  refused({"issue", "agent", "a", "--dns", "x,URI:spiffe://rekindle.local/rekindle/agent/b"}, 2,
          "is not a DNS name");
  refused({"issue", "agent", "a", "--ip", "10.0.0"}, 2, "'10.0.0' is not an IP address");
  refused({"issue", "agent", "a", "--days", "31"}, 2, "would outlive its authority");
  refused({"issue", "agent", "a", "--days", "0"}, 2, "--days");
  refused({"revoke", "agent", "nobody"}, 3, "has issued no certificate for agent nobody");
  refused({"rotate", "--drop-old-ca"}, 2, "one authority only");
  refused({"rotate", "--ca", "--drop-old-ca"}, 2, "--drop-old-ca");
  refused({"rotate", "--within", "soon"}, 2, "--within");
  write_file(ca("ca.crl"), "rubbish");
  refused({"revoke", "agent", "a"}, 2, "ca.crl");
  write_file(ca("ca.pem"), "rubbish");
  refused({"list"}, 2, "ca.pem: it needs an unencrypted private key and a certificate");
}

TEST_F(Certs, TwoAtATimeDoNotMix) {
  must({"init"});
  std::vector<std::unique_ptr<Process>> all;
  for (int i = 0; i < 8; ++i) {
    all.push_back(std::make_unique<Process>(
        rekindle_spawn({"certs", "issue", ca().string(), "agent", "n" + std::to_string(i)})));
  }
  int issued = 0;
  for (const auto& one : all) {
    const auto exit = one->wait();
    ASSERT_TRUE(exit);
    if (exit->code == 0) {
      ++issued;
    } else {
      EXPECT_EQ(exit->code, 5);
      EXPECT_THAT(one->err(), HasSubstr("another `rekindle certs` works on"));
    }
  }
  EXPECT_GE(issued, 1);
  EXPECT_EQ(json_of(certs({"list", "--json"}))["certificates"].size(),
            static_cast<std::size_t>(issued));
}

}  // namespace
}  // namespace rekindle::testing
