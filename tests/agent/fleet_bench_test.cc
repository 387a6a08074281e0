// What an agent lends to the readers of a benchmark, and to how many.
#include "recovery/agent/fleet_bench.h"

#include <atomic>
#include <fstream>
#include <iterator>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/agent/grant_clock.h"
#include "recovery/agent/served_versions.h"
#include "tests/recovery/rpc_fixture.h"

namespace rekindle::agent {
namespace {

using ::testing::HasSubstr;

class DumbServer final : public transport::Server {
 public:
  std::string_view transport() const override { return "tcp"; }
  std::string endpoint(std::string_view host) const override { return std::string(host) + ":1"; }
  Result<std::string> accept(const SessionToken&, std::string_view) override { return ""; }
  void drop_session(const SessionToken&) override { dropped = true; }
  std::atomic<bool> dropped = false;
};

class FleetBenchTest : public ::testing::Test {
 protected:
  FleetBenchTest() {
    environment_.executor = loop_.executor();
    environment_.blocking_pool = &blocking_;
    environment_.self.set_node_id("a");
    bench_.emplace(environment_, sessions_, registry_, nullptr);
  }
  static rpc::Peer peer() {
    rpc::Peer peer;
    peer.node_id = "b";
    peer.address = "10.0.0.1:1";
    return peer;
  }
  Result<proto::DrillResponse> open(bool dry_run = false) {
    proto::DrillRequest request;
    request.set_dry_run(dry_run);
    request.mutable_open_bench()->add_transports("tcp");
    return loop_.run(bench_->answer(peer(), std::move(request)));
  }
  static bool has_memory() {
    std::ifstream maps("/proc/self/maps");
    const std::string text(std::istreambuf_iterator<char>(maps), {});
    return text.find("rekindle-bench") != std::string::npos;
  }
  void set_places(std::size_t places) { sessions_.set_limits({0, places}); }

  rpc::testing::Loop loop_;
  const rpc::Identity self_ = rpc::testing::make_identity(proto::ROLE_AGENT, "a");
  transport::SegmentRegistry registry_;
  ServedVersions served_{registry_};
  GrantClock grants_;
  WorkerPool blocking_{"t-blocking", 2, 16};
  DumbServer server_;
  PeerSessions sessions_{loop_.executor(),
                         {self_, served_, grants_, registry_, {&server_}, blocking_},
                         {.limits = {}, .advertised_host = [] { return std::string("host"); }}};
  pull::PullEnvironment environment_;
  std::optional<FleetBench> bench_;
};

TEST_F(FleetBenchTest, ADryRunTakesNoMemoryAndNoPlace) {
  const auto answer = open(true);
  ASSERT_TRUE(answer) << answer.error().message();
  EXPECT_FALSE(answer->has_opened());
  EXPECT_EQ(sessions_.count(), 0u);
  EXPECT_FALSE(has_memory());
}

TEST_F(FleetBenchTest, WithoutAPlaceNothingIsAllocated) {
  set_places(0);
  // An allocation would need it.
  environment_.blocking_pool = nullptr;
  const auto answer = open();
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code(), ErrorCode::kUnavailable);
}

TEST_F(FleetBenchTest, ReadersLeavePlacesToPullers) {
  set_places(8);
  int opened = 0;
  for (int i = 0; i < 8; ++i) opened += open() ? 1 : 0;
  EXPECT_EQ(opened, 4);
  EXPECT_TRUE(has_memory());
  const auto refused = open();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kExhausted);
  EXPECT_THAT(refused.error().message(), HasSubstr("benchmarks"));
  EXPECT_EQ(sessions_.count(), 4u);
}

// Its memory goes with the loop of this test, after the registry.
TEST_F(FleetBenchTest, ASessionThatEndsMayOutliveTheRegistry) {
  ASSERT_TRUE(open());
  bench_.reset();
  sessions_.on_disconnect(peer());
  loop_.run_until([&] { return sessions_.count() == 0; });
  const TimePoint give_up = steady_now() + rpc::testing::kTestDeadline;
  while (!server_.dropped && steady_now() < give_up) std::this_thread::yield();
  EXPECT_TRUE(server_.dropped);
}

}  // namespace
}  // namespace rekindle::agent
