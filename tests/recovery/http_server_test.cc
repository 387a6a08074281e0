#include "recovery/rpc/http_server.h"

#include <atomic>
#include <thread>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/connect.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <gtest/gtest.h>

namespace rekindle::rpc {
namespace {

using namespace std::chrono_literals;
using boost::asio::ip::tcp;

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

}  // namespace
}  // namespace rekindle::rpc
