#include "recovery/rpc/http_server.h"

#include <atomic>
#include <thread>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/connect.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/read_until.hpp>
#include <boost/asio/ssl/context.hpp>
#include <boost/asio/ssl/stream.hpp>
#include <boost/asio/write.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "src/base/clock.h"
#include "tests/recovery/rpc_certificates.h"

namespace rekindle::rpc {
namespace {

using namespace std::chrono_literals;
using namespace std::string_view_literals;
using boost::asio::ip::tcp;

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class HttpServerTest : public ::testing::Test {
 protected:
  void SetUp() override { start({.max_connections = 4, .request_deadline = 300ms}); }
  void start(HttpOptions options) {
    auto server = HttpServer::listen(
        context_.get_executor(), "--health", "127.0.0.1:0",
        [](const HttpRequest& request) {
          if (request.target == "/tagged") {
            HttpAnswer answer{200, "body"};
            answer.etag = "v1";
            answer.headers = {{"X-Host", std::string(request.host)}};
            return answer;
          }
          return request.target == "/ready/i" ? HttpAnswer{200, "{\"ready\":true}\n"}
                                              : HttpAnswer{503, "{\"ready\":false}\n"};
        },
        options);
    ASSERT_TRUE(server) << server.error().message();
    server_ = std::move(*server);
    thread_ = std::thread([this] { context_.run(); });
  }
  void TearDown() override {
    boost::asio::co_spawn(context_, server_->close(2000ms), boost::asio::detached);
    thread_.join();
    server_.reset();
  }
  void restart(HttpOptions options) {
    HttpServerTest::TearDown();
    context_.restart();
    start(std::move(options));
  }
  tcp::socket connect() {
    const std::string& address = server_->address();
    tcp::socket socket(own_);
    socket.connect({boost::asio::ip::make_address("127.0.0.1"),
                    static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)))});
    return socket;
  }
  static std::string read_all(tcp::socket& socket) {
    std::string text;
    boost::system::error_code ended;
    boost::asio::read(socket, boost::asio::dynamic_buffer(text), ended);
    return text;
  }
  std::string ask(const std::string& request) {
    auto socket = connect();
    boost::system::error_code cut_off;
    boost::asio::write(socket, boost::asio::buffer(request), cut_off);
    return read_all(socket);
  }
  static std::string get(const std::string& target, const std::string& method = "GET") {
    return method + " " + target + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
  }

  boost::asio::io_context context_{1};
  boost::asio::io_context own_;
  std::unique_ptr<HttpServer> server_;
  std::thread thread_;
};

TEST_F(HttpServerTest, AnswersWithTheStatusAndOneLine) {
  const std::string ready = ask(get("/ready/i"));
  EXPECT_TRUE(ready.starts_with("HTTP/1.1 200 ")) << ready;
  EXPECT_TRUE(ready.ends_with("\r\n\r\n{\"ready\":true}\n")) << ready;
  EXPECT_TRUE(ask(get("/ready/j")).starts_with("HTTP/1.1 503 "));
}

TEST_F(HttpServerTest, HeadHasTheHeaderOnly) {
  const std::string head = ask(get("/ready/i", "HEAD"));
  EXPECT_TRUE(head.starts_with("HTTP/1.1 200 ")) << head;
  EXPECT_TRUE(head.ends_with("\r\n\r\n")) << head;
  EXPECT_NE(head.find("Content-Length: 15"), std::string::npos) << head;
}

TEST_F(HttpServerTest, ABodyThatTheClientHasIsNotSentAgain) {
  const std::string first = ask(get("/tagged"));
  EXPECT_NE(first.find("ETag: \"v1\"\r\n"), std::string::npos) << first;
  EXPECT_NE(first.find("Cache-Control: no-cache\r\n"), std::string::npos) << first;
  EXPECT_NE(first.find("X-Host: x\r\n"), std::string::npos) << first;
  const auto ask_with = [this](const std::string& tags) {
    return ask("GET /tagged HTTP/1.1\r\nHost: x\r\nConnection: close\r\nIf-None-Match: " + tags +
               "\r\n\r\n");
  };
  const std::string same = ask_with("\"v0\", \"v1\"");
  EXPECT_TRUE(same.starts_with("HTTP/1.1 304 ")) << same;
  EXPECT_TRUE(same.ends_with("\r\n\r\n")) << same;
  EXPECT_TRUE(ask_with("\"v11\"").starts_with("HTTP/1.1 200 "));
}

TEST_F(HttpServerTest, AnAnswerWithoutATagIsNotKept) {
  EXPECT_NE(ask(get("/ready/i")).find("Cache-Control: no-store\r\n"), std::string::npos);
}

TEST_F(HttpServerTest, OtherMethodsAreRefused) {
  EXPECT_TRUE(ask(get("/ready/i", "DELETE")).starts_with("HTTP/1.1 405 "));
}

TEST_F(HttpServerTest, AConnectionMayAskAgain) {
  auto socket = connect();
  const std::string first = "GET /ready/i HTTP/1.1\r\nHost: x\r\n\r\n";
  boost::asio::write(socket, boost::asio::buffer(first + first + get("/ready/i")));
  const std::string answers = read_all(socket);
  std::size_t count = 0;
  for (auto at = answers.find("HTTP/1.1 200"); at != std::string::npos;
       at = answers.find("HTTP/1.1 200", at + 1)) {
    ++count;
  }
  EXPECT_EQ(count, 3u);
}

TEST_F(HttpServerTest, NonsenseAndEndlessHeadersEndTheConnection) {
  EXPECT_EQ(ask("nonsense\r\n\r\n"), "");
  EXPECT_EQ(ask("GET / HTTP/1.1\r\nX: " + std::string(20'000, 'x') + "\r\n\r\n"), "");
}

TEST_F(HttpServerTest, WhoSaysNothingIsClosedAndKeepsNobodyOut) {
  std::vector<tcp::socket> idle;
  for (int i = 0; i < 4; ++i) idle.push_back(connect());
  for (auto& socket : idle) EXPECT_EQ(read_all(socket), "");  // ends at the deadline
  std::string answer;
  for (int i = 0; i < 1000 && answer.empty(); ++i) answer = ask(get("/ready/i"));
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 "));
}

TEST_F(HttpServerTest, ANewClientTakesThePlaceOfTheOneThatHasBeenSilentTheLongest) {
  restart({.max_connections = 4, .request_deadline = 60s});
  const auto ask_on = [](tcp::socket& socket) {
    boost::asio::write(socket, boost::asio::buffer("GET /ready/i HTTP/1.1\r\nHost: x\r\n\r\n"sv));
    std::string text;
    boost::system::error_code ended;
    boost::asio::read_until(socket, boost::asio::dynamic_buffer(text), "true}\n", ended);
    return text;
  };
  std::vector<tcp::socket> silent;
  for (int i = 0; i < 4; ++i) silent.push_back(connect());
  EXPECT_THAT(ask_on(silent[0]), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(ask(get("/ready/i")), StartsWith("HTTP/1.1 200 "));
  EXPECT_EQ(read_all(silent[1]), "");
  for (const std::size_t kept : {0u, 2u, 3u}) {
    EXPECT_THAT(ask_on(silent[kept]), StartsWith("HTTP/1.1 200 ")) << kept;
  }
}

// A server beyond loopback: its address is loopback here, so a test says that it is not open.
class HttpsServerTest : public HttpServerTest {
 protected:
  static constexpr const char* kToken = "the token of a scraper";
  static constexpr const char* kReader = "URI:spiffe://example.org/rekindle/client/reader";

  void SetUp() override {
    own_files_ = authority_.issue("server");
    HttpOptions options{.max_connections = 4, .request_deadline = 300ms};
    options.access.is_open = false;
    options.access.credentials = Credentials::open(own_files_).value();
    options.access.tokens = HttpTokens::open(files_.write("tokens", kToken)).value();
    options.access.allow = [this](std::span<const std::string> principals) -> Result<void> {
      last_principal_ = principals.front();
      if (principals.front().find("client/") != std::string::npos) return {};
      if (principals.front().starts_with("token:")) return {};
      return fail(ErrorCode::kDenied, "no line gives {} the right", principals.front());
    };
    start(std::move(options));
  }

  // With the certificate of `options`, where it names one.
  std::string ask_tls(const std::string& request, const CredentialOptions& options = {}) {
    boost::asio::ssl::context tls(boost::asio::ssl::context::tls_client);
    tls.load_verify_file(own_files_.authority_file);
    tls.set_verify_mode(boost::asio::ssl::verify_peer);
    if (!options.certificate_file.empty()) {
      tls.use_certificate_chain_file(options.certificate_file);
      tls.use_private_key_file(options.key_file, boost::asio::ssl::context::pem);
    }
    auto socket = connect();
    boost::asio::ssl::stream<tcp::socket&> stream(socket, tls);
    boost::system::error_code error;
    stream.handshake(boost::asio::ssl::stream_base::client, error);
    if (error) return "handshake: " + error.message();
    std::string text;
    boost::asio::write(stream, boost::asio::buffer(request), error);
    boost::asio::read(stream, boost::asio::dynamic_buffer(text), error);
    return text;
  }
  static std::string with_token(const std::string& token) {
    return "GET /ready/i HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + token +
           "\r\nConnection: close\r\n\r\n";
  }

  const testing::TestDirectory files_;
  testing::TestAuthority authority_{files_, "fleet"};
  CredentialOptions own_files_;
  std::string last_principal_;
};

TEST_F(HttpsServerTest, ACertificateWithTheRightMayRead) {
  const auto reader = authority_.issue("reader", {.names = kReader});
  EXPECT_THAT(ask_tls(get("/ready/i"), reader),
              AllOf(StartsWith("HTTP/1.1 200 "), HasSubstr("{\"ready\":true}")));
  EXPECT_EQ(last_principal_, "spiffe://example.org/rekindle/client/reader");
}

TEST_F(HttpsServerTest, WithoutACertificateOrATokenNothingIsTold) {
  EXPECT_THAT(ask_tls(get("/ready/i")),
              AllOf(StartsWith("HTTP/1.1 401 "), HasSubstr("--tls-cert"),
                    HasSubstr("--http-token-file"), Not(HasSubstr("ready"))));
}

TEST_F(HttpsServerTest, ACertificateWithoutTheRightIsToldWhichRightItLacks) {
  const auto agent = authority_.issue("a", {.names = "URI:spiffe://example.org/rekindle/agent/a"});
  EXPECT_THAT(ask_tls(get("/ready/i"), agent),
              AllOf(StartsWith("HTTP/1.1 403 "), HasSubstr("no line gives"), HasSubstr("agent/a"),
                    Not(HasSubstr("ready"))));
}

TEST_F(HttpsServerTest, ACertificateThatIsNotValidIsNoCertificate) {
  testing::TestAuthority strangers(files_, "strangers");
  EXPECT_THAT(ask_tls(get("/ready/i"), strangers.issue("eve", {.names = kReader})),
              AllOf(StartsWith("HTTP/1.1 401 "), HasSubstr("unknown authority")));
  EXPECT_THAT(ask_tls(get("/ready/i"), authority_.issue("old", {.names = kReader, .ends_s = -60})),
              AllOf(StartsWith("HTTP/1.1 401 "), HasSubstr("expired")));
}

TEST_F(HttpsServerTest, PlainHttpIsToldNothingEvenWithTheToken) {
  EXPECT_THAT(ask(get("/ready/i")), AllOf(StartsWith("HTTP/1.1 403 "), HasSubstr("https")));
  EXPECT_THAT(ask(with_token(kToken)), AllOf(StartsWith("HTTP/1.1 403 "), Not(HasSubstr("ready"))));
  EXPECT_THAT(ask("nonsense\r\n\r\n"), "");
}

TEST_F(HttpsServerTest, TheRightTokenMayReadAndNoOther) {
  EXPECT_THAT(ask_tls(with_token(kToken)), StartsWith("HTTP/1.1 200 "));
  EXPECT_EQ(last_principal_, "token:" + SharedKey(kToken).id);
  const std::string token = kToken;
  const std::string longer = token + "s";
  const std::string shorter = token.substr(0, token.size() - 1);
  for (const std::string& wrong : {std::string(), shorter, longer}) {
    EXPECT_THAT(ask_tls(with_token(wrong)), StartsWith("HTTP/1.1 401 ")) << wrong;
  }
  EXPECT_THAT(ask_tls("GET /ready/i HTTP/1.1\r\nHost: x\r\nAuthorization: Basic " + token +
                      "\r\nConnection: close\r\n\r\n"),
              StartsWith("HTTP/1.1 401 "));
}

TEST_F(HttpsServerTest, EverybodyMayAskWhetherTheProcessAnswers) {
  EXPECT_THAT(ask(get("/healthz")), AllOf(StartsWith("HTTP/1.1 200 "), HasSubstr("ok\n")));
  EXPECT_THAT(ask_tls(get("/healthz")), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(ask(get("/healthz/../ready/i")), StartsWith("HTTP/1.1 403 "));
}

TEST_F(HttpsServerTest, AHandshakeThatDripsIsClosedAndKeepsNobodyOut) {
  std::vector<tcp::socket> slow;
  for (int i = 0; i < 4; ++i) {
    slow.push_back(connect());
    // The head of a record that never comes.
    boost::asio::write(slow.back(), boost::asio::buffer("\x16\x03\x01\x02\x00", 5));
  }
  for (auto& socket : slow) EXPECT_EQ(read_all(socket), "");
  std::string answer;
  for (int i = 0; i < 1000 && !answer.starts_with("HTTP"); ++i)
    answer = ask_tls(with_token(kToken));
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpsServerTest, RenewedCertificatesAndTokensAreUsedWithoutARestart) {
  // It replaces the files of the first authority and of the server.
  testing::TestAuthority next(files_, "fleet");
  const auto reader = next.issue("reader", {.names = kReader});
  (void)next.issue("server");
  std::string answer;
  const auto deadline = steady_now() + 20s;
  while (!answer.starts_with("HTTP/1.1 200 ") && steady_now() < deadline) {
    answer = ask_tls(get("/ready/i"), reader);
  }
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 "));
  files_.write("tokens", "the next token of a scraper");
  while (!answer.starts_with("HTTP/1.1 401 ") && steady_now() < deadline) {
    answer = ask_tls(with_token(kToken));
  }
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 401 "));
  EXPECT_THAT(ask_tls(with_token("the next token of a scraper")), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpsServerTest, AnOpenConnectionEndsWhenItsCertificateIsRevoked) {
  auto options = authority_.issue("server");
  const auto reader = authority_.issue("reader", {.names = kReader});
  options.revocation_file = authority_.revoke_last(false);
  HttpOptions https{.max_connections = 4, .request_deadline = 20s};
  https.access.is_open = false;
  https.access.credentials = Credentials::open(options).value();
  restart(std::move(https));
  boost::asio::ssl::context tls(boost::asio::ssl::context::tls_client);
  tls.use_certificate_chain_file(reader.certificate_file);
  tls.use_private_key_file(reader.key_file, boost::asio::ssl::context::pem);
  auto socket = connect();
  boost::asio::ssl::stream<tcp::socket&> stream(socket, tls);
  stream.handshake(boost::asio::ssl::stream_base::client);
  const auto ask_again = [&] {
    boost::system::error_code error;
    std::string text;
    boost::asio::write(stream, boost::asio::buffer("GET /ready/i HTTP/1.1\r\nHost: x\r\n\r\n"sv),
                       error);
    if (!error) {
      boost::asio::read_until(stream, boost::asio::dynamic_buffer(text), "true}\n", error);
    }
    return text;
  };
  EXPECT_THAT(ask_again(), StartsWith("HTTP/1.1 200 "));
  authority_.revoke_last();
  const auto deadline = steady_now() + 20s;
  while (!ask_again().empty()) ASSERT_LT(steady_now(), deadline) << "it may still read";
}

TEST_F(HttpServerTest, AConnectionEndsWithItsLife) {
  HttpOptions options;
  options.connection_life = 0ms;
  restart(std::move(options));
  auto socket = connect();
  const std::string first = "GET /ready/i HTTP/1.1\r\nHost: x\r\n\r\n";
  boost::asio::write(socket, boost::asio::buffer(first + first));
  const std::string answers = read_all(socket);
  EXPECT_THAT(answers, StartsWith("HTTP/1.1 200 "));
  EXPECT_EQ(answers.find("HTTP/1.1", 1), std::string::npos) << answers;
}

TEST(HttpAccess, AnAddressThatOthersReachNeedsACertificateOrTheWordThatItDoesNot) {
  const testing::TestDirectory files;
  testing::TestAuthority authority(files, "fleet");
  EXPECT_TRUE(http_access("--http", "127.0.0.1:0", {})->is_open);
  const auto refused = http_access("--http", "0.0.0.0:7303", {});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(refused.error().message(), AllOf(HasSubstr("--tls-cert"), HasSubstr("--http-open")));
  EXPECT_FALSE(http_access("--http", "0.0.0.0:7303",
                           {Credentials::of_secret("a secret of 16 bytes"), nullptr, false}))
      << "a browser has no secret";
  const auto credentials = Credentials::open(authority.issue("server")).value();
  EXPECT_FALSE(http_access("--http", "0.0.0.0:7303", {credentials, nullptr, false})->is_open);
  EXPECT_TRUE(http_access("--http", "0.0.0.0:7303", {credentials, nullptr, true})->is_open);
}

}  // namespace
}  // namespace rekindle::rpc
