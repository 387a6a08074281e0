#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <gtest/gtest.h>

#include "proto/agent.pb.h"
#include "proto/coordinator.pb.h"
#include "proto/local.pb.h"
#include "recovery/rpc/methods.h"
#include "recovery/rpc/rpc.h"
#include "tests/recovery/rpc_fixture.h"

namespace rekindle::rpc {
namespace {

using namespace testing;

// A server and one client on loopback.
class RpcCall : public ::testing::Test {
 protected:
  ~RpcCall() override {
    clients_.clear();
    if (server_) loop_.run(server_->close(5s));
  }
  void serve(ServerLimits limits = {}) {
    server_ = RpcServer::create(loop_.executor(), identity_, limits);
    if (before_listen_) before_listen_(*server_);
    auto address = server_->listen("127.0.0.1:0");
    ASSERT_TRUE(address) << address.error().message();
    address_ = *address;
  }
  void handle(proto::Method method, Handler handler, bool local_only = false) {
    before_listen_ = [=, before = before_listen_](RpcServer& server) {
      if (before) before(server);
      server.handle(method, handler, local_only);
    };
  }
  std::shared_ptr<RpcClient> connect() {
    auto client =
        loop_.run(RpcClient::connect(address_, make_identity(proto::ROLE_AGENT, "tester"), 5s));
    EXPECT_TRUE(client) << client.error().message();
    clients_.push_back(*client);
    return *client;
  }
  Result<std::string> call(const std::shared_ptr<RpcClient>& client, proto::Method method,
                           std::string body = "", std::chrono::milliseconds deadline = 5s) {
    return loop_.run(client->call_raw(method, std::move(body), deadline));
  }

  Loop loop_;
  Identity identity_ = make_identity(proto::ROLE_AGENT, "server");
  std::function<void(RpcServer&)> before_listen_;
  std::unique_ptr<RpcServer> server_;
  std::string address_;
  std::vector<std::shared_ptr<RpcClient>> clients_;
};

async::Task<Result<std::string>> echo(const Peer&, std::string body, std::shared_ptr<EventSink>) {
  co_return body;
}

TEST_F(RpcCall, AnswersCarryTheBody) {
  handle(proto::AGENT_STATUS, echo);
  handle(proto::COORDINATOR_ANNOUNCE, echo);
  serve();
  const auto client = connect();
  EXPECT_EQ(client->peer().node_id, "server");
  EXPECT_EQ(client->peer().incarnation, identity_.incarnation);
  const std::string large(3u << 20, 'b');
  EXPECT_EQ(*call(client, proto::AGENT_STATUS, "hello"), "hello");
  EXPECT_EQ(*call(client, proto::COORDINATOR_ANNOUNCE, large), large);
  EXPECT_EQ(*call(client, proto::AGENT_STATUS, ""), "");
}

TEST_F(RpcCall, CallsOnOneConnectionOverlap) {
  // The first answers only after the second has come.
  bool second = false;
  handle(proto::AGENT_STATUS,
         [&](const Peer&, std::string body,
             std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> {
           if (body == "second") second = true;
           while (!second) co_await sleep_for(1ms);
           co_return body;
         });
  serve();
  const auto client = connect();
  std::vector<std::string> order;
  for (const std::string name : {"first", "second"}) {
    boost::asio::co_spawn(
        loop_.executor(), client->call_raw(proto::AGENT_STATUS, name, 5s),
        [&](std::exception_ptr, Result<std::string> result) { order.push_back(result.value()); });
  }
  loop_.run_until([&] { return order.size() == 2; });
  EXPECT_EQ(order.size(), 2u);
}

TEST_F(RpcCall, AHandlersErrorKeepsItsCodeAndText) {
  handle(
      proto::AGENT_STATUS,
      [](const Peer&, std::string, std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> {
        co_return fail(ErrorCode::kStale, "look it up again");
      });
  serve();
  const auto result = call(connect(), proto::AGENT_STATUS);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code(), ErrorCode::kStale);
  EXPECT_EQ(result.error().message(), "look it up again");
}

TEST_F(RpcCall, AHandlersExceptionIsAnInternalErrorAndTheServerLives) {
  handle(proto::AGENT_STATUS,
         [](const Peer&, std::string body,
            std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> {
           if (body == "throw") throw std::runtime_error("a bug");
           co_return body;
         });
  // Thrown before the coroutine exists.
  handle(
      proto::AGENT_GET_PAGE,
      [](const Peer&, std::string, std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> {
        throw std::logic_error("x");
      });
  serve();
  const auto client = connect();
  EXPECT_EQ(call(client, proto::AGENT_STATUS, "throw").error().code(), ErrorCode::kInternal);
  EXPECT_EQ(call(client, proto::AGENT_GET_PAGE).error().code(), ErrorCode::kInternal);
  EXPECT_EQ(*call(client, proto::AGENT_STATUS, "fine"), "fine");
}

TEST_F(RpcCall, AHandlerWithoutACoroutineAnswersInOrderAndItsFailuresAreItsCallers) {
  before_listen_ = [](RpcServer& server) {
    server.handle_at_once(proto::AGENT_STATUS,
                          [](const Peer& peer, const std::string& body) -> Result<std::string> {
                            if (body == "throw") throw std::runtime_error("out of paper");
                            if (body == "fail") return fail(ErrorCode::kStale, "too late");
                            return peer.node_id + " says " + body;
                          });
  };
  serve();
  const auto client = connect();
  EXPECT_EQ(*call(client, proto::AGENT_STATUS, "hello"), "tester says hello");
  EXPECT_EQ(call(client, proto::AGENT_STATUS, "fail").error().code(), ErrorCode::kStale);
  const auto thrown = call(client, proto::AGENT_STATUS, "throw");
  ASSERT_FALSE(thrown);
  EXPECT_EQ(thrown.error().code(), ErrorCode::kInternal);
  EXPECT_NE(thrown.error().message().find("out of paper"), std::string::npos);
  EXPECT_EQ(*call(client, proto::AGENT_STATUS, "again"), "tester says again");
}

TEST_F(RpcCall, UnknownMethodsAndLocalOnesOverTcpAreRefused) {
  handle(proto::LOCAL_RETIRE, echo, /*local_only=*/true);
  serve();
  const auto client = connect();
  EXPECT_EQ(call(client, proto::AGENT_STATUS).error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(call(client, proto::LOCAL_RETIRE).error().code(), ErrorCode::kDenied);
  EXPECT_TRUE(client->connected());
}

TEST_F(RpcCall, AHandlerIsCancelledAtTheDeadlineAndTheCallerTimesOut) {
  bool cancelled = false;
  handle(proto::AGENT_STATUS,
         [&](const Peer&, std::string,
             std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> {
           try {
             co_await sleep_for(1h);
           } catch (const boost::system::system_error&) {
             cancelled = true;
           }
           co_return "late";
         });
  serve();
  const auto client = connect();
  const auto result = call(client, proto::AGENT_STATUS, "", 50ms);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code(), ErrorCode::kTimeout);
  loop_.run_until([&] { return cancelled; });
  EXPECT_TRUE(client->connected()) << "one slow call does not cost the connection";
}

TEST_F(RpcCall, TheServerEndsACallAtItsDeadlineWithoutHearingFromTheCaller) {
  // A caller that never sends Cancel: a raw frame with a deadline of its own.
  handle(proto::AGENT_STATUS,
         [&](const Peer&, std::string,
             std::shared_ptr<EventSink> events) -> async::Task<Result<std::string>> {
           // Deaf to cancellation for a while: the answer must not wait for it.
           co_await boost::asio::this_coro::throw_if_cancelled(false);
           while (!events->cancelled()) {
             boost::asio::steady_timer timer(co_await boost::asio::this_coro::executor, 5ms);
             co_await timer.async_wait(boost::asio::as_tuple(boost::asio::use_awaitable));
           }
           co_return "late";
         });
  serve();
  const auto client = connect();
  const auto result = call(client, proto::AGENT_STATUS, "", 100ms);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code(), ErrorCode::kTimeout);
}

TEST_F(RpcCall, EventsComeBeforeTheAnswerAndInOrder) {
  handle(proto::LOCAL_PULL,
         [](const Peer&, std::string,
            std::shared_ptr<EventSink> events) -> async::Task<Result<std::string>> {
           for (std::uint64_t i = 1; i <= 100; ++i) {
             proto::TransferProgress progress;
             progress.set_bytes_done(i);
             events->send(progress);
             if (i % 10 == 0) co_await sleep_for(0ms);
           }
           co_return "done";
         });
  serve();
  const auto client = connect();
  std::vector<std::uint64_t> seen;
  const auto result =
      loop_.run(client->call_raw(proto::LOCAL_PULL, "", 5s, [&](const std::string& body) {
        seen.push_back(parse_body<proto::TransferProgress>(body)->bytes_done());
      }));
  EXPECT_EQ(*result, "done");
  ASSERT_EQ(seen.size(), 100u);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
}

TEST_F(RpcCall, AnAnswerTooLargeForAFrameIsAnErrorOfThatCallOnly) {
  handle(proto::AGENT_STATUS,
         [](const Peer&, std::string body,
            std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> {
           co_return body == "big" ? std::string(kMaxFrameBytes, 'x') : body;
         });
  serve();
  const auto client = connect();
  EXPECT_EQ(call(client, proto::AGENT_STATUS, "big").error().code(), ErrorCode::kInternal);
  EXPECT_EQ(*call(client, proto::AGENT_STATUS, "small"), "small");
}

TEST_F(RpcCall, ARequestTooLargeForAFrameNeverLeaves) {
  handle(proto::AGENT_STATUS, echo);
  serve();
  const auto client = connect();
  EXPECT_EQ(call(client, proto::AGENT_STATUS, std::string(kMaxFrameBytes, 'x')).error().code(),
            ErrorCode::kInvalid);
  EXPECT_TRUE(client->connected());
}

TEST_F(RpcCall, CallsBeyondTheLimitOfAConnectionAreRefused) {
  handle(
      proto::AGENT_STATUS,
      [](const Peer&, std::string, std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> {
        co_await sleep_for(1h);
        co_return "";
      });
  serve({.max_calls_per_connection = 2});
  const auto client = connect();
  int open = 2;
  for (int i = 0; i < 2; ++i) {
    boost::asio::co_spawn(loop_.executor(), client->call_raw(proto::AGENT_STATUS, "", 1h),
                          [&](std::exception_ptr, Result<std::string> result) {
                            EXPECT_EQ(result.error().code(), ErrorCode::kPeerLost);
                            --open;
                          });
  }
  EXPECT_EQ(call(client, proto::AGENT_STATUS).error().code(), ErrorCode::kExhausted);
  client->close();  // every open call ends
  loop_.run_until([&] { return open == 0; });
}

TEST_F(RpcCall, ACallerThatLeavesCancelsItsHandlers) {
  bool cancelled = false;
  handle(proto::AGENT_STATUS,
         [&](const Peer&, std::string,
             std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> {
           try {
             co_await sleep_for(1h);
           } catch (const boost::system::system_error&) {
             cancelled = true;
           }
           co_return "";
         });
  std::string left;
  before_listen_ = [&, before = before_listen_](RpcServer& server) {
    before(server);
    server.on_peer_closed([&](const Peer& peer) { left = peer.node_id; });
  };
  serve();
  auto client = connect();
  clients_.clear();
  bool ended = false;
  boost::asio::co_spawn(loop_.executor(), client->call_raw(proto::AGENT_STATUS, "", 1h),
                        [&](std::exception_ptr, Result<std::string>) { ended = true; });
  loop_.run_until([&, end = std::chrono::steady_clock::now() + 50ms] {
    return std::chrono::steady_clock::now() > end;
  });
  EXPECT_FALSE(cancelled);
  client.reset();
  loop_.run_until([&] { return cancelled && ended && server_->connection_count() == 0; });
  EXPECT_EQ(left, "tester");
}

TEST_F(RpcCall, WhenTheServerGoesEveryOpenCallEndsWithPeerLost) {
  handle(
      proto::AGENT_STATUS,
      [](const Peer&, std::string, std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> {
        co_await sleep_for(1h);
        co_return "";
      });
  serve();
  const auto client = connect();
  std::optional<Result<std::string>> result;
  boost::asio::co_spawn(
      loop_.executor(), client->call_raw(proto::AGENT_STATUS, "", 1h),
      [&](std::exception_ptr, Result<std::string> value) { result = std::move(value); });
  loop_.run_until([&] { return server_->connection_count() == 1; });
  loop_.run(server_->close(5s));
  loop_.run_until([&] { return result.has_value(); });
  EXPECT_EQ(result->error().code(), ErrorCode::kPeerLost);
  EXPECT_FALSE(client->connected());
  EXPECT_EQ(call(client, proto::AGENT_STATUS).error().code(), ErrorCode::kPeerLost);
  server_.reset();
}

TEST_F(RpcCall, TypedHandlersAnswerTypedCalls) {
  const auto enroll = [](Peer peer, proto::RegisterRequest request,
                         Events) -> async::Task<Result<proto::RegisterResponse>> {
    proto::RegisterResponse response;
    response.set_epoch(request.highest_epoch() + (peer.node_id == "tester" ? 1 : 100));
    co_return response;
  };
  before_listen_ = [enroll](RpcServer& server) {
    rpc::handle<proto::COORDINATOR_REGISTER>(server, enroll);
  };
  handle(
      proto::COORDINATOR_STATUS,
      [](const Peer&, std::string, std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> {
        co_return "\xff\xff garbage";
      });
  serve();
  const auto client = connect();
  proto::RegisterRequest request;
  request.set_highest_epoch(41);
  EXPECT_EQ(loop_.run(rpc::call<proto::COORDINATOR_REGISTER>(client, request, 5s))->epoch(), 42u);
  const auto garbled = loop_.run(client->call_raw(proto::COORDINATOR_REGISTER, "\xff\xff", 5s));
  EXPECT_EQ(garbled.error().code(), ErrorCode::kInvalid);
  const auto status = loop_.run(rpc::call<proto::COORDINATOR_STATUS>(client, {}, 5s));
  EXPECT_EQ(status.error().code(), ErrorCode::kInvalid);
}

}  // namespace
}  // namespace rekindle::rpc
