// A small file of a checkpoint (config.json, …) that went wrong in one copy: no peer gets it, and a
// pull takes it from somebody else.
#include <algorithm>
#include <fstream>

#include "proto/agent.pb.h"
#include "recovery/agent/grant_clock.h"
#include "recovery/agent/peer_service.h"
#include "recovery/pull/pull_job.h"
#include "recovery/pull/pull_plans.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/grants.h"
#include "recovery/rpc/methods.h"
#include "tests/recovery/rpc_fixture.h"
#include "tests/store/store_fixture.h"

namespace rekindle::agent {
namespace {

using namespace std::chrono_literals;
using rpc::testing::make_identity;

constexpr const char* kConfig = R"({"model_type":"test"})";
constexpr const char* kReplicate =
    R"({"name":"t","rules":[{"match":["**","*"],"kind":"replicate"}]})";

// An agent that serves the published copy, or others, on a port of its own.
class PeerFilesTest : public store::StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    service_.install(*server_);
    address_ = *server_->listen("127.0.0.1:0");
  }
  void TearDown() override { loop_.run(server_->close(5s)); }

  Result<std::shared_ptr<rpc::RpcClient>> connect(const rpc::Identity& puller) {
    return loop_.run(rpc::RpcClient::connect(address_, puller, 5s));
  }
  // A grant of this agent for the published bytes.
  proto::Grant grant_for(const rpc::Identity& puller) {
    grants_.observe(identity_.incarnation, identity_.key->public_key(), 1000, steady_now());
    proto::Grant grant;
    grant.set_puller_incarnation(puller.incarnation.to_bytes());
    grant.set_source_incarnation(identity_.incarnation.to_bytes());
    *grant.mutable_root() = rpc::to_proto(checkpoint()->root);
    grant.set_issuer(identity_.incarnation.to_bytes());
    grant.set_expiry_ms(60'000);
    rpc::sign_grant(grant, identity_);
    return grant;
  }
  Result<std::string> get_page(const std::shared_ptr<rpc::RpcClient>& client, proto::PageKind kind,
                               const Digest& digest, const proto::Grant& grant) {
    proto::GetPageRequest request;
    request.set_kind(kind);
    *request.mutable_digest() = rpc::to_proto(digest);
    if (kind == proto::PAGE_FILE) request.set_name("config.json");
    *request.mutable_grant() = grant;
    TRY(const auto page, loop_.run(rpc::call<proto::AGENT_GET_PAGE>(client, request, 5s)));
    return page.data();
  }
  Result<std::string> get_config() {
    TRY(const auto client, connect(puller_));
    auto config = get_page(client, proto::PAGE_FILE, checkpoint()->root, grant_for(puller_));
    client->close();
    return config;
  }
  // Of a shard, whose rules need config.json.
  Result<pull::PlanSummary> plan_shard() {
    pull::PullEnvironment environment;
    environment.executor = loop_.executor();
    environment.identity = make_identity(proto::ROLE_PULLER, "p");
    environment.store = store_.get();
    environment.digest_pool = &digests_;
    environment.blocking_pool = &blocking_;
    environment.plans = &plans_;
    environment.coordinator = [] { return nullptr; };
    environment.coordinator_problem = [] { return Error(ErrorCode::kUnavailable, "nobody"); };
    pull::PullRequest request;
    request.ref = *ModelRef::parse("org/model@1");
    request.from = {address_};
    request.shard = "tp=0/2";
    request.spec_json = kReplicate;
    pull::PullJob job(environment, std::move(request), {});
    return loop_.run(job.plan_only());
  }

  struct Place {
    store::fs::path file;
    std::uint64_t offset = 0;
  };
  Place config_in(const store::StoredVersion& copy) const {
    const auto index = *checkpoint()->tensors.find("__rekindle_file__/config.json");
    const LayoutEntry entry = copy.manifest.layout.entries_of(index)[0];
    return {copy.segments[entry.segment]->path(), entry.offset_bytes};
  }
  void write_config(const store::StoredVersion& copy, std::string_view text) const {
    const Place place = config_in(copy);
    std::fstream file(place.file, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(place.offset));
    file << text;
    ASSERT_TRUE(file.flush());
  }

  rpc::testing::Loop loop_;
  rpc::Identity identity_ = make_identity(proto::ROLE_AGENT, "a");
  const rpc::Identity puller_ = make_identity(proto::ROLE_PULLER, "p");
  transport::SegmentRegistry registry_;
  ServedVersions served_{registry_};
  GrantClock grants_;
  WorkerPool digests_{"t-digest", 2, 16};
  WorkerPool blocking_{"t-blocking", 2, 16};
  pull::PullPlans plans_{loop_.executor(), {1, 64 << 20, 16}};
  PeerService service_{
      loop_.executor(), {identity_, served_, grants_, registry_, {}, blocking_}, digests_, {}};
  std::unique_ptr<rpc::RpcServer> server_ = rpc::RpcServer::create(loop_.executor(), identity_);
  std::string address_;
};

constexpr const char* kFlipped = R"({"model_type":"tesT"})";

TEST_F(PeerFilesTest, B6AFileThatDoesNotMatchItsLeavesIsServedToNobody) {
  served_.add(source_);
  write_config(*source_, kFlipped);
  const auto wrong = get_config();
  ASSERT_FALSE(wrong) << *wrong;
  EXPECT_EQ(wrong.error().code(), ErrorCode::kCorrupt) << wrong.error().message();
  write_config(*source_, kConfig);
  const auto right = get_config();
  ASSERT_TRUE(right) << right.error().message();
  EXPECT_EQ(*right, kConfig) << "what was wrong is remembered nowhere";
}

TEST_F(PeerFilesTest, B6AnotherCopyOfTheVersionIsReadInstead) {
  const auto second = pull(store::all_boxes(*checkpoint()));
  served_.add(source_);
  served_.add(second);
  write_config(*served_.all().begin()->second.stored, kFlipped);  // the one that is read first
  EXPECT_EQ(get_config().value_or("none"), kConfig);
}

TEST_F(PeerFilesTest, B6AFileThatIsGoneIsAnErrorOfThatPage) {
  served_.add(source_);
  store::fs::resize_file(config_in(*source_).file, 0);
  EXPECT_FALSE(get_config());
}

TEST_F(PeerFilesTest, B4APullWhoseOwnConfigIsWrongAsksItsPeers) {
  served_.add(source_);
  const auto mine = pull(store::all_boxes(*checkpoint()));
  write_config(*mine, kFlipped);
  const auto plan = plan_shard();
  ASSERT_TRUE(plan) << plan.error().message();
  EXPECT_EQ(plan->wanted_bytes, checkpoint()->tensors.total_bytes());
}

TEST_F(PeerFilesTest, B4APullWhoseOwnConfigIsCutOffAsksItsPeers) {
  served_.add(source_);
  const auto mine = pull(store::all_boxes(*checkpoint()));
  store::fs::resize_file(config_in(*mine).file, 0);
  const auto plan = plan_shard();
  ASSERT_TRUE(plan) << plan.error().message();
}

TEST_F(PeerFilesTest, S5AConnectionGetsMetadataOnlyForItsGrant) {
  served_.add(source_);
  const auto client = connect(puller_);
  ASSERT_TRUE(client) << client.error().message();
  const Digest root = checkpoint()->root;
  const Digest layout = source_->manifest.layout.digest();
  const auto code = [&](proto::PageKind kind, const Digest& digest, const proto::Grant& grant) {
    const auto page = get_page(*client, kind, digest, grant);
    return page ? ErrorCode::kInternal : page.error().code();
  };
  const auto grant = grant_for(puller_);
  for (const auto& [kind, digest] :
       {std::pair(proto::PAGE_FILE, root), std::pair(proto::PAGE_TILE_DIGESTS, root),
        std::pair(proto::PAGE_LAYOUT, layout),
        std::pair(proto::PAGE_TENSOR_SET, checkpoint()->tensors.digest())}) {
    EXPECT_EQ(code(kind, digest, {}), ErrorCode::kDenied) << proto::PageKind_Name(kind);
  }
  auto stretched = grant;
  stretched.set_expiry_ms(grant.expiry_ms() + 1);
  EXPECT_EQ(code(proto::PAGE_LAYOUT, layout, stretched), ErrorCode::kDenied);
  EXPECT_TRUE(get_page(*client, proto::PAGE_LAYOUT, layout, grant));
  EXPECT_TRUE(get_page(*client, proto::PAGE_TILE_DIGESTS, root, {})) << "it has shown its grant";
  EXPECT_EQ(code(proto::PAGE_TILE_DIGESTS, Digest{1, 2}, {}), ErrorCode::kDenied)
      << "of another version";
  const auto other = connect(make_identity(proto::ROLE_PULLER, "q"));
  ASSERT_TRUE(other);
  EXPECT_FALSE(get_page(*other, proto::PAGE_LAYOUT, layout, grant)) << "of another puller";
  (*client)->close();
  (*other)->close();
}

// A transport that nobody connects to.
class SilentTransport final : public transport::Server {
 public:
  std::string_view transport() const override { return "tcp"; }
  std::string endpoint(std::string_view host) const override { return std::string(host) + ":1"; }
  Result<std::string> accept(const SessionToken&, std::string_view) override { return ""; }
  void drop_session(const SessionToken&) override {}
};

TEST_F(PeerFilesTest, ProofsAreForTheConnectionOfTheSessionAndBounded) {
  served_.add(source_);
  SilentTransport silent;
  PeerSessions::Options options;
  options.advertised_host = [] { return std::string("host"); };
  PeerService service(loop_.executor(),
                      {identity_, served_, grants_, registry_, {&silent}, blocking_}, digests_,
                      options);
  auto server = rpc::RpcServer::create(loop_.executor(), identity_);
  service.install(*server);
  const std::string address = *server->listen("127.0.0.1:0");
  const rpc::Identity puller = make_identity(proto::ROLE_PULLER, "p");
  const auto client = *loop_.run(rpc::RpcClient::connect(address, puller, 5s));
  const auto thief = *loop_.run(rpc::RpcClient::connect(address, puller, 5s));
  proto::OpenSessionRequest open;
  open.set_source_incarnation(identity_.incarnation.to_bytes());
  *open.mutable_id() = rpc::to_proto(checkpoint()->id);
  *open.mutable_root() = rpc::to_proto(checkpoint()->root);
  *open.mutable_layout() = rpc::to_proto(source_->manifest.layout.digest());
  open.add_transports("tcp");
  *open.mutable_grant() = grant_for(puller);
  const auto opened = loop_.run(rpc::call<proto::AGENT_OPEN_SESSION>(client, open, 5s));
  ASSERT_TRUE(opened) << opened.error().message();
  proto::ProveRangesRequest prove;
  prove.set_token(opened->token());
  *prove.mutable_root() = open.root();
  *prove.mutable_layout() = open.layout();
  EXPECT_TRUE(loop_.run(rpc::call<proto::AGENT_PROVE_RANGES>(client, prove, 5s)));
  const auto stolen = loop_.run(rpc::call<proto::AGENT_PROVE_RANGES>(thief, prove, 5s));
  ASSERT_FALSE(stolen) << "the token of another connection";
  EXPECT_EQ(stolen.error().code(), ErrorCode::kDenied);
  for (int i = 0; i < 1025; ++i) prove.add_items();
  const auto many = loop_.run(rpc::call<proto::AGENT_PROVE_RANGES>(client, prove, 5s));
  ASSERT_FALSE(many);
  EXPECT_NE(many.error().message().find("at most 1024"), std::string::npos)
      << many.error().message();
  client->close();
  thief->close();
  loop_.run_until([&] { return service.sessions().count() == 0; });
  loop_.run(service.sessions().drain(5s));
  loop_.run(server->close(5s));
}

}  // namespace
}  // namespace rekindle::agent
