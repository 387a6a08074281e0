#include <fstream>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/coordinator.pb.h"
#include "proto/drill.pb.h"
#include "proto/rights.pb.h"
#include "recovery/rpc/method_rules.h"
#include "recovery/rpc/methods.h"
#include "recovery/rpc/rights.h"
#include "tests/recovery/rpc_fixture.h"

namespace rekindle::rpc {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(MethodRules, EveryMethodOfTheProtocolHasExactlyOne) {
  const auto* const methods = proto::Method_descriptor();
  std::set<proto::Method> seen;
  for (const MethodRule& rule : method_rules()) EXPECT_TRUE(seen.insert(rule.method).second);
  for (int i = 0; i < methods->value_count(); ++i) {
    const auto method = static_cast<proto::Method>(methods->value(i)->number());
    if (method == proto::METHOD_UNKNOWN) continue;
    const MethodRule* const rule = rule_of(method);
    ASSERT_NE(rule, nullptr) << methods->value(i)->name();
    EXPECT_FALSE(rule->allows(proto::ROLE_UNKNOWN)) << methods->value(i)->name();
    seen.erase(method);
  }
  EXPECT_TRUE(seen.empty());
  EXPECT_EQ(rule_of(proto::METHOD_UNKNOWN), nullptr);
}

template <typename Request>
std::string about(const std::string& model, std::uint64_t version) {
  Request request;
  request.mutable_id()->set_model(model);
  request.mutable_id()->set_version(version);
  return request.SerializeAsString();
}

TEST(MethodRules, TheModelOfACallIsFoundForEachMethodWhoseRightConcernsOne) {
  proto::OpenPullRequest pull;
  pull.set_model("m");
  proto::ResolveRequest resolve;
  resolve.set_model("m");
  proto::RankReport rank;
  rank.set_model("m");
  const std::map<proto::Method, std::string> bodies = {
      {proto::COORDINATOR_PUBLISH, about<proto::PublishRequest>("m", 7)},
      {proto::COORDINATOR_RETIRE, about<proto::RetireRequest>("m", 7)},
      {proto::COORDINATOR_REPORT_JOINT, about<proto::JointReport>("m", 7)},
      {proto::COORDINATOR_PULL_PROGRESS, about<proto::PullProgressRequest>("m", 7)},
      {proto::COORDINATOR_BEGIN_UPDATE, about<proto::BeginUpdateRequest>("m", 7)},
      {proto::COORDINATOR_PLAN_UPDATE, about<proto::PlanUpdateRequest>("m", 7)},
      {proto::COORDINATOR_OPEN_PULL, pull.SerializeAsString()},
      {proto::COORDINATOR_REPORT_RANK, rank.SerializeAsString()},
      {proto::COORDINATOR_RESOLVE, resolve.SerializeAsString()}};
  for (const auto& [method, body] : bodies) {
    const auto object = object_of(method, body);
    ASSERT_TRUE(object) << proto::Method_Name(method);
    EXPECT_EQ(object->model, "m") << proto::Method_Name(method);
  }
  EXPECT_EQ(object_of(proto::COORDINATOR_RETIRE, about<proto::RetireRequest>("m", 7))->text, "m@7");
  EXPECT_EQ(object_of(proto::COORDINATOR_RETIRE, "\xff").error().code(), ErrorCode::kInvalid);
  // These verbs concern a model. All others concern none, or all of them.
  for (const MethodRule& rule : method_rules()) {
    const bool of_model =
        rule.verb == Verb::kPublish || rule.verb == Verb::kRetire || rule.verb == Verb::kUpdate;
    if (!of_model) continue;
    EXPECT_TRUE(bodies.contains(rule.method)) << proto::Method_Name(rule.method);
  }
}

Peer peer_with(proto::Role role, const std::string& node, std::vector<std::string> principals) {
  Peer peer;
  peer.role = role;
  peer.node_id = node;
  peer.address = "10.0.0.3:5";
  peer.proof = Proof::kCertificate;
  peer.principals = std::move(principals);
  return peer;
}

TEST(MethodRules, ACertificateOfARoleIsForEachOfItsNodesAndForNoOtherRole) {
  const MethodRule& rule = *rule_of(proto::COORDINATOR_REGISTER);
  const auto agent = [&](const char* uri) {
    return check_role(peer_with(proto::ROLE_AGENT, "gpu-7", {uri}), rule).has_value();
  };
  EXPECT_TRUE(agent("spiffe://example.org/rekindle/agent"));
  EXPECT_FALSE(agent("spiffe://example.org/rekindle/agent/"));
  EXPECT_FALSE(agent("spiffe://example.org/rekindle/client"));
}

TEST(MethodRules, TheCertificateOfOneAgentMakesNobodyElseAnAgent) {
  const MethodRule& rule = *rule_of(proto::COORDINATOR_REGISTER);
  const std::string own = "spiffe://example.org/rekindle/agent/gpu-7";
  EXPECT_TRUE(check_role(peer_with(proto::ROLE_AGENT, "gpu-7", {own, "dns:gpu-7"}), rule));
  const auto other = check_role(peer_with(proto::ROLE_AGENT, "gpu-8", {own}), rule);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(other.error().message(), AllOf(HasSubstr("'gpu-8'"), HasSubstr("'gpu-7'")));
  const auto client = check_role(
      peer_with(proto::ROLE_AGENT, "x", {"spiffe://example.org/rekindle/client/x"}), rule);
  EXPECT_EQ(client.error().code(), ErrorCode::kDenied);
  EXPECT_EQ(check_role(peer_with(proto::ROLE_PULLER, "gpu-7", {own}), rule).error().code(),
            ErrorCode::kDenied)
      << "the method is not for pullers";
  EXPECT_TRUE(
      check_role(peer_with(proto::ROLE_CLIENT, "any", {own}), *rule_of(proto::COORDINATOR_STATUS)))
      << "an agent's host may run commands";
  EXPECT_TRUE(check_role(peer_with(proto::ROLE_AGENT, "any", {"spiffe://other/ns/prod"}), rule))
      << "the rights file decides about certificates of other infrastructures";
}

Result<Rights> parse(const std::string& json) { return Rights::parse(json, "rights.json"); }

TEST(RightsFile, GivesWhatALineAllowsAndNothingElse) {
  const auto rights = parse(R"({"rights": [
    {"principals": ["spiffe://a/rekindle/client/trainer-*"], "verbs": ["publish"], "models": ["qwen3*"]},
    {"principals": ["spiffe://a/rekindle/agent/*"], "verbs": ["read"]},
    {"principals": ["uid:0", "dns:ops"], "verbs": ["drain", "admin"]}]})");
  ASSERT_TRUE(rights) << rights.error().message();
  const auto may = [&](const std::string& who, Verb verb, const std::string& model) {
    return rights->allow(std::span(&who, 1), verb, model).has_value();
  };
  const std::string trainer = "spiffe://a/rekindle/client/trainer-3";
  EXPECT_TRUE(may(trainer, Verb::kPublish, "qwen3-8b"));
  EXPECT_FALSE(may(trainer, Verb::kPublish, "llama"));
  EXPECT_FALSE(may(trainer, Verb::kPublish, "")) << "a line for some models is not for all";
  EXPECT_FALSE(may(trainer, Verb::kRead, "qwen3-8b"));
  EXPECT_FALSE(may("spiffe://b/rekindle/client/trainer-3", Verb::kPublish, "qwen3"));
  EXPECT_FALSE(may(trainer, Verb::kPublish, std::string("qwen3\0x", 7)));
  EXPECT_TRUE(may("spiffe://a/rekindle/agent/gpu-1", Verb::kRead, "anything"));
  EXPECT_TRUE(may("dns:ops", Verb::kDrain, ""));
  EXPECT_FALSE(may("dns:ops2", Verb::kDrain, ""));
  const auto denied = rights->allow(std::span(&trainer, 1), Verb::kRetire, "qwen3");
  EXPECT_THAT(denied.error().message(),
              AllOf(HasSubstr("rights.json"), HasSubstr(trainer), HasSubstr("`retire` on qwen3"),
                    HasSubstr("SIGHUP"), Not(HasSubstr("\n"))));
  const auto given = rights->allow(std::span(&trainer, 1), Verb::kPublish, "qwen3");
  EXPECT_THAT(*given, HasSubstr("rights[0]"));
  EXPECT_EQ(rights->lines_of(std::span(&trainer, 1)).size(), 1u);
}

TEST(RightsFile, IsRefusedInOneLineThatNamesThePlace) {
  const std::pair<const char*, std::vector<const char*>> cases[] = {
      {"{\"rights\": [{]}", {"rights.json"}},
      {R"({"rights": [{"principals": ["*"], "verbs": ["read"]}, {"principal": ["a"]}]})",
       {"rights.json", "rights[1]", "principal"}},
      {R"({"rights": [{"principals": ["*"], "verbs": ["destroy"]}]})",
       {"rights[0].verbs", "'destroy'", "publish, read"}},
      {R"({"rights": [{"principals": ["a[b"], "verbs": ["read"]}]})",
       {"rights[0].principals[0]", "a[b"}},
      {R"({"rights": [{"principals": ["a"], "verbs": ["read"], "models": ["q", ""]}]})",
       {"rights[0].models[1]"}},
      {R"({"rights": [{"principals": ["a"], "verbs": ["read"], "models": ["q"]},
                      {"principals": ["a"], "verbs": ["read"], "models": []}]})",
       {"rights[1].models", "[\"*\"]"}},
      {R"({"rights": [{"principals": ["a\\"], "verbs": ["read"]}]})", {"backslash"}},
      {R"({"rights": [{"verbs": ["read"]}]})", {"rights[0]", "principals"}},
      {R"({"rights": [{"principals": ["a"]}]})", {"rights[0]", "verbs"}},
      {R"({"grants": []})", {"grants"}},
      {R"({"rights": [{"principals": ["a"], "verbs": ["read"], "models": ["q"], "models": ["*"]}]})",
       {"rights.json", "\"models\" appears twice"}},
      {R"({"rights": [], "rights": [{"principals": ["*"], "verbs": ["admin"]}]})",
       {"\"rights\" appears twice"}},
      {R"({"rights": [{"principals": ["a"], "verbs": ["read"], "models": null}]})",
       {"rights[0].models", "list"}},
      {R"({"rights": [{"principals": ["a"], "verbs": ["read"], "models": [null]}]})",
       {"rights[0].models", "list"}},
      {R"({"rights": [{"principals": ["a"], "verbs": ["read"], "models": [[]]}]})",
       {"rights[0].models", "list"}},
      {R"({"rights": [{"principals": ["a"], "verbs": ["read"], "models": "q"}]})",
       {"rights[0].models", "list"}},
      {R"({"rights": [{"principals": ["a", null], "verbs": ["read"]}]})",
       {"rights[0].principals", "list"}},
      {R"({"rights": [{"principals": ["a"], "verbs": [null, "read"]}]})",
       {"rights[0].verbs", "list"}},
      {R"({"rights": [null]})", {"rights[0]", "object"}},
      {R"({"rights": null})", {"rights.json", "`rights`", "list"}},
      {"null", {"rights.json", "object"}},
      {R"({"rights": [{"principals": ["a"], "verbs": ["read"], "models": ["q@*"]}]})",
       {"rights[0].models[0]", "'@'"}},
      {"", {"rights.json"}}};
  for (const auto& [json, says] : cases) {
    const auto parsed = parse(json);
    ASSERT_FALSE(parsed) << json;
    EXPECT_EQ(parsed.error().code(), ErrorCode::kInvalid);
    EXPECT_THAT(parsed.error().message(), Not(HasSubstr("\n"))) << json;
    for (const char* const part : says) EXPECT_THAT(parsed.error().message(), HasSubstr(part));
  }
  EXPECT_THAT(Rights::read("/nowhere/rights.json").error().message(),
              HasSubstr("/nowhere/rights.json"));
}

TEST(RightsFile, AnEmptyOneDeniesEverything) {
  const auto rights = parse(R"({"rights": []})");
  ASSERT_TRUE(rights);
  const std::string root = "uid:0";
  EXPECT_FALSE(rights->allow(std::span(&root, 1), Verb::kRead, "m"));
}

// Lets nobody retire, and keeps what it was told.
class StrictGuard final : public CallGuard {
 public:
  Result<void> admit(const Peer&, const MethodRule& rule, const CallObject& object) override {
    asked.push_back(object.text);
    if (rule.verb != Verb::kRetire) return {};
    return fail(ErrorCode::kDenied, "nobody may retire {}", object.text);
  }
  void denied(const Peer&, proto::Method method, const CallObject&, const Error&) override {
    denials.push_back(method);
  }
  async::Task<Result<void>> settle() override { co_return Result<void>(); }
  void ended(const Peer&, proto::Method method, const CallObject&, const Result<void>&) override {
    ends.push_back(method);
  }
  void refused(const std::string&, const Error&) override {}

  std::vector<std::string> asked;
  std::vector<proto::Method> denials;
  std::vector<proto::Method> ends;
};

TEST(GuardedCalls, RunOnlyIfTheRoleAndTheGuardLetThem) {
  Loop loop;
  StrictGuard guard;
  int runs = 0;
  auto server = RpcServer::create(loop.executor(), make_identity(proto::ROLE_COORDINATOR, "c"));
  for (const auto method : {proto::COORDINATOR_RETIRE, proto::COORDINATOR_DRAIN,
                            proto::COORDINATOR_REGISTER, proto::COORDINATOR_HEARTBEAT}) {
    server->handle_at_once(method, [&runs](const Peer&, const std::string&) -> Result<std::string> {
      ++runs;
      return std::string();
    });
  }
  server->guard_calls(guard);
  const auto address = server->listen("127.0.0.1:0");
  ASSERT_TRUE(address);
  auto client = loop.run(
      RpcClient::connect(*address, make_identity(proto::ROLE_CLIENT, "stranger"), kTestDeadline));
  ASSERT_TRUE(client);
  const auto call = [&](proto::Method method, std::string body) {
    return loop.run((*client)->call_raw(method, std::move(body), kTestDeadline));
  };
  const auto retired = call(proto::COORDINATOR_RETIRE, about<proto::RetireRequest>("m", 7));
  EXPECT_EQ(retired.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(retired.error().message(), HasSubstr("nobody may retire m@7"));
  for (const auto method : {proto::COORDINATOR_REGISTER, proto::COORDINATOR_HEARTBEAT}) {
    const auto member = call(method, "");
    EXPECT_EQ(member.error().code(), ErrorCode::kDenied);
    EXPECT_THAT(member.error().message(),
                AllOf(HasSubstr("client 'stranger'"), HasSubstr(proto::Method_Name(method))));
  }
  EXPECT_EQ(runs, 0);
  proto::DrainRequest drain;
  drain.set_node_id("n7");
  EXPECT_TRUE(call(proto::COORDINATOR_DRAIN, drain.SerializeAsString()));
  EXPECT_EQ(runs, 1);
  EXPECT_THAT(guard.asked, ::testing::ElementsAre("m@7", "n7"));
  EXPECT_THAT(guard.denials,
              ::testing::ElementsAre(proto::COORDINATOR_RETIRE, proto::COORDINATOR_REGISTER,
                                     proto::COORDINATOR_HEARTBEAT));
  EXPECT_THAT(guard.ends, ::testing::ElementsAre(proto::COORDINATOR_DRAIN));
  (*client)->close();
  loop.run(server->close(5s));
}

}  // namespace
}  // namespace rekindle::rpc
