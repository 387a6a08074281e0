#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/coordinator.pb.h"
#include "recovery/rpc/method_limits.h"
#include "recovery/rpc/peer_budgets.h"
#include "tests/recovery/rpc_raw.h"
#include "tests/support/allocation_meter.h"

// What one peer may cost a server: the size of its calls, the memory behind them, its connections
// and its rate.
namespace rekindle::rpc {
namespace {

using namespace testing;
using ::testing::HasSubstr;
namespace allocations = rekindle::testing::allocations;

constexpr std::size_t kMebi = 1u << 20;

async::Task<Result<std::string>> wait_for_the_caller(const Peer&, std::string,
                                                     std::shared_ptr<EventSink>) {
  co_await async::sleep_for(60s);
  co_return std::string();
}

class RpcLimits : public ::testing::Test {
 protected:
  void serve(ServerLimits limits = {}) {
    server_.emplace(
        make_identity(proto::ROLE_COORDINATOR, "server"), limits, [](RpcServer& server) {
          for (const auto method : {proto::COORDINATOR_ANNOUNCE, proto::COORDINATOR_STATUS,
                                    proto::COORDINATOR_HEARTBEAT}) {
            server.handle_at_once(method,
                                  [](const Peer&, const std::string& body) -> Result<std::string> {
                                    return std::to_string(body.size());
                                  });
          }
          server.handle(proto::AGENT_WATCH_HAVE, wait_for_the_caller);
          server.handle_at_once(proto::AGENT_GET_PAGE,
                                [](const Peer&, const std::string&) -> Result<std::string> {
                                  return std::string(kMebi, 'p');
                                });
        });
  }
  Result<std::shared_ptr<RpcClient>> connect(proto::Role role = proto::ROLE_AGENT) {
    return loop_.run(RpcClient::connect(server_->address(), make_identity(role, "good"), 10s));
  }
  void expect_served(proto::Role role = proto::ROLE_AGENT) {
    const auto client = connect(role);
    ASSERT_TRUE(client) << client.error().message();
    const auto method =
        role == proto::ROLE_AGENT ? proto::COORDINATOR_HEARTBEAT : proto::COORDINATOR_STATUS;
    const auto answer = loop_.run((*client)->call_raw(method, "hello", 10s));
    ASSERT_TRUE(answer) << answer.error().message();
    EXPECT_EQ(*answer, "5");
  }

  Loop loop_;
  std::optional<ServerThread> server_;
};

TEST_F(RpcLimits, AnOversizeCallIsRefusedByItsFirstBytes) {
  serve();
  HostilePeer peer(server_->address());
  ASSERT_TRUE(peer.greet());
  // The body never follows.
  const std::string bytes =
      *encode_frame(request(1, proto::COORDINATOR_HEARTBEAT, 1000, std::string(8 * kMebi, 'x')));
  ASSERT_TRUE(peer.send(std::string_view(bytes).substr(0, 200)));
  const auto refused = peer.answer();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalid);
  EXPECT_THAT(refused.error().message(), HasSubstr("COORDINATOR_HEARTBEAT"));
  EXPECT_THAT(refused.error().message(), HasSubstr("1048576"));
  EXPECT_TRUE(peer.closed_by_peer());
  expect_served();
}

TEST_F(RpcLimits, ALargeFrameThatHidesItsMethodIsRefused) {
  serve();
  HostilePeer peer(server_->address());
  ASSERT_TRUE(peer.greet());
  proto::Request late;
  late.set_body(std::string(kMebi, 'x'));
  std::string fields = late.SerializeAsString();
  proto::Request early;
  early.set_call_id(1);
  early.set_method(proto::COORDINATOR_ANNOUNCE);
  early.set_deadline_ms(1000);
  fields += early.SerializeAsString();
  std::string frame = "\x1a";
  for (std::size_t left = fields.size(); left > 0; left >>= 7) {
    frame += static_cast<char>((left & 0x7f) | (left > 0x7f ? 0x80 : 0));
  }
  frame += fields;
  std::string header;
  for (int shift = 24; shift >= 0; shift -= 8) {
    header += static_cast<char>(frame.size() >> shift & 0xff);
  }
  (void)peer.send(header + frame.substr(0, 4000));
  const auto refused = peer.answer();
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("begin with the method"));
  expect_served();
}

TEST_F(RpcLimits, ALargeFrameMayHaveHardlyMoreThanItsBody) {
  serve();
  HostilePeer peer(server_->address());
  ASSERT_TRUE(peer.greet());
  proto::Frame frame = request(1, proto::COORDINATOR_ANNOUNCE, 1000, "small");
  frame.mutable_request()->set_trace(std::string(2 * kMebi, 't'));
  const std::string bytes = *encode_frame(frame);
  ASSERT_TRUE(peer.send(std::string_view(bytes).substr(0, 4000)));
  const auto refused = peer.answer();
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("beside its body"));
}

TEST_F(RpcLimits, WhatAMethodAllowsIsServed) {
  serve();
  const auto client = connect();
  ASSERT_TRUE(client);
  for (const std::size_t size : {65'496u, 64u << 10, 200u << 10, 4u << 20}) {
    const auto answer =
        loop_.run((*client)->call_raw(proto::COORDINATOR_ANNOUNCE, std::string(size, 'x'), 10s));
    ASSERT_TRUE(answer) << answer.error().message();
    EXPECT_EQ(*answer, std::to_string(size));
  }
}

TEST_F(RpcLimits, AnHonestCallerHearsOfTheLimitBeforeItSends) {
  serve();
  const auto client = connect();
  ASSERT_TRUE(client);
  const auto refused =
      loop_.run((*client)->call_raw(proto::COORDINATOR_ANNOUNCE, std::string(5 * kMebi, 'x'), 10s));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kInvalid);
  EXPECT_TRUE((*client)->connected());
}

TEST_F(RpcLimits, APeerThatAsksTooOftenIsToldWhenToComeBack) {
  serve();
  HostilePeer peer(server_->address());
  ASSERT_TRUE(peer.greet());
  const auto limits = limits_of(proto::COORDINATOR_STATUS);
  const int calls = 3 * static_cast<int>(limits.burst);
  std::string all;
  for (int i = 1; i <= calls; ++i) {
    all += *encode_frame(request(static_cast<std::uint64_t>(i), proto::COORDINATOR_STATUS, 9000));
  }
  ASSERT_TRUE(peer.send(all));
  int served = 0;
  std::optional<Error> refused;
  for (int i = 0; i < calls; ++i) {
    auto answer = peer.answer();
    if (answer) {
      ++served;
    } else {
      refused = std::move(answer).error();
    }
  }
  EXPECT_GE(served, static_cast<int>(limits.burst));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code(), ErrorCode::kExhausted);
  EXPECT_THAT(refused->message(), HasSubstr("call again in"));
  expect_served();
}

TEST_F(RpcLimits, OneAddressHasItsPartOfTheConnections) {
  serve({.max_connections = 64, .max_connections_per_peer = 8});
  std::vector<std::unique_ptr<HostilePeer>> hostile;
  std::string why;
  for (int i = 0; i < 64; ++i) {
    auto peer = std::make_unique<HostilePeer>(server_->address(), "127.0.0.9");
    const bool greeted = peer->connected() && peer->greet();
    if (greeted)
      hostile.push_back(std::move(peer));
    else if (!peer->refusal().empty())
      why = peer->refusal();
  }
  EXPECT_EQ(hostile.size(), 8u);
  EXPECT_THAT(why, HasSubstr("127.0.0.9 has 8 connections"));
  expect_served();
}

TEST_F(RpcLimits, UnknownConnectionsOfOneAddressPushOutEachOther) {
  serve({.max_connections = 64, .max_connections_per_peer = 4});
  HostilePeer other(server_->address(), "127.0.0.8");
  std::vector<std::unique_ptr<HostilePeer>> silent;
  for (int i = 0; i < 20; ++i) {
    silent.push_back(std::make_unique<HostilePeer>(server_->address(), "127.0.0.9"));
  }
  EXPECT_TRUE(silent.front()->closed_by_peer());
  EXPECT_TRUE(other.greet()) << "another address kept its connection";
  EXPECT_LE(server_->connections(), 5u);
}

// Connections of `host` whose hello was accepted. An attacker keeps them, and asks nothing.
std::vector<std::unique_ptr<HostilePeer>> idle_connections(const std::string& address,
                                                           const std::string& host, int count) {
  std::vector<std::unique_ptr<HostilePeer>> idle;
  for (int i = 0; i < count; ++i) {
    auto peer = std::make_unique<HostilePeer>(address, host);
    if (peer->connected() && peer->greet()) idle.push_back(std::move(peer));
  }
  return idle;
}

TEST_F(RpcLimits, IdleConnectionsOfAFewPeersKeepNoOtherPeerOut) {
  serve({.max_connections = 16, .max_connections_per_peer = 4});
  std::vector<std::vector<std::unique_ptr<HostilePeer>>> attackers;
  for (const char* const host : {"127.0.0.7", "127.0.0.8", "127.0.0.9"}) {
    attackers.push_back(idle_connections(server_->address(), host, 4));
    ASSERT_EQ(attackers.back().size(), 4u);
  }
  HostilePeer more(server_->address(), "127.0.0.9");
  EXPECT_FALSE(more.greet()) << "it has its part";
  for (int i = 0; i < 3; ++i) expect_served(proto::ROLE_CLIENT);
}

TEST_F(RpcLimits, IdleConnectionsOfAgentsKeepNoOtherPeerOut) {
  serve({.max_connections = 8, .max_connections_per_peer = 4});
  std::vector<std::unique_ptr<HostilePeer>> attackers;
  for (const char* const host : {"127.0.0.8", "127.0.0.9"}) {
    for (int i = 0; i < 4; ++i) {
      attackers.push_back(std::make_unique<HostilePeer>(server_->address(), host));
      ASSERT_TRUE(attackers.back()->greet(hostile_identity(proto::ROLE_AGENT, "hostile")));
    }
  }
  expect_served();
}

TEST_F(RpcLimits, ACallThatIsOpenKeepsItsConnection) {
  serve({.max_connections = 8, .max_connections_per_peer = 4});
  auto attackers = idle_connections(server_->address(), "127.0.0.9", 4);
  HostilePeer busy(server_->address(), "127.0.0.8");
  ASSERT_TRUE(busy.greet());
  ASSERT_TRUE(busy.send(request(1, proto::AGENT_WATCH_HAVE, 600'000)));
  ASSERT_TRUE(busy.send(request(2, proto::COORDINATOR_STATUS, 60'000)));
  ASSERT_TRUE(busy.answer()) << "the first call has begun";
  auto idle = idle_connections(server_->address(), "127.0.0.8", 1);
  for (int i = 0; i < 3; ++i) expect_served(proto::ROLE_CLIENT);
  ASSERT_TRUE(busy.send(request(3, proto::COORDINATOR_STATUS, 60'000)));
  EXPECT_TRUE(busy.answer());
}

TEST_F(RpcLimits, QuietConnectionsOfAnAddressMakeRoomForItsNext) {
  serve({.max_connections = 64, .max_connections_per_peer = 4, .quiet_before_drop = 0ms});
  const auto idle = idle_connections(server_->address(), "127.0.0.9", 8);
  EXPECT_EQ(idle.size(), 8u);
  EXPECT_TRUE(idle.front()->closed_by_peer()) << "the quietest first";
  EXPECT_LE(server_->connections(), 4u);
}

TEST_F(RpcLimits, AQuarterOfTheConnectionsIsForAgents) {
  serve({.max_connections = 8});
  std::vector<std::shared_ptr<RpcClient>> commands;
  for (int i = 0; i < 6; ++i) {
    const auto client = connect(proto::ROLE_CLIENT);
    ASSERT_TRUE(client) << client.error().message();
    commands.push_back(*client);
  }
  const auto seventh = connect(proto::ROLE_CLIENT);
  ASSERT_FALSE(seventh);
  EXPECT_EQ(seventh.error().code(), ErrorCode::kExhausted);
  EXPECT_THAT(seventh.error().message(), HasSubstr("agents"));
  expect_served(proto::ROLE_AGENT);
}

TEST_F(RpcLimits, AnswersThatOnePeerDoesNotReadAreBoundedOverAllItsConnections) {
  serve();
  constexpr std::size_t kPages = 31;
  allocations::reset_peak();
  const auto before = allocations::live_bytes();
  std::vector<std::unique_ptr<HostilePeer>> hostile;
  for (int i = 0; i < 16; ++i) {
    hostile.push_back(std::make_unique<HostilePeer>(server_->address(), "127.0.0.9"));
    ASSERT_TRUE(hostile.back()->greet());
    for (std::size_t page = 0; page < kPages; ++page) {
      ASSERT_TRUE(hostile.back()->send(request(page + 1, proto::AGENT_GET_PAGE, 60'000)));
    }
    expect_served();
  }
  std::string why;
  std::size_t pages = 0;
  for (const auto& peer : hostile) {
    for (std::size_t page = 0; page < kPages; ++page) {
      const auto answer = peer->answer();
      if (answer) {
        ++pages;
      } else {
        why = answer.error().message();
      }
    }
  }
  EXPECT_LT(allocations::peak_bytes() - before, std::int64_t{200} << 20);
  EXPECT_GE(pages, 128u);
  EXPECT_THAT(why, HasSubstr("127.0.0.9 has 128"));
  ASSERT_TRUE(hostile.front()->send(request(kPages + 1, proto::AGENT_GET_PAGE, 60'000)));
  EXPECT_TRUE(hostile.front()->answer()) << "it has read them";
}

TEST(ParsedSize, ManyEmptyPartsAreRefusedBeforeTheyTakeMemory) {
  // AnnounceRequest.add, empty, as often as its method allows.
  std::string body;
  for (std::size_t i = 0; i < 2 * kMebi; ++i) body += std::string_view("\x2a\0", 2);
  proto::AnnounceRequest known;
  known.add_add();
  ASSERT_EQ(known.SerializeAsString(), body.substr(0, 2));
  allocations::reset_peak();
  const auto before = allocations::live_bytes();
  const auto parsed = parse_body<proto::AnnounceRequest>(body);
  ASSERT_FALSE(parsed);
  EXPECT_EQ(parsed.error().code(), ErrorCode::kInvalid);
  EXPECT_THAT(parsed.error().message(), HasSubstr("too many small parts"));
  EXPECT_LT(allocations::peak_bytes() - before, 1 << 20);
}

TEST(ParsedSize, TooManyMembersOfARoundAreRefusedBeforeTheyAreParsed) {
  proto::RoundReport small;
  // Of 24 bytes, so that its memory is no reason.
  small.add_members()->set_group(std::string(20, 'g'));
  ASSERT_EQ(small.ByteSizeLong(), 24u);
  const std::string member = small.SerializeAsString();
  std::string body;
  while (body.size() < 8 * kMebi) body += member;
  allocations::reset_peak();
  const auto before = allocations::live_bytes();
  const auto parsed = parse_body<proto::RoundReport>(body);
  ASSERT_FALSE(parsed);
  EXPECT_THAT(parsed.error().message(), HasSubstr("more than 65536 parts"));
  EXPECT_LT(allocations::peak_bytes() - before, 1 << 20);
}

TEST(ParsedSize, UnknownFieldsAndGroupsAreCountedToo) {
  const auto type = proto::AnnounceRequest::descriptor();
  std::string unknown;
  std::string groups;
  for (std::size_t i = 0; i < kMebi; ++i) {
    unknown += std::string_view("\x7a\0", 2);
    groups += std::string_view("\x7b\x7c", 2);
  }
  EXPECT_FALSE(check_parsed_size(*type, unknown));
  EXPECT_FALSE(check_parsed_size(*type, groups));
}

TEST(ParsedSize, HonestMessagesOfManyPartsPass) {
  proto::AnnounceRequest request;
  request.set_node_id("node");
  for (int i = 0; i < 4096; ++i) {
    auto& holding = *request.add_add();
    holding.mutable_id()->set_model("m" + std::to_string(i));
    holding.mutable_id()->set_version(1);
    holding.mutable_root()->set_value(std::string(32, 'r'));
    holding.mutable_layout()->set_value(std::string(32, 'l'));
    holding.mutable_tensor_set()->set_value(std::string(32, 't'));
  }
  for (int i = 0; i < 16384; ++i) {
    request.mutable_add(0)->mutable_covers()->add_begin(1);
    request.mutable_add(0)->mutable_covers()->add_end(1);
  }
  EXPECT_TRUE(parse_body<proto::AnnounceRequest>(request.SerializeAsString()));
  proto::RoundReport report;
  for (int i = 0; i < 140'000; ++i) {
    if (i % 10'000 == 0) report.add_described();
    report.mutable_described(report.described_size() - 1)->add_keys(1);
    report.mutable_described(report.described_size() - 1)->add_bytes(1);
  }
  for (int i = 0; i < 4096; ++i) {
    auto& member = *report.add_members();
    member.set_group("group");
    member.mutable_id()->set_model("m");
    member.mutable_root()->set_value(std::string(32, 'r'));
    member.mutable_contents()->set_value(std::string(32, 'c'));
    for (int phase = 0; phase < 11; ++phase) member.add_phases()->set_elapsed_us(1);
  }
  EXPECT_TRUE(parse_body<proto::RoundReport>(report.SerializeAsString()));
}

TEST(PeerBudgets, ABucketGivesItsBurstAndThenItsRate) {
  RateBudgets rates;
  const TimePoint start{std::chrono::seconds(100)};
  const auto take = [&](TimePoint now, const std::string& key = "10.0.0.1") {
    return rates.take(key, "COORDINATOR_STATUS", 1, 10, 20, now);
  };
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(take(start)) << i;
  const auto refused = take(start);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message(), HasSubstr("call again in 100 ms"));
  EXPECT_TRUE(take(start, "10.0.0.2")) << "others have their own";
  EXPECT_TRUE(take(start, "")) << "the unix socket has none";
  EXPECT_TRUE(take(start + std::chrono::milliseconds(100)));
  EXPECT_FALSE(take(start + std::chrono::milliseconds(100)));
}

TEST(PeerBudgets, BucketsThatAreFullAreForgotten) {
  RateBudgets rates;
  for (int i = 0; i < 100'000; ++i) {
    const TimePoint now{std::chrono::seconds(100 + i)};
    ASSERT_TRUE(rates.take("10.0.0." + std::to_string(i), "M", 1, 10, 20, now));
  }
  EXPECT_LE(rates.size(), 1024u);
}

TEST(PeerBudgets, ACertificateCountsByItsNameAndASecretByTheAddress) {
  Peer peer;
  peer.address = "10.0.0.3:51234";
  EXPECT_EQ(budget_key(peer), "10.0.0.3");
  peer.proof = Proof::kSecret;
  peer.principals = {"secret:abcd"};
  EXPECT_EQ(budget_key(peer), "10.0.0.3");
  peer.proof = Proof::kCertificate;
  peer.principals = {"spiffe://example.org/rekindle/agent/gpu-7", "dns:gpu-7"};
  EXPECT_EQ(budget_key(peer), "spiffe://example.org/rekindle/agent/gpu-7");
  peer.principals = {"spiffe://example.org/rekindle/agent"};
  EXPECT_EQ(budget_key(peer), "10.0.0.3") << "all agents share it";
  peer.local_user = true;
  EXPECT_EQ(budget_key(peer), "");
}

TEST(PeerBudgets, AllAddressesOfAnIPv6NetworkCountAsOneHost) {
  const auto key = [](const std::string& address) {
    Peer peer;
    peer.address = address;
    return budget_key(peer);
  };
  EXPECT_EQ(key("[2001:db8:1:2::1]:7400"), "2001:db8:1:2::/64");
  EXPECT_EQ(key("[2001:db8:1:2:ffff:ffff:ffff:ffff]:1"), "2001:db8:1:2::/64");
  EXPECT_EQ(key("[2001:db8:1:3::1]:7400"), "2001:db8:1:3::/64");
  EXPECT_EQ(key("[::1]:7400"), "::1");
  EXPECT_NE(key("[fe80::1%1]:7400"), key("[fe80::2%1]:7400")) << "neighbours on a link";
  EXPECT_NE(key("[64:ff9b::a00:1]:7400"), key("[64:ff9b::a00:2]:7400")) << "hosts with IPv4";
  EXPECT_EQ(key("10.0.0.3:7400"), "10.0.0.3");
  EXPECT_EQ(key("unknown"), "unknown");
}

TEST(PeerBudgets, AnIPv6NetworkHasOneBudgetHoweverManyAddressesItUses) {
  RateBudgets rates;
  const TimePoint now{std::chrono::seconds(100)};
  int taken = 0;
  for (int i = 0; i < 1000; ++i) {
    Peer peer;
    peer.address = fmt::format("[2001:db8:1:2::{:x}]:7400", i + 1);
    if (rates.take(budget_key(peer), "COORDINATOR_STATUS", 1, 10, 20, now)) ++taken;
  }
  EXPECT_EQ(taken, 20);
  EXPECT_EQ(rates.size(), 1u);
}

TEST(PeerBudgets, LargeFramesOfOnePeerLeaveRoomForTheOthers) {
  LargeFrames frames;
  std::vector<LargeFrames::Share> held;
  for (int i = 0; i < 16; ++i) {
    auto share = frames.take("a", 4 * kMebi);
    ASSERT_TRUE(share);
    held.push_back(std::move(*share));
  }
  EXPECT_FALSE(frames.take("a", 4 * kMebi));
  EXPECT_TRUE(frames.take("b", 4 * kMebi));
  held.pop_back();
  EXPECT_TRUE(frames.take("a", 4 * kMebi));
  held.clear();
  EXPECT_EQ(frames.bytes(), 0u);
}

}  // namespace
}  // namespace rekindle::rpc
