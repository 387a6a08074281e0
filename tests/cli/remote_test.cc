#include "tools/cli/remote.h"

#include <chrono>
#include <string>

#include <gtest/gtest.h>

#include "proto/coordinator.pb.h"
#include "tests/support/hostile_peer.h"
#include "tests/support/process.h"

namespace rekindle::cli {
namespace {

// A command may sleep for minutes between two calls, and a server closes idle connections.
TEST(RemoteTest, ConnectsAgainAfterAConnectionThatWasClosedBetweenTwoCalls) {
  rpc::testing::ServerThread server(
      rpc::make_identity(proto::ROLE_COORDINATOR, "server"),
      rpc::ServerLimits{.idle_timeout = std::chrono::milliseconds(20)}, [](rpc::RpcServer& made) {
        made.handle_at_once(
            proto::COORDINATOR_STATUS,
            [](const rpc::Peer&, const std::string&) -> Result<std::string> { return {}; });
      });
  const auto remote = Remote::create(Settings(), server.address());
  ASSERT_TRUE(remote) << remote.error().message();
  for (int i = 0; i < 3; ++i) {
    const auto answer = (*remote)->call<proto::COORDINATOR_STATUS>({});
    EXPECT_TRUE(answer) << answer.error().message();
    ASSERT_TRUE(rekindle::testing::eventually([&] { return server.connections() == 0; }));
  }
}

}  // namespace
}  // namespace rekindle::cli
