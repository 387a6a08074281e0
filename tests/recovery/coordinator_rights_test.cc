#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include <gmock/gmock.h>

#include "proto/rights.pb.h"
#include "proto/trace.pb.h"
#include "recovery/rpc/audit_log.h"
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
  static std::vector<std::string> lines_about(const std::filesystem::path& file,
                                              const std::string& what) {
    std::ifstream stream(file);
    std::vector<std::string> found;
    for (std::string line; std::getline(stream, line);) {
      if (line.find(what) != std::string::npos) found.push_back(line);
    }
    return found;
  }
  // Returns when the coordinator has read its files again.
  void reload(const std::filesystem::path& audit) {
    const auto reloads = [&] { return lines_about(audit, "\"act\":\"reload\"").size(); };
    const std::size_t before = reloads();
    process_->signal(SIGHUP);
    const auto deadline = std::chrono::steady_clock::now() + rpc::testing::kTestDeadline;
    while (reloads() == before) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      loop_.run(rpc::testing::sleep_for(20ms));
    }
  }
  // Everybody may read `open@1`, and nobody `secret@1`.
  Agent holder_of_an_open_and_a_secret_model() {
    start_with(R"({"principals": ["unproven"], "verbs": ["publish"]},
                  {"principals": ["unproven"], "verbs": ["read"], "models": ["open"]})");
    Agent holder = agent("a");
    EXPECT_TRUE(enroll(holder));
    for (const std::string model : {"secret", "open"}) {
      EXPECT_TRUE(publish(holder, {model, 1}, kRoot));
      EXPECT_TRUE(announce(holder, {model, 1}, kRoot));
    }
    return holder;
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

TEST_F(CoordinatorRights, S2AClientWithoutTheRightRetiresNothing) {
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
  const Agent a = holder_of_an_open_and_a_secret_model();
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

// The answer to a report has grants for all sources.
TEST_F(CoordinatorRights, ProgressOfAPullGivesNoGrantsToThoseWhoMayNotRead) {
  const Agent holder = holder_of_an_open_and_a_secret_model();
  Agent puller{make_identity(proto::ROLE_PULLER, "p"), {}};
  ASSERT_TRUE(connect(puller));
  const auto opened = open(puller, "open");
  ASSERT_TRUE(opened) << opened.error().message();
  const auto report = [&](const std::string& pull_id, const std::string& model) {
    proto::PullProgressRequest progress;
    progress.set_pull_id(pull_id);
    *progress.mutable_puller() = puller.address();
    *progress.mutable_id() = rpc::to_proto(ModelVersion{model, 1});
    return loop_.run(rpc::call<proto::COORDINATOR_PULL_PROGRESS>(puller.client, progress, 5s));
  };
  const auto own = report(opened->pull_id(), "open");
  ASSERT_TRUE(own) << own.error().message();
  EXPECT_EQ(own->sources_size(), 1);
  EXPECT_EQ(report(std::string(16, 'x'), "secret").error().code(), ErrorCode::kDenied);
  EXPECT_EQ(report(opened->pull_id(), "secret").error().code(), ErrorCode::kDenied);
}

// A copy that counts may let the only true holder drop its own.
TEST_F(CoordinatorRights, AMemberThatMayNotReadAModelIsNoHolderAndNoRankOfIt) {
  const auto file = temp_ / "rights.json";
  std::ofstream(file)
      << R"({"rights": [{"principals": ["unproven"], "verbs": ["publish", "read"]}]})";
  start({"--rights", file.string()});
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(publish(a, kId, kRoot));
  ASSERT_TRUE(announce(a, kId, kRoot));
  std::ofstream(file)
      << R"({"rights": [{"principals": ["unproven"], "verbs": ["read"], "models": ["open"]}]})";
  process_->signal(SIGHUP);
  const Agent evil = agent("evil");
  ASSERT_TRUE(enroll(evil));
  loop_.run_until([&] {
    const auto told = announce(evil, kId, kRoot);
    // It had a copy when the right went.
    EXPECT_TRUE(told || enroll(evil));
    return told && told->conflicts_size() == 1;
  });
  const auto told = announce(evil, kId, kRoot);
  ASSERT_EQ(told->conflicts_size(), 1);
  EXPECT_TRUE(told->conflicts(0).again());
  EXPECT_THAT(told->conflicts(0).why(), HasSubstr("`read` on qwen3"));
  proto::RankReport rank;
  rank.set_node_id("evil");
  rank.set_incarnation(evil.identity.incarnation.to_bytes());
  rank.set_instance("i");
  rank.set_world(1);
  rank.set_model("qwen3");
  rank.set_latest(true);
  EXPECT_EQ(
      loop_.run(rpc::call<proto::COORDINATOR_REPORT_RANK>(evil.client, rank, 5s)).error().code(),
      ErrorCode::kDenied);
  proto::RoundReport round;
  round.set_node_id("evil");
  round.set_incarnation(evil.identity.incarnation.to_bytes());
  *round.add_members()->mutable_id() = rpc::to_proto(kId);
  const auto refused =
      loop_.run(rpc::call<proto::COORDINATOR_ROUND>(evil.client, std::move(round), 5s));
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("may not read"));
}

class ChangedRights : public CoordinatorRights {
 protected:
  static constexpr const char* kAll =
      R"({"principals": ["unproven"], "verbs": ["publish", "read", "retire"]})";
  static constexpr const char* kOpenOnly =
      R"({"principals": ["unproven"], "verbs": ["publish", "read"], "models": ["open"]})";

  void start_audited(const std::string& lines) {
    write(lines);
    start({"--rights", file().string(), "--audit", audit().string()});
  }
  void change_to(const std::string& lines) {
    write(lines);
    reload(audit());
  }
  std::filesystem::path audit() const { return temp_ / "audit.jsonl"; }
  Result<proto::HeartbeatResponse> heartbeat(const Agent& by, const std::string& event = "",
                                             const std::string& model = "", int count = 1) {
    proto::HeartbeatRequest beat;
    beat.set_node_id(by.identity.node_id);
    beat.set_incarnation(by.identity.incarnation.to_bytes());
    for (int i = 0; i < count && !event.empty(); ++i) {
      auto& told = *beat.add_events();
      told.set_number(++events_);
      told.set_kind(event);
      if (!model.empty()) *told.mutable_id() = rpc::to_proto(ModelVersion{model, 1});
    }
    return loop_.run(rpc::call<proto::COORDINATOR_HEARTBEAT>(by.client, std::move(beat), 5s));
  }
  Result<proto::RankResponse> report_rank(const Agent& by, std::uint64_t generation,
                                          const std::string& model) {
    proto::RankReport rank;
    rank.set_node_id(by.identity.node_id);
    rank.set_incarnation(by.identity.incarnation.to_bytes());
    rank.set_instance("i");
    rank.set_generation(generation);
    rank.set_world(1);
    rank.set_model(model);
    rank.set_version(1);
    rank.set_sequence(1);
    return loop_.run(rpc::call<proto::COORDINATOR_REPORT_RANK>(by.client, std::move(rank), 5s));
  }

 private:
  std::filesystem::path file() const { return temp_ / "rights.json"; }
  void write(const std::string& lines) const {
    std::ofstream(file()) << R"({"rights": [)" << lines << "]}";
  }
  std::uint64_t events_ = 0;
};

// Another holder could be let go of its copy because of it.
TEST_F(ChangedRights, ACopyCountsAsLongAsItsHolderMayHaveIt) {
  start_audited(kAll);
  Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(publish(a, kId, kRoot));
  ASSERT_TRUE(announce(a, kId, kRoot));
  EXPECT_EQ(status(a).nodes(0).holdings_size(), 1);
  ASSERT_NO_FATAL_FAILURE(change_to(kOpenOnly));
  EXPECT_EQ(heartbeat(a).error().code(), ErrorCode::kStale) << "it must register and announce";
  ASSERT_TRUE(enroll(a));
  const auto told = announce(a, kId, kRoot);
  ASSERT_TRUE(told) << told.error().message();
  EXPECT_EQ(told->conflicts_size(), 1);
  ASSERT_NO_FATAL_FAILURE(change_to(kAll));
  EXPECT_EQ(status(a).nodes(0).holdings_size(), 0);
  EXPECT_TRUE(heartbeat(a)) << "it has lost nothing";
  ASSERT_TRUE(announce(a, kId, kRoot));
  EXPECT_EQ(status(a).nodes(0).holdings_size(), 1);
}

TEST_F(ChangedRights, AnAnnouncementTellsNothingOfAModelThatItsSenderMayNotRead) {
  start_audited(kAll);
  Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(publish(a, kId, kRoot));
  ASSERT_NO_FATAL_FAILURE(change_to(kOpenOnly));
  Agent evil = agent("evil");
  ASSERT_TRUE(enroll(evil));
  std::set<std::string> answers;
  for (const ModelVersion& id : {kId, ModelVersion{kId.model, kId.version + 1}}) {
    const auto told = announce(evil, id, Digest{3, 4});
    ASSERT_TRUE(told) << told.error().message();
    ASSERT_EQ(told->conflicts_size(), 1);
    answers.insert(told->conflicts(0).why());
  }
  ASSERT_EQ(answers.size(), 1u) << "known and unknown versions look the same";
  EXPECT_THAT(*answers.begin(), AllOf(HasSubstr("`read` on qwen3"), Not(HasSubstr("root"))));
}

TEST_F(ChangedRights, NobodyPublishesOrPullsInTheNameOfAnotherNode) {
  start_audited(kAll);
  Agent a = agent("a");
  Agent evil = agent("evil");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(enroll(evil));
  ASSERT_TRUE(publish(a, kId, kRoot));
  ASSERT_TRUE(announce(a, kId, kRoot));
  const std::string own_name = std::exchange(evil.identity.node_id, "a");
  EXPECT_EQ(publish(evil, {kId.model, kId.version + 1}, kRoot).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(open(evil, kId.model).error().code(), ErrorCode::kDenied);
  evil.identity.node_id = own_name;
  EXPECT_TRUE(open(evil, kId.model));
}

TEST_F(ChangedRights, ARankOfAJointPublicationCountsAsLongAsItsHostMayPublish) {
  start_audited(kAll);
  Agent a = agent("a");
  Agent b = agent("b");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(enroll(b));
  const auto report = [&](const Agent& by, std::uint32_t rank) {
    proto::JointReport declared;
    declared.set_node_id(by.identity.node_id);
    declared.set_incarnation(by.identity.incarnation.to_bytes());
    *declared.mutable_id() = rpc::to_proto(kId);
    declared.set_world(2);
    declared.add_ranks(rank);
    auto roster =
        loop_.run(rpc::call<proto::COORDINATOR_REPORT_JOINT>(by.client, std::move(declared), 5s));
    EXPECT_TRUE(roster) << roster.error().message();
    return roster ? roster->missing_total() : 0u;
  };
  EXPECT_EQ(report(a, 0), 1u);
  ASSERT_NO_FATAL_FAILURE(change_to(kOpenOnly));
  ASSERT_NO_FATAL_FAILURE(change_to(kAll));
  EXPECT_EQ(report(b, 1), 1u) << "rank 0 has to report again";
}

TEST_F(ChangedRights, AnInstanceOfAModelThatACallerMayNotReadIsNotTakenOver) {
  start_audited(kAll);
  Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  for (const std::string model : {"qwen3", "open"}) {
    ASSERT_TRUE(publish(a, {model, 1}, kRoot));
    ASSERT_TRUE(announce(a, {model, 1}, kRoot));
  }
  const auto began = report_rank(a, 1, "qwen3");
  ASSERT_TRUE(began) << began.error().message();
  ASSERT_NO_FATAL_FAILURE(change_to(kOpenOnly));
  Agent evil = agent("evil");
  ASSERT_TRUE(enroll(evil));
  const auto refused = report_rank(evil, 9, "open");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kDenied);
  EXPECT_EQ(refused.error().message().find("qwen3"), std::string::npos);
}

TEST_F(ChangedRights, AMemberTellsNeitherEventsOfTheCoordinatorNorOfOtherModels) {
  start_audited(std::string(kOpenOnly) + R"(, {"principals": ["unproven"], "verbs": ["read"]})");
  Agent evil = agent("evil");
  ASSERT_TRUE(enroll(evil));
  ASSERT_TRUE(heartbeat(evil, "version_retired", "open"));
  ASSERT_TRUE(heartbeat(evil, "attach", "open"));
  ASSERT_NO_FATAL_FAILURE(change_to(kOpenOnly));
  ASSERT_TRUE(heartbeat(evil, "detached", "secret"));
  ASSERT_TRUE(heartbeat(evil, "committed", "open"));
  ASSERT_NO_FATAL_FAILURE(change_to(kAll));
  proto::ClusterStatusRequest ask;
  ask.mutable_events();
  const auto seen = loop_.run(rpc::call<proto::COORDINATOR_STATUS>(evil.client, ask, 5s));
  ASSERT_TRUE(seen) << seen.error().message();
  std::vector<std::string> told;
  for (const auto& event : seen->events().events()) {
    if (event.node_id() == "evil" && event.kind() != "node_joined") told.push_back(event.kind());
  }
  EXPECT_THAT(told, ::testing::ElementsAre("attach", "committed"));
}

TEST_F(ChangedRights, AMemberThatTellsTooManyEventsIsNotHeardForAWhile) {
  start_audited(kAll);
  Agent evil = agent("evil");
  Agent other = agent("other");
  ASSERT_TRUE(enroll(evil));
  ASSERT_TRUE(enroll(other));
  constexpr int kTold = 50 * 64;
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(heartbeat(evil, "attach", "open", 64));
  ASSERT_TRUE(heartbeat(other, "loaded", "open"));
  proto::ClusterStatusRequest ask;
  ask.mutable_events();
  std::map<std::string, int> seen_of;
  while (true) {
    const auto seen = loop_.run(rpc::call<proto::COORDINATOR_STATUS>(other.client, ask, 5s));
    ASSERT_TRUE(seen) << seen.error().message();
    if (seen->events().events().empty()) break;
    for (const auto& event : seen->events().events()) ++seen_of[event.kind()];
    ask.mutable_events()->set_after(seen->events().events().rbegin()->number());
  }
  EXPECT_GE(seen_of["attach"], 1024);
  EXPECT_LT(seen_of["attach"], kTold);
  EXPECT_EQ(seen_of["loaded"], 1);
}

TEST_F(ChangedRights, AVersionThatAnAnnouncementMakesKnownIsInTheAuditLog) {
  start_audited(kAll);
  Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(announce(a, kId, kRoot));
  ASSERT_TRUE(announce(a, kId, kRoot));
  const auto lines = lines_about(audit(), "\"act\":\"announce\"");
  ASSERT_EQ(lines.size(), 1u) << "the second one makes nothing known";
  EXPECT_THAT(lines[0], AllOf(HasSubstr("qwen3@41"), HasSubstr("\"node\":\"a\"")));
}

TEST_F(ChangedRights, AMemberThatRegistersAgainAndAgainHasOneLineInTheAuditLog) {
  start_audited(kAll);
  const Agent a = agent("a");
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(enroll(a));
  const auto lines = lines_about(audit(), "\"act\":\"register\"");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0], AllOf(HasSubstr("\"object\":\"a\""), HasSubstr("\"result\":\"ok\"")));
}

// Pullers would go there.
TEST_F(CoordinatorRights, AMemberIsAtAnAddressOfTheNetwork) {
  start();
  const Agent evil = agent("evil");
  for (const char* const where : {"unix:/etc/passwd", "a b:c", ""}) {
    proto::RegisterRequest request;
    *request.mutable_node() = evil.address();
    request.mutable_node()->set_control_endpoint(where);
    EXPECT_EQ(
        loop_.run(rpc::call<proto::COORDINATOR_REGISTER>(evil.client, request, 5s)).error().code(),
        ErrorCode::kInvalid)
        << where;
  }
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

TEST_F(CoordinatorRights, ARightsFileThatTurnsBadAtAReloadLeavesTheOldRights) {
  const auto file = temp_ / "rights.json";
  const auto audit = temp_ / "audit.jsonl";
  const auto write = [&](const std::string& lines) {
    std::ofstream(file) << R"({"rights": [)" << lines << "]}";
  };
  write(R"({"principals": ["unproven"], "verbs": ["publish", "read"]})");
  start({"--rights", file.string(), "--audit", audit.string()});
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(publish(a, kId, kRoot));
  write(R"({"principals": ["unproven"], "verbs": ["publish", "read", "retyre"]})");
  ASSERT_NO_FATAL_FAILURE(reload(audit));
  EXPECT_THAT(lines_about(audit, "\"act\":\"reload\"").back(),
              AllOf(HasSubstr("rights.json"), HasSubstr("'retyre' is no verb")));
  EXPECT_EQ(retire(a, kId).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(status(a).versions_size(), 1) << "the old rights hold";
  write(R"({"principals": ["unproven"], "verbs": ["read", "retire"]})");
  ASSERT_NO_FATAL_FAILURE(reload(audit));
  EXPECT_TRUE(retire(a, kId));
  EXPECT_EQ(publish(a, {"qwen3", 42}, kRoot).error().code(), ErrorCode::kDenied);
}

TEST_F(CoordinatorRights, WhoHasNoRightLeavesNoSpans) {
  const auto file = temp_ / "rights.json";
  const auto audit = temp_ / "audit.jsonl";
  const auto report_and_find = [&](const Agent& by, char trace) {
    proto::ClosePullRequest close;
    auto& span = *close.add_spans();
    span.set_trace_id(std::string(16, trace));
    span.set_span_id(std::string(8, 's'));
    span.set_name("pull");
    span.set_start_unix_ns(1);
    EXPECT_TRUE(loop_.run(rpc::call<proto::COORDINATOR_CLOSE_PULL>(by.client, close, 5s)));
    proto::TraceRequest find;
    find.set_trace_id(std::string(16, 't'));
    return loop_.run(rpc::call<proto::FIND_TRACE>(by.client, find, 5s));
  };
  std::ofstream(file) << R"({"rights": [{"principals": ["nobody"], "verbs": ["read"]}]})";
  start({"--rights", file.string(), "--audit", audit.string()});
  Agent puller{make_identity(proto::ROLE_PULLER, "p"), {}};
  ASSERT_TRUE(connect(puller));
  EXPECT_EQ(report_and_find(puller, 't').error().code(), ErrorCode::kDenied);
  std::ofstream(file) << R"({"rights": [{"principals": ["unproven"], "verbs": ["read"]}]})";
  ASSERT_NO_FATAL_FAILURE(reload(audit));
  EXPECT_EQ(report_and_find(puller, 'u').error().code(), ErrorCode::kNotFound);
  EXPECT_TRUE(report_and_find(puller, 't')) << "it may read now";
}

TEST_F(CoordinatorRights, WhoChangedWhatIsInTheAuditLogAlsoOverARestart) {
  const auto audit = temp_ / "audit.jsonl";
  const auto file = temp_ / "rights.json";
  std::ofstream(file) << R"({"rights": [
      {"principals": ["unproven"], "verbs": ["publish", "retire"], "models": ["qwen*"]}]})";
  start({"--rights", file.string(), "--audit", audit.string()});
  const Agent a = agent("a");
  ASSERT_TRUE(enroll(a));
  ASSERT_TRUE(publish(a, kId, kRoot));
  ASSERT_TRUE(retire(command("ops"), kId));
  EXPECT_FALSE(retire(command("ops"), {"llama", 1}));
  process_->kill();
  start({"--rights", file.string(), "--audit", audit.string()});
  EXPECT_THAT(lines_about(audit, "\"act\":\"register\"").at(0), HasSubstr("\"object\":\"a\""));
  EXPECT_THAT(lines_about(audit, "\"act\":\"publish\"").at(0),
              AllOf(HasSubstr("\"object\":\"qwen3@41\""), HasSubstr("\"result\":\"ok\""),
                    HasSubstr("\"role\":\"agent\""), HasSubstr("\"node\":\"a\"")));
  const auto retirements = lines_about(audit, "\"act\":\"retire\"");
  ASSERT_EQ(retirements.size(), 2u);
  EXPECT_THAT(retirements[0], AllOf(HasSubstr("\"node\":\"ops\""), HasSubstr("unproven")));
  EXPECT_THAT(retirements[1], HasSubstr("`retire` on llama"));
  const auto chain = rpc::verify_audit({audit});
  ASSERT_TRUE(chain) << chain.error().message();
  EXPECT_EQ(lines_about(audit, "coordinator_started").size(), 2u);
}

}  // namespace
}  // namespace rekindle::coordinator::testing
