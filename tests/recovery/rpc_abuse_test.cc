#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/rpc/convert.h"
#include "tests/recovery/rpc_raw.h"

// Peers that are slow, broken or hostile: each is shut out, the others are served.
namespace rekindle::rpc {
namespace {

using namespace testing;
using ::testing::HasSubstr;

class RpcAbuse : public ::testing::Test {
 protected:
  void serve(ServerLimits limits = {}) {
    server_.emplace(make_identity(proto::ROLE_AGENT, "server"), limits, [](RpcServer& server) {
      server.handle(
          proto::AGENT_STATUS,
          [](const Peer&, std::string body,
             std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> { co_return body; });
      server.handle(proto::AGENT_GET_PAGE,
                    [](const Peer&, std::string,
                       std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> {
                      co_return std::string(8u << 20, 'p');
                    });
    });
  }
  Result<std::shared_ptr<RpcClient>> connect() {
    return loop_.run(
        RpcClient::connect(server_->address(), make_identity(proto::ROLE_PULLER, "good"), 10s));
  }
  void expect_served() {
    const auto client = connect();
    ASSERT_TRUE(client) << client.error().message();
    EXPECT_EQ(*loop_.run((*client)->call_raw(proto::AGENT_STATUS, "hello", 10s)), "hello");
  }

  Loop loop_;
  std::optional<ServerThread> server_;
};

TEST_F(RpcAbuse, AThousandIdleSocketsKeepNobodyOutAndAreClosed) {
  allow_many_descriptors();
  serve({.max_connections = 1100});
  std::vector<std::unique_ptr<RawPeer>> idle;
  for (int i = 0; i < 1000; ++i) {
    idle.push_back(std::make_unique<RawPeer>(server_->address()));
    ASSERT_TRUE(idle.back()->connected()) << i;
    if (i % 2 == 0) {
      ASSERT_TRUE(idle.back()->send(std::string_view("\0\0", 2)));
    }
  }
  expect_served();
  for (auto& peer : idle) ASSERT_TRUE(peer->closed_by_peer());
  expect_served();
}

TEST_F(RpcAbuse, IdleSocketsBeyondTheCapMakeRoomForTheNext) {
  serve({.max_connections = 8});
  std::vector<std::unique_ptr<RawPeer>> idle;
  for (int i = 0; i < 20; ++i) idle.push_back(std::make_unique<RawPeer>(server_->address()));
  expect_served();
  EXPECT_TRUE(idle.front()->closed_by_peer()) << "the oldest went first";
  EXPECT_LE(server_->connections(), 8u);
}

TEST_F(RpcAbuse, OverTheCapTheNextIsToldAndTheOthersKeepTheirs) {
  serve({.max_connections = 2});
  const auto first = connect();
  const auto second = connect();
  ASSERT_TRUE(first && second);
  const auto third = connect();
  ASSERT_FALSE(third);
  EXPECT_EQ(third.error().code(), ErrorCode::kExhausted) << third.error().message();
  EXPECT_THAT(third.error().message(), HasSubstr("2 connections"));
  EXPECT_TRUE(loop_.run((*first)->call_raw(proto::AGENT_STATUS, "", 10s)));
}

TEST_F(RpcAbuse, AFrameThatDoesNotEndIsCutOff) {
  serve();
  RawPeer slow(server_->address());
  ASSERT_TRUE(slow.greet());
  const std::string bytes = *encode_frame(request(1, proto::AGENT_STATUS, 1000, "body"));
  ASSERT_TRUE(slow.send(bytes.substr(0, bytes.size() - 1)));
  expect_served();
  EXPECT_TRUE(slow.closed_by_peer());
}

TEST_F(RpcAbuse, AnOversizeFrameIsATypedRefusal) {
  serve();
  RawPeer peer(server_->address());
  ASSERT_TRUE(peer.greet());
  ASSERT_TRUE(peer.send(std::string_view("\xff\xff\xff\xff", 4)));
  const auto refusal = peer.read();
  ASSERT_TRUE(refusal && refusal->has_proof());
  EXPECT_EQ(refusal->proof().refusal().code(), proto::STATUS_INVALID);
  EXPECT_THAT(refusal->proof().refusal().message(), HasSubstr("4294967295"));
  EXPECT_TRUE(peer.closed_by_peer());
  expect_served();
}

TEST_F(RpcAbuse, BeforeItsHelloAPeerMaySendLittle) {
  serve();
  RawPeer peer(server_->address());
  proto::Frame frame;
  *frame.mutable_hello() = make_hello(make_identity(proto::ROLE_PULLER, "big"), "", {});
  frame.mutable_hello()->set_software(std::string(kMaxHelloFrameBytes, 's'));
  (void)peer.send(frame);
  const auto refusal = peer.read();
  ASSERT_TRUE(refusal && refusal->has_proof());
  EXPECT_EQ(refusal->proof().refusal().code(), proto::STATUS_INVALID);
}

TEST_F(RpcAbuse, GarbageIsRefusedWhateverItIs) {
  serve();
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int i = 0; i < 200; ++i) {
    RawPeer peer(server_->address());
    if (i % 2 == 0) {
      ASSERT_TRUE(peer.greet());
    }
    std::string bytes(1 + random() % 200, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    if (i % 4 >= 2) {  // a frame of the right length with nonsense inside
      std::string framed("\0\0\0", 3);
      framed += static_cast<char>(bytes.size());
      bytes = framed + bytes;
    }
    (void)peer.send(bytes);
    ::shutdown(peer.fd(), SHUT_WR);
    ASSERT_TRUE(peer.closed_by_peer());
  }
  expect_served();
}

TEST_F(RpcAbuse, ARequestBeforeTheHelloIsRefused) {
  serve();
  RawPeer peer(server_->address());
  ASSERT_TRUE(peer.send(request(1, proto::AGENT_STATUS, 1000)));
  const auto refusal = peer.read();
  ASSERT_TRUE(refusal && refusal->has_proof());
  EXPECT_EQ(refusal->proof().refusal().code(), proto::STATUS_INVALID);
}

TEST_F(RpcAbuse, AnotherProtocolVersionIsRefusedInWords) {
  serve();
  RawPeer peer(server_->address());
  proto::Frame frame;
  *frame.mutable_hello() = make_hello(make_identity(proto::ROLE_AGENT, "future"), "", {});
  frame.mutable_hello()->set_protocol_min(90);
  frame.mutable_hello()->set_protocol_max(99);
  ASSERT_TRUE(peer.send(frame));
  const auto refusal = peer.read();
  ASSERT_TRUE(refusal && refusal->has_proof());
  EXPECT_THAT(refusal->proof().refusal().message(), HasSubstr("upgrade agent server"));
}

TEST_F(RpcAbuse, ASecondHelloACallIdInUseAndAStrayResponseEndTheConnection) {
  serve();
  RawPeer twice(server_->address());
  ASSERT_TRUE(twice.greet());
  EXPECT_FALSE(twice.greet());
  RawPeer stray(server_->address());
  ASSERT_TRUE(stray.greet());
  proto::Frame response;
  response.mutable_response()->set_call_id(1);
  ASSERT_TRUE(stray.send(response));
  EXPECT_TRUE(stray.closed_by_peer());
  RawPeer reuse(server_->address());
  ASSERT_TRUE(reuse.greet());
  const std::string two = *encode_frame(request(1, proto::AGENT_GET_PAGE, 1000)) +
                          *encode_frame(request(1, proto::AGENT_GET_PAGE, 1000));
  ASSERT_TRUE(reuse.send(two));
  EXPECT_TRUE(reuse.closed_by_peer());
  expect_served();
}

TEST_F(RpcAbuse, ACallWithoutADeadlineIsRefused) {
  serve();
  RawPeer peer(server_->address());
  ASSERT_TRUE(peer.greet());
  ASSERT_TRUE(peer.send(request(1, proto::AGENT_STATUS, 0)));
  const auto answer = peer.read();
  ASSERT_TRUE(answer && answer->has_response());
  EXPECT_EQ(answer->response().status().code(), proto::STATUS_INVALID);
}

TEST_F(RpcAbuse, APeerThatDoesNotReadItsAnswersIsClosed) {
  serve();
  RawPeer deaf(server_->address());
  ASSERT_TRUE(deaf.greet());
  for (std::uint64_t id = 1; id <= 16; ++id) {
    ASSERT_TRUE(deaf.send(request(id, proto::AGENT_GET_PAGE, 60000)));
  }
  expect_served();
  const auto deadline = std::chrono::steady_clock::now() + kTestDeadline;
  while (server_->connections() > 0) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::sleep_for(50ms);
  }
}

TEST_F(RpcAbuse, Row55AnIdleConnectionIsClosedAfterTheIdleTimeoutButNotDuringACall) {
  server_.emplace(make_identity(proto::ROLE_AGENT, "server"), ServerLimits{.idle_timeout = 200ms},
                  [](RpcServer& server) {
                    server.handle(
                        proto::AGENT_STATUS,
                        [](const Peer&, std::string body,
                           std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> {
                          co_await sleep_for(1s);
                          co_return body;
                        });
                  });
  const auto client = connect();
  ASSERT_TRUE(client);
  EXPECT_TRUE(loop_.run((*client)->call_raw(proto::AGENT_STATUS, "", 10s)));
  loop_.run_until([&] { return !(*client)->connected(); });
  expect_served();
}

}  // namespace
}  // namespace rekindle::rpc
