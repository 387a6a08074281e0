#include <fstream>

#include <gmock/gmock.h>

#include "proto/rights.pb.h"
#include "tests/recovery/coordinator_daemon_fixture.h"

// Attacks on a coordinator that has a rights file. Its peers on loopback have proven nothing, so
// their principal is `unproven`.
namespace rekindle::coordinator::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class CoordinatorRights : public CoordinatorDaemon {
 protected:
  void start_with(const std::string& lines) {
    const auto file = temp_ / "rights.json";
    std::ofstream(file) << R"({"rights": [)" << lines << "]}";
    start({"--rights", file.string()});
  }
  Agent command(const std::string& name) {
    Agent command{make_identity(proto::ROLE_CLIENT, name), {}};
    EXPECT_TRUE(connect(command));
    return command;
  }
  Result<proto::RetireResponse> retire(const Agent& by, const ModelVersion& id) {
    proto::RetireRequest request;
    *request.mutable_id() = rpc::to_proto(id);
    return loop_.run(rpc::call<proto::COORDINATOR_RETIRE>(by.client, std::move(request), 5s));
  }
  proto::ClusterStatusResponse status(const Agent& by) {
    auto answer = loop_.run(rpc::call<proto::COORDINATOR_STATUS>(by.client, {}, 5s));
    EXPECT_TRUE(answer) << answer.error().message();
    return answer ? *std::move(answer) : proto::ClusterStatusResponse();
  }
};

TEST_F(CoordinatorRights, AClientWithoutTheRightRetiresNothing) {
  start_with(R"({"principals": ["unproven"], "verbs": ["publish", "read"], "models": ["qwen*"]})");
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(publish(a, kId, kRoot));
  const Agent stranger = command("stranger");
  const auto retired = retire(stranger, kId);
  ASSERT_FALSE(retired);
  EXPECT_EQ(retired.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(
      retired.error().message(),
      AllOf(HasSubstr("rights.json"), HasSubstr("`retire` on qwen3"), HasSubstr("unproven")));
  EXPECT_EQ(retire(a, kId).error().code(), ErrorCode::kDenied) << "nor does a member";
  proto::DrainRequest drain;
  drain.set_node_id("a");
  EXPECT_EQ(
      loop_.run(rpc::call<proto::COORDINATOR_DRAIN>(stranger.client, drain, 5s)).error().code(),
      ErrorCode::kDenied);
  const auto after = status(stranger);
  ASSERT_EQ(after.versions_size(), 1);
  EXPECT_NE(after.versions(0).state(), "retiring");
  EXPECT_FALSE(after.nodes(0).drained());
}

TEST_F(CoordinatorRights, APublisherPublishesItsModelsOnly) {
  start_with(R"({"principals": ["unproven"], "verbs": ["publish"], "models": ["qwen*"]})");
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  EXPECT_TRUE(publish(a, kId, kRoot));
  EXPECT_EQ(publish(a, {"llama", 1}, kRoot).error().code(), ErrorCode::kDenied);
}

TEST_F(CoordinatorRights, ModelsThatACallerMayNotReadAreNeitherShownNorResolvedNorPulled) {
  start_with(R"({"principals": ["unproven"], "verbs": ["publish"]},
                {"principals": ["unproven"], "verbs": ["read"], "models": ["open"]})");
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  for (const std::string model : {"open", "secret"}) {
    ASSERT_TRUE(publish(a, {model, 1}, kRoot));
    ASSERT_TRUE(announce(a, {model, 1}, kRoot));
  }
  const auto seen = status(a);
  ASSERT_EQ(seen.versions_size(), 1);
  EXPECT_EQ(seen.versions(0).id().model(), "open");
  EXPECT_EQ(seen.DebugString().find("secret"), std::string::npos);
  proto::ResolveRequest resolve;
  resolve.set_model("secret");
  EXPECT_EQ(loop_.run(rpc::call<proto::COORDINATOR_RESOLVE>(a.client, resolve, 5s)).error().code(),
            ErrorCode::kDenied);
  Agent puller{make_identity(proto::ROLE_PULLER, "p"), {}};
  ASSERT_TRUE(connect(puller));
  EXPECT_EQ(open(puller, "secret").error().code(), ErrorCode::kDenied);
  const auto opened = open(puller, "open");
  ASSERT_TRUE(opened) << opened.error().message();
  EXPECT_EQ(opened->sources_size(), 1);
}

TEST_F(CoordinatorRights, EverybodyMayAskAboutItselfAndOnlyAnAdministratorAboutOthers) {
  start_with(R"({"principals": ["unproven"], "verbs": ["read"]},
                {"principals": ["uid:0"], "verbs": ["admin"]})");
  const Agent stranger = command("stranger");
  const auto whoami = loop_.run(rpc::call<proto::WHOAMI>(stranger.client, {}, 5s));
  ASSERT_TRUE(whoami) << whoami.error().message();
  EXPECT_EQ(whoami->role(), "client");
  EXPECT_EQ(whoami->proof(), "none");
  ASSERT_EQ(whoami->rights_size(), 1);
  EXPECT_EQ(whoami->rights(0).verbs(0), "read");
  const auto ask = [&](const Agent& by, const std::string& who, const std::string& verb) {
    proto::AuthorizeRequest request;
    request.add_principals(who);
    request.set_verb(verb);
    return loop_.run(rpc::call<proto::AUTHORIZE>(by.client, request, 5s));
  };
  EXPECT_TRUE(ask(stranger, "unproven", "read")->allowed());
  EXPECT_FALSE(ask(stranger, "unproven", "retire")->allowed());
  EXPECT_EQ(ask(stranger, "uid:0", "admin").error().code(), ErrorCode::kDenied);
  EXPECT_EQ(ask(stranger, "unproven", "destroy").error().code(), ErrorCode::kInvalid);
  // An agent asks about those that open a direct pull there.
  EXPECT_TRUE(ask(agent("a"), "uid:0", "admin")->allowed());
}

}  // namespace
}  // namespace rekindle::coordinator::testing
