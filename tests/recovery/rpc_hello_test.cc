#include <filesystem>
#include <future>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "recovery/rpc/address.h"
#include "recovery/rpc/handshake.h"
#include "recovery/rpc/rpc.h"
#include "src/base/unique_fd.h"
#include "tests/recovery/rpc_fixture.h"

namespace rekindle::rpc {
namespace {

using namespace testing;

class RpcHello : public ::testing::Test {
 protected:
  ~RpcHello() override {
    if (server_) loop_.run(server_->close(5s));
    if (!directory_.empty()) std::filesystem::remove_all(directory_);
  }
  void serve(Identity identity, const std::string& address = "127.0.0.1:0") {
    identity_ = identity;
    server_ = RpcServer::create(loop_.executor(), std::move(identity));
    server_->handle(
        proto::LOCAL_PLAN,
        [](const Peer& peer, std::string, std::shared_ptr<EventSink>)
            -> async::Task<Result<std::string>> { co_return peer.node_id; },
        true);
    if (address.starts_with("unix:")) {
      auto listening = server_->listen_unix(address.substr(5));
      ASSERT_TRUE(listening) << listening.error().message();
      address_ = address;
    } else {
      auto bound = server_->listen(address);
      ASSERT_TRUE(bound) << bound.error().message();
      address_ = *bound;
    }
  }
  Result<std::shared_ptr<RpcClient>> connect(Identity identity,
                                             std::optional<Incarnation> expected = {}) {
    return loop_.run(RpcClient::connect(address_, std::move(identity), 5s, expected));
  }
  std::string directory() {
    if (directory_.empty()) {
      char name[] = "/tmp/rekindle-rpc-XXXXXX";
      directory_ = ::mkdtemp(name);
    }
    return directory_;
  }

  Loop loop_;
  Identity identity_;
  std::unique_ptr<RpcServer> server_;
  std::string address_;
  std::string directory_;
};

constexpr const char* kSecret = "0123456789abcdef-secret";

TEST_F(RpcHello, TheSameSecretOnBothSidesConnects) {
  serve(make_identity(proto::ROLE_AGENT, "a", kSecret));
  const auto client = connect(make_identity(proto::ROLE_PULLER, "p", kSecret));
  ASSERT_TRUE(client) << client.error().message();
}

TEST_F(RpcHello, AnotherSecretIsDeniedAndNamed) {
  serve(make_identity(proto::ROLE_AGENT, "a", kSecret));
  const auto client = connect(make_identity(proto::ROLE_PULLER, "p", "another secret, as long"));
  ASSERT_FALSE(client);
  EXPECT_EQ(client.error().code(), ErrorCode::kDenied);
  EXPECT_NE(client.error().message().find("different cluster secrets"), std::string::npos)
      << client.error().message();
  EXPECT_EQ(client.error().message().find(kSecret), std::string::npos);
}

TEST_F(RpcHello, ASecretOnOneSideOnlyIsDeniedBothWays) {
  serve(make_identity(proto::ROLE_AGENT, "a", kSecret));
  const auto without = connect(make_identity(proto::ROLE_PULLER, "p"));
  ASSERT_FALSE(without);
  EXPECT_EQ(without.error().code(), ErrorCode::kDenied);
  EXPECT_NE(without.error().message().find("--secret-file"), std::string::npos);
  loop_.run(server_->close(5s));
  serve(make_identity(proto::ROLE_AGENT, "a"));
  const auto with = connect(make_identity(proto::ROLE_PULLER, "p", kSecret));
  ASSERT_FALSE(with);
  EXPECT_EQ(with.error().code(), ErrorCode::kDenied);
  EXPECT_NE(with.error().message().find("--secret-file"), std::string::npos);
}

TEST_F(RpcHello, AnotherIncarnationThanMeantIsStale) {
  serve(make_identity(proto::ROLE_AGENT, "a"));
  EXPECT_TRUE(connect(make_identity(proto::ROLE_PULLER, "p"), identity_.incarnation));
  const auto stale = connect(make_identity(proto::ROLE_PULLER, "p"), Incarnation::random());
  ASSERT_FALSE(stale);
  EXPECT_EQ(stale.error().code(), ErrorCode::kStale);
}

TEST_F(RpcHello, EpochsTravelInTheHello) {
  Identity server = make_identity(proto::ROLE_COORDINATOR, "c");
  server.epoch = [] { return std::uint64_t{17}; };
  serve(server);
  const auto client = connect(make_identity(proto::ROLE_AGENT, "a"));
  ASSERT_TRUE(client);
  EXPECT_EQ((*client)->peer().epoch, 17u);
}

proto::Hello hello_with(const std::string& name, std::uint32_t min, std::uint32_t max) {
  auto hello = make_hello(make_identity(proto::ROLE_AGENT, name), "", {});
  hello.set_protocol_min(min);
  hello.set_protocol_max(max);
  hello.set_software("rekindle of " + name);
  return hello;
}

TEST(HelloRules, EqualAndOverlappingProtocolRangesMeet) {
  const auto own = hello_with("own", 4, 5);
  for (const auto& [min, max] : {std::pair{4u, 5u}, {5u, 6u}, {3u, 4u}, {5u, 5u}, {1u, 9u}}) {
    EXPECT_TRUE(check_hello(own, hello_with("other", min, max))) << min << ".." << max;
  }
  EXPECT_EQ(check_hello(own, hello_with("other", 6, 4)).error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(check_hello(own, hello_with("other", 0, 4)).error().code(), ErrorCode::kInvalid);
}

TEST(HelloRules, ProtocolRangesThatDoNotMeetAreNamedWithTheEndToUpgrade) {
  const auto own = hello_with("own", 4, 5);
  const auto too_new = check_hello(own, hello_with("other", 6, 7));
  ASSERT_FALSE(too_new);
  EXPECT_EQ(too_new.error().code(), ErrorCode::kDenied);
  EXPECT_EQ(too_new.error().message(),
            "agent other (rekindle of other) speaks protocol 6..7, agent own (rekindle of own) "
            "speaks 4..5: upgrade agent own (rekindle of own), at least to the release before that "
            "of the other end");
  const auto too_old = check_hello(own, hello_with("other", 2, 3));
  ASSERT_FALSE(too_old);
  EXPECT_EQ(too_old.error().code(), ErrorCode::kDenied);
  EXPECT_EQ(too_old.error().message(),
            "agent own (rekindle of own) speaks protocol 4..5, agent other (rekindle of other) "
            "speaks 2..3: upgrade agent other (rekindle of other), at least to the release before "
            "that of the other end");
}

TEST(HelloRules, AMalformedHelloIsRefused) {
  const auto own = make_hello(make_identity(proto::ROLE_AGENT, "a"), "", {});
  const auto broken = [&](auto change) {
    auto peer = make_hello(make_identity(proto::ROLE_AGENT, "b"), "", {});
    change(peer);
    const auto checked = check_hello(own, peer);
    return !checked && checked.error().code() == ErrorCode::kInvalid;
  };
  EXPECT_TRUE(broken([](auto& hello) { hello.set_nonce("short"); }));
  EXPECT_TRUE(broken([](auto& hello) { hello.set_incarnation("short"); }));
  EXPECT_TRUE(broken([](auto& hello) { hello.set_node_id("two words"); }));
  EXPECT_TRUE(broken([](auto& hello) { hello.set_node_id(std::string(300, 'n')); }));
  EXPECT_FALSE(broken([](auto&) {}));
}

TEST(HelloRules, AProofCannotBeReflectedOrReplayed) {
  const auto a = make_hello(make_identity(proto::ROLE_AGENT, "a"), "s", {});
  const auto b = make_hello(make_identity(proto::ROLE_AGENT, "b"), "s", {});
  proto::HelloProof proof;
  proof.set_mac(make_proof("s", Side::kCaller, a, b));
  EXPECT_TRUE(check_proof(proof, "s", Side::kCaller, a, b));
  EXPECT_FALSE(check_proof(proof, "s", Side::kServer, a, b)) << "as the other side";
  EXPECT_FALSE(check_proof(proof, "s", Side::kCaller, b, a)) << "as the other party";
  auto later = b;
  later.set_nonce(std::string(kNonceBytes, 'n'));
  EXPECT_FALSE(check_proof(proof, "s", Side::kCaller, a, later)) << "for another challenge";
  auto forged = a;
  forged.set_node_id("c");
  EXPECT_FALSE(check_proof(proof, "s", Side::kCaller, forged, b)) << "under another name";
}

TEST_F(RpcHello, Ipv6AndDualStackWork) {
  serve(make_identity(proto::ROLE_AGENT, "a"), "[::1]:0");
  EXPECT_TRUE(address_.starts_with("[::1]:")) << address_;
  EXPECT_TRUE(connect(make_identity(proto::ROLE_PULLER, "p")));
  loop_.run(server_->close(5s));
  serve(make_identity(proto::ROLE_AGENT, "a"), "[::]:0");
  address_ = "127.0.0.1" + address_.substr(address_.rfind(':'));
  EXPECT_TRUE(connect(make_identity(proto::ROLE_PULLER, "p")));
  address_ = "localhost" + address_.substr(address_.rfind(':'));
  const auto by_name = connect(make_identity(proto::ROLE_PULLER, "p"));
  EXPECT_TRUE(by_name) << by_name.error().message();
}

TEST_F(RpcHello, APortInUseIsNamed) {
  serve(make_identity(proto::ROLE_AGENT, "a"));
  auto second = RpcServer::create(loop_.executor(), make_identity(proto::ROLE_AGENT, "b"));
  const auto bound = second->listen(address_);
  ASSERT_FALSE(bound);
  EXPECT_EQ(bound.error().code(), ErrorCode::kUnavailable);
  EXPECT_NE(bound.error().message().find(address_), std::string::npos);
}

TEST_F(RpcHello, NobodyThereAndUnknownNamesAreNamed) {
  serve(make_identity(proto::ROLE_AGENT, "a"));
  loop_.run(server_->close(5s));
  const auto refused = connect(make_identity(proto::ROLE_PULLER, "p"));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kPeerLost);
  EXPECT_NE(refused.error().message().find(address_), std::string::npos);
  address_ = "no-such-host.invalid:7400";
  const auto unknown = connect(make_identity(proto::ROLE_PULLER, "p"));
  ASSERT_FALSE(unknown);
  EXPECT_NE(unknown.error().message().find("no-such-host.invalid"), std::string::npos);
}

TEST(Resolve, ANameServerThatNeverAnswersIsGivenUpAndNamed) {
  Loop loop;
  std::promise<void> release;
  const auto released = release.get_future().share();
  const LookUp hangs = [released](const HostPort&) -> Result<std::vector<Endpoint>> {
    released.wait();
    return std::vector<Endpoint>();
  };
  const auto soon = std::chrono::steady_clock::now() + 50ms;
  const auto endpoints = loop.run(resolve({"db.example", 7400}, soon, hangs));
  ASSERT_FALSE(endpoints);
  EXPECT_EQ(endpoints.error().code(), ErrorCode::kTimeout);
  EXPECT_NE(endpoints.error().message().find("db.example"), std::string::npos);
  release.set_value();  // the thread ends after everybody has gone
}

TEST(Resolve, AnAnswerFromTheLookupThreadReachesTheCaller) {
  Loop loop;
  const LookUp fixed = [](const HostPort& address) -> Result<std::vector<Endpoint>> {
    return numeric_endpoints({"192.0.2.7", address.port});
  };
  const auto later = std::chrono::steady_clock::now() + kTestDeadline;
  const auto endpoints = loop.run(resolve({"db.example", 7400}, later, fixed));
  ASSERT_TRUE(endpoints) << endpoints.error().message();
  EXPECT_EQ(to_string(endpoints->front()), "192.0.2.7:7400");
}

TEST_F(RpcHello, BadAddressesAreInvalid) {
  for (const char* address : {"", "host", ":7400", "host:", "host:70000", "host:7x", "::1:7400",
                              "[::1]7400", "[]:1", "unix:", "a b:1"}) {
    address_ = address;
    const auto client = connect(make_identity(proto::ROLE_CLIENT, ""));
    ASSERT_FALSE(client) << address;
    EXPECT_EQ(client.error().code(), ErrorCode::kInvalid) << client.error().message();
  }
}

TEST_F(RpcHello, TheUnixSocketServesTheSameUserWithoutASecret) {
  serve(make_identity(proto::ROLE_AGENT, "a", kSecret), "unix:" + directory() + "/agent.sock");
  const auto client = connect(make_identity(proto::ROLE_CLIENT, "cli"));
  ASSERT_TRUE(client) << client.error().message();
  EXPECT_TRUE((*client)->peer().local_user);
  EXPECT_EQ(*loop_.run((*client)->call_raw(proto::LOCAL_PLAN, "", 5s)), "cli");
}

TEST_F(RpcHello, AUnixSocketInADirectoryOpenToOthersIsRefusedByBothEnds) {
  const std::string path = directory() + "/agent.sock";
  serve(make_identity(proto::ROLE_AGENT, "a"), "unix:" + path);
  ::chmod(directory().c_str(), 0755);
  EXPECT_EQ(connect(make_identity(proto::ROLE_CLIENT, "")).error().code(), ErrorCode::kDenied);
  auto second = RpcServer::create(loop_.executor(), make_identity(proto::ROLE_AGENT, "b"));
  EXPECT_EQ(second->listen_unix(path + "2").error().code(), ErrorCode::kDenied);
}

TEST_F(RpcHello, ADeadSocketFileIsReplacedALiveOneIsNot) {
  const std::string path = directory() + "/agent.sock";
  {
    // What a killed agent leaves behind.
    const UniqueFd dead(::socket(AF_UNIX, SOCK_STREAM, 0));
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    path.copy(name.sun_path, sizeof name.sun_path - 1);
    ASSERT_EQ(::bind(dead.get(), reinterpret_cast<sockaddr*>(&name), sizeof name), 0);
  }
  serve(make_identity(proto::ROLE_AGENT, "a"), "unix:" + path);
  EXPECT_TRUE(connect(make_identity(proto::ROLE_CLIENT, "")));
  auto second = RpcServer::create(loop_.executor(), make_identity(proto::ROLE_AGENT, "b"));
  const auto live = second->listen_unix(path);
  ASSERT_FALSE(live);
  EXPECT_EQ(live.error().code(), ErrorCode::kUnavailable);
  EXPECT_TRUE(connect(make_identity(proto::ROLE_CLIENT, ""))) << "the live one still serves";
  loop_.run(server_->close(5s));
  EXPECT_FALSE(std::filesystem::exists(path)) << "a clean end removes the file";
}

TEST_F(RpcHello, AFileInPlaceOfTheSocketIsLeftAlone) {
  const std::string path = directory() + "/agent.sock";
  ::close(::open(path.c_str(), O_CREAT | O_WRONLY, 0600));
  auto server = RpcServer::create(loop_.executor(), make_identity(proto::ROLE_AGENT, "a"));
  EXPECT_EQ(server->listen_unix(path).error().code(), ErrorCode::kDenied);
  EXPECT_TRUE(std::filesystem::is_regular_file(path));
}

}  // namespace
}  // namespace rekindle::rpc
