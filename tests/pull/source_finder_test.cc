#include "recovery/pull/source_finder.h"

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "proto/coordinator.pb.h"
#include "recovery/pull/pull_environment.h"
#include "tests/recovery/rpc_fixture.h"

// What a pull tells the coordinator at its end.
namespace rekindle::pull {
namespace {

using namespace std::chrono_literals;

// A connection to a coordinator that answers after a while.
class SlowClient final : public rpc::RpcClient {
 public:
  const rpc::Peer& peer() const override { return peer_; }
  bool connected() const override { return true; }
  async::Task<Result<std::string>> call_raw(proto::Method method, std::string body,
                                            std::chrono::milliseconds,
                                            std::function<void(std::string body)>,
                                            trace::Context) override {
    EXPECT_EQ(method, proto::COORDINATOR_CLOSE_PULL);
    co_await rpc::testing::sleep_for(50ms);
    proto::ClosePullRequest request;
    EXPECT_TRUE(request.ParseFromString(body));
    spans_ += request.spans_size();
    co_return std::string();
  }
  void close() override {}
  int spans() const { return spans_; }

 private:
  rpc::Peer peer_;
  int spans_ = 0;
};

// A command may end as soon as its pull has ended, and then sends nothing more.
TEST(SourceFinder, HasLeftTheSpansOfAPullFromNamedAgentsWhenItIsClosed) {
  rpc::testing::Loop loop;
  const auto client = std::make_shared<SlowClient>();
  PullEnvironment environment;
  environment.executor = loop.executor();
  environment.coordinator = [client] { return client; };
  SourceFinder finder(environment, ModelRef{"m", 1}, {"127.0.0.1:7400"}, "");
  finder.leave(std::vector<proto::Span>(3));
  const Result<void> outcome;
  loop.run(finder.close(outcome));
  EXPECT_EQ(client->spans(), 3);
}

}  // namespace
}  // namespace rekindle::pull
