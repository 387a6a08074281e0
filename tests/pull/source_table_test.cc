// News from the coordinator about sources that a pull knows already.
#include "recovery/pull/source_table.h"

#include <gtest/gtest.h>

#include "recovery/rpc/convert.h"
#include "tests/recovery/rpc_fixture.h"

namespace rekindle::pull {
namespace {

proto::Source record_of(const std::string& incarnation, std::uint64_t layout,
                        std::uint64_t serial) {
  proto::Source record;
  record.mutable_node()->set_incarnation(incarnation);
  *record.mutable_layout() = rpc::to_proto(Digest{static_cast<std::uint8_t>(layout)});
  if (serial > 0) record.mutable_grant()->set_serial(serial);
  return record;
}

TEST(SourceTable, AKnownSourceGetsTheNewestGrantOfItsIncarnationAndLayout) {
  SourceTable sources(3);
  sources[0].record = record_of("a", 1, 10);
  sources[1].record = record_of("a", 2, 11);
  sources[2].record = record_of("b", 1, 12);
  refresh_grants(sources, {record_of("a", 2, 21), record_of("c", 1, 22), record_of("b", 1, 23)});
  EXPECT_EQ(sources[0].record.grant().serial(), 10u) << "another layout";
  EXPECT_EQ(sources[1].record.grant().serial(), 21u);
  EXPECT_EQ(sources[2].record.grant().serial(), 23u);
}

TEST(SourceTable, ARecordWithoutAGrantTakesNoneAway) {
  SourceTable sources(1);
  sources[0].record = record_of("a", 1, 10);
  refresh_grants(sources, {record_of("a", 1, 0)});
  EXPECT_EQ(sources[0].record.grant().serial(), 10u);
}

TEST(SourceTable, ASourceThatIsFilledHoldsMoreAndMoreUntilItIsComplete) {
  SourceTable sources(2);
  sources[1].held.emplace(10);
  EXPECT_TRUE(any_growing(sources));
  EXPECT_FALSE(growing_sources(sources).test(0));
  EXPECT_TRUE(growing_sources(sources).test(1));
  EXPECT_FALSE(sources[0].learn_held({{0, 1}})) << "it has all of it";
  EXPECT_TRUE(sources[1].learn_held({{2, 5}}));
  EXPECT_FALSE(sources[1].learn_held({{3, 4}}));
  sources[1].learn_complete();
  EXPECT_FALSE(any_growing(sources));
}

// A grant may have run out since the source was dialled with it.
TEST(SourceTable, ASessionIsOpenedWithTheNewestGrant) {
  rpc::testing::Loop loop;
  const auto identity = rpc::testing::make_identity(proto::ROLE_AGENT, "a");
  const auto server = rpc::RpcServer::create(loop.executor(), identity);
  std::uint64_t shown = 0;
  server->handle_at_once(proto::AGENT_OPEN_SESSION,
                         [&](const rpc::Peer&, const std::string& body) -> Result<std::string> {
                           proto::OpenSessionRequest request;
                           request.ParseFromString(body);
                           shown = request.grant().serial();
                           return fail(ErrorCode::kDenied, "that will do");
                         });
  auto record = record_of(identity.incarnation.to_bytes(), 1, 10);
  record.mutable_node()->set_control_endpoint(*server->listen("127.0.0.1:0"));
  const auto peer = loop.run(SourcePeer::connect(
      record, rpc::testing::make_identity(proto::ROLE_AGENT, "b"), std::chrono::seconds(5)));
  ASSERT_TRUE(peer) << peer.error().message();
  SourceTable sources(1);
  sources[0].record = record;
  refresh_grants(sources, {record_of(identity.incarnation.to_bytes(), 1, 11)});
  SourcePeer::SessionRequest wanted{{}, {"m", 1}, {}, sources[0].record.grant(), {"tcp"}};
  EXPECT_FALSE(loop.run((*peer)->open_session(std::move(wanted), std::chrono::seconds(5))));
  EXPECT_EQ(shown, 11u);
  (*peer)->close();
  loop.run(server->close(std::chrono::seconds(5)));
}

}  // namespace
}  // namespace rekindle::pull
