#include <atomic>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/rpc/convert.h"
#include "recovery/rpc/credentials.h"
#include "recovery/rpc/tls.h"
#include "tests/recovery/rpc_certificates.h"
#include "tests/recovery/rpc_raw.h"

// Who may talk to whom: certificates, cluster secrets, keys of processes, and peers that lie about
// them.
namespace rekindle::rpc {
namespace {

using namespace testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kSecretA = "0123456789abcdef-secret-a";
constexpr const char* kSecretB = "0123456789abcdef-secret-b";
constexpr const char* kDomain = "URI:spiffe://example.org/rekindle/";

std::string describe(const Peer& peer) {
  std::string text = fmt::format("{} {} {}", role_name(peer.role), peer.node_id,
                                 peer.encrypted ? "encrypted" : "plain");
  for (const std::string& name : peer.principals) text += " " + name;
  return text;
}

class RpcTls : public ::testing::Test {
 protected:
  void serve(Identity identity, ServerLimits limits = {}) {
    server_.reset();
    server_.emplace(std::move(identity), limits, [this](RpcServer& server) {
      server.handle(proto::AGENT_STATUS,
                    [this](const Peer& peer, std::string,
                           std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> {
                      ++calls_;
                      co_return describe(peer);
                    });
      server.handle(proto::AGENT_GET_PAGE,
                    [](const Peer&, std::string body,
                       std::shared_ptr<EventSink>) -> async::Task<Result<std::string>> {
                      co_return body + std::string(8u << 20, 'p');
                    });
    });
    address_ = server_->address();
  }
  void serve(proto::Role role, const std::string& node, const CredentialOptions& options) {
    serve(rpc::make_identity(role, node, Credentials::open(options).value()));
  }
  Result<std::shared_ptr<RpcClient>> connect(Identity identity,
                                             proto::Role wanted = proto::ROLE_UNKNOWN) {
    return loop_.run(RpcClient::connect(address_, std::move(identity), 10s, {}, wanted));
  }
  Result<std::shared_ptr<RpcClient>> connect(const CredentialOptions& options,
                                             proto::Role role = proto::ROLE_CLIENT,
                                             const std::string& node = "caller") {
    return connect(rpc::make_identity(role, node, Credentials::open(options).value()));
  }
  std::string status(const std::shared_ptr<RpcClient>& client) {
    return loop_.run(client->call_raw(proto::AGENT_STATUS, "", 10s)).value();
  }
  std::string refusal(Result<std::shared_ptr<RpcClient>> client) {
    if (client) return "accepted";
    EXPECT_EQ(client.error().code(), ErrorCode::kDenied) << client.error().message();
    EXPECT_EQ(client.error().message().find('\n'), std::string::npos);
    return client.error().message();
  }
  CredentialOptions secrets(const std::string& file, const std::string& text) {
    CredentialOptions options;
    options.secret_file = directory_.write(file, text);
    return options;
  }

  TestDirectory directory_;
  TestAuthority authority_{directory_, "fleet"};
  Loop loop_;
  std::string address_;
  std::atomic<int> calls_ = 0;
  std::optional<ServerThread> server_;
};

TEST_F(RpcTls, ASharedSecretEncryptsAndNamesItself) {
  serve(make_identity(proto::ROLE_AGENT, "a", kSecretA));
  const auto client = connect(make_identity(proto::ROLE_PULLER, "p", kSecretA));
  ASSERT_TRUE(client) << client.error().message();
  const std::string name = "secret:" + SharedKey(kSecretA).id;
  EXPECT_EQ(status(*client), "puller p encrypted " + name);
  EXPECT_EQ((*client)->peer().proof, Proof::kSecret);
  EXPECT_THAT((*client)->peer().principals, ElementsAre(name));
  EXPECT_EQ(incarnation_of((*client)->peer().public_key), (*client)->peer().incarnation);
}

TEST_F(RpcTls, CertificatesNameBothEnds) {
  serve(proto::ROLE_AGENT, "gpu-7",
        authority_.issue("a", {.names = std::string(kDomain) + "agent/gpu-7"}));
  const auto client = connect(authority_.issue(
      "c", {.names = "DNS:desk.example.org," + std::string(kDomain) + "client/ann"}));
  ASSERT_TRUE(client) << client.error().message();
  EXPECT_EQ(
      status(*client),
      "client caller encrypted spiffe://example.org/rekindle/client/ann dns:desk.example.org");
  EXPECT_EQ((*client)->peer().proof, Proof::kCertificate);
  EXPECT_THAT((*client)->peer().principals,
              ElementsAre("spiffe://example.org/rekindle/agent/gpu-7"));
}

TEST_F(RpcTls, ACertificateThatIsNotValidIsRefusedWithItsReason) {
  auto server = authority_.issue("server");
  serve(proto::ROLE_AGENT, "a", server);
  TestAuthority strangers(directory_, "strangers");
  EXPECT_THAT(refusal(connect(authority_.issue("old", {.ends_s = -60}))), HasSubstr("expired at"));
  EXPECT_THAT(refusal(connect(authority_.issue("young", {.begins_s = 600}))),
              HasSubstr("not valid before"));
  auto stranger = strangers.issue("stranger");
  stranger.authority_file = server.authority_file;
  EXPECT_THAT(refusal(connect(stranger)), HasSubstr("unknown authority"));
  EXPECT_THAT(refusal(connect(make_identity(proto::ROLE_CLIENT, "c"))), HasSubstr("--tls-cert"));
  EXPECT_THAT(refusal(connect(make_identity(proto::ROLE_CLIENT, "c", kSecretA))),
              HasSubstr("certificate"));
  EXPECT_EQ(refusal(connect(authority_.issue("good"))), "accepted");
  EXPECT_EQ(calls_, 0);
}

TEST_F(RpcTls, ACertificateThatNamesNobodyIsRefused) {
  serve(proto::ROLE_AGENT, "a", authority_.issue("server"));
  EXPECT_THAT(refusal(connect(authority_.issue("address", {.names = "IP:127.0.0.1"}))),
              HasSubstr("neither a SPIFFE URI nor a DNS name"));
  EXPECT_THAT(refusal(connect(authority_.issue("uri", {.names = "URI:http://example.org/x"}))),
              HasSubstr("neither a SPIFFE URI nor a DNS name"));
  const auto nameless = authority_.issue("nameless", {.names = std::string(kDomain) + "agent/"});
  EXPECT_THAT(refusal(connect(nameless, proto::ROLE_AGENT, "")), HasSubstr("agent"));
}

TEST_F(RpcTls, APullerHasTheCertificateOfAPullerOrOfItsUser) {
  serve(proto::ROLE_AGENT, "a", authority_.issue("server"));
  for (const char* const role : {"puller", "client"}) {
    const auto options =
        authority_.issue(role, {.names = std::string(kDomain) + role + std::string("/ann")});
    const auto connected = connect(options, proto::ROLE_PULLER, "ann");
    EXPECT_TRUE(connected) << connected.error().message();
  }
  const auto puller = authority_.issue("p", {.names = std::string(kDomain) + "puller/ann"});
  EXPECT_THAT(refusal(connect(puller, proto::ROLE_CLIENT, "ann")),
              HasSubstr("for the role puller"));
}

// A stranger could make members leave their coordinator by a high epoch.
TEST_F(RpcTls, OnlyMembersTellAnEpoch) {
  auto identity = make_identity(proto::ROLE_AGENT, "a", kSecretA);
  std::atomic<std::uint64_t> heard = 0;
  identity.heard_epoch = [&heard](std::uint64_t epoch) { heard = epoch; };
  serve(identity);
  for (const auto role : {proto::ROLE_CLIENT, proto::ROLE_PULLER, proto::ROLE_AGENT}) {
    auto caller = make_identity(role, "c", kSecretA);
    caller.epoch = [] { return std::uint64_t{7}; };
    const auto client = connect(caller);
    ASSERT_TRUE(client) << client.error().message();
    (void)status(*client);
    EXPECT_EQ(heard, role == proto::ROLE_AGENT ? 7u : 0u);
  }
}

TEST_F(RpcTls, ACallerRefusesTheCertificatesOfTheWrongServer) {
  const auto caller = authority_.issue("caller", {.names = std::string(kDomain) + "client/ann"});
  const auto refused = [&](const Wanted& wanted, proto::Role role = proto::ROLE_AGENT) {
    serve(role, "gpu-7", authority_.issue("server", wanted));
    return refusal(connect(caller));
  };
  EXPECT_THAT(refused({.ends_s = -60}), HasSubstr("expired at"));
  EXPECT_THAT(refused({.names = "DNS:elsewhere.example.org"}), HasSubstr("names neither the host"));
  EXPECT_THAT(refused({.names = "URI:spiffe://other.org/rekindle/agent/gpu-7"}),
              HasSubstr("trust domain"));
  EXPECT_THAT(refused({.names = std::string(kDomain) + "client/eve"}), HasSubstr("names neither"));
  EXPECT_THAT(refused({.names = std::string(kDomain) + "agent/gpu-8"}),
              HasSubstr("--node-id gpu-8"));
  EXPECT_THAT(refused({.names = std::string(kDomain) + "agent/gpu-7"}, proto::ROLE_COORDINATOR),
              HasSubstr("which is for the role agent"));
  EXPECT_EQ(refused({.names = std::string(kDomain) + "agent"}), "accepted") << "of any agent";
  EXPECT_THAT(refused({.names = std::string(kDomain) + "agent/"}), HasSubstr("names neither"));
  EXPECT_THAT(refused({.names = std::string(kDomain) + "agent"}, proto::ROLE_COORDINATOR),
              HasSubstr("which is for the role agent"));
  EXPECT_EQ(refused({.names = std::string(kDomain) + "agent/gpu-7"}), "accepted");
  const auto identity =
      rpc::make_identity(proto::ROLE_CLIENT, "caller", Credentials::open(caller).value());
  EXPECT_THAT(refusal(connect(identity, proto::ROLE_COORDINATOR)),
              HasSubstr("agent answers, not coordinator"));
  TestAuthority strangers(directory_, "strangers");
  serve(proto::ROLE_AGENT, "gpu-7", strangers.issue("server"));
  EXPECT_THAT(refusal(connect(caller)), HasSubstr("unknown authority"));
}

// Such as pullers behind one translator of addresses.
TEST_F(RpcTls, CertificatesBehindOneAddressHaveConnectionsOfTheirOwn) {
  const auto own = authority_.issue("a", {.names = std::string(kDomain) + "agent/gpu-7"});
  serve(rpc::make_identity(proto::ROLE_AGENT, "gpu-7", Credentials::open(own).value()),
        {.max_connections_per_peer = 2});
  std::vector<std::shared_ptr<RpcClient>> clients;
  CredentialOptions last;
  for (int i = 0; i < 5; ++i) {
    const std::string name = fmt::format("c{}", i);
    last = authority_.issue(name, {.names = kDomain + ("client/" + name)});
    const auto client = connect(last);
    ASSERT_TRUE(client) << client.error().message();
    clients.push_back(*client);
  }
  const auto second = connect(last);
  ASSERT_TRUE(second) << second.error().message();
  const auto third = connect(last);
  ASSERT_FALSE(third);
  EXPECT_EQ(third.error().code(), ErrorCode::kExhausted);
  EXPECT_THAT(third.error().message(), HasSubstr("client/c4 has 2 connections"));
  for (const auto& client : clients) EXPECT_TRUE(client->connected());
}

TEST_F(RpcTls, AnAgentCannotUseAnotherNodesName) {
  serve(proto::ROLE_COORDINATOR, "coordinator",
        authority_.issue("c", {.names = std::string(kDomain) + "coordinator/c1"}));
  const auto mine = authority_.issue("a", {.names = std::string(kDomain) + "agent/gpu-7"});
  EXPECT_THAT(refusal(connect(mine, proto::ROLE_AGENT, "gpu-8")), HasSubstr("agent gpu-8 has the"));
  EXPECT_EQ(refusal(connect(mine, proto::ROLE_AGENT, "gpu-7")), "accepted");
  const auto person = authority_.issue("p", {.names = std::string(kDomain) + "client/ann"});
  EXPECT_THAT(refusal(connect(person, proto::ROLE_AGENT, "ann")), HasSubstr("for the role client"));
  EXPECT_EQ(refusal(connect(person, proto::ROLE_PULLER, "any-name")), "accepted");
}

TEST_F(RpcTls, ARevokedCertificateIsRefusedAndItsOpenConnectionEnds) {
  auto server = authority_.issue("server");
  const auto caller = authority_.issue("caller");
  server.revocation_file = authority_.revoke_last(false);
  serve(proto::ROLE_AGENT, "a", server);
  const auto before = connect(caller);
  ASSERT_TRUE(before) << before.error().message();
  authority_.revoke_last();
  std::string last;
  loop_.run_until([&] {
    last = refusal(connect(caller));
    return last != "accepted";
  });
  EXPECT_THAT(last, HasSubstr("is revoked"));
  loop_.run_until([&] { return !(*before)->connected(); });
}

TEST_F(RpcTls, AConnectionEndsWithItsCertificateOrItsSecret) {
  auto server = authority_.issue("server");
  server.secret_file = secrets("secret", kSecretA).secret_file;
  const auto credentials = Credentials::open(server).value();
  serve(rpc::make_identity(proto::ROLE_AGENT, "a", credentials));
  const auto lasting = connect(authority_.issue("lasting"));
  const auto brief = connect(authority_.issue("brief", {.ends_s = 3}));
  const auto by_secret = connect(make_identity(proto::ROLE_CLIENT, "c", kSecretA));
  ASSERT_TRUE(lasting && brief && by_secret);
  directory_.write("secret", kSecretB);
  ASSERT_TRUE(credentials->reload(server));
  loop_.run_until([&] { return !(*brief)->connected() && !(*by_secret)->connected(); });
  EXPECT_THAT(status(*lasting), HasSubstr("encrypted"));
}

TEST_F(RpcTls, ARotatedCertificateServesTheNextHandshakesAndOpenCallsGoOn) {
  const auto server = authority_.issue("server", {.names = "IP:127.0.0.1,DNS:first.example.org"});
  serve(proto::ROLE_AGENT, "a", server);
  const auto caller = authority_.issue("caller");
  const auto open = connect(caller);
  ASSERT_TRUE(open) << open.error().message();
  EXPECT_THAT((*open)->peer().principals, ElementsAre("dns:first.example.org"));
  directory_.write("server.crt", "no certificate");
  std::this_thread::sleep_for(1100ms);
  EXPECT_TRUE(connect(caller)) << "a bad file keeps the certificate in use";
  authority_.issue("server", {.names = "IP:127.0.0.1,DNS:second.example.org"});
  loop_.run_until([&] {
    status(*open);
    const auto next = connect(caller);
    EXPECT_TRUE(next) << next.error().message();
    return !next || (*next)->peer().principals.front() == "dns:second.example.org";
  });
  EXPECT_THAT(status(*open), HasSubstr("encrypted"));
}

TEST_F(RpcTls, S17SecretsRotateWithoutARefusedHandshake) {
  const auto options = secrets("server", kSecretA);
  const auto credentials = Credentials::open(options).value();
  serve(rpc::make_identity(proto::ROLE_AGENT, "a", credentials));
  const auto both = [&] { return std::string(kSecretA) + "\n" + kSecretB + "\n"; };
  const auto caller_options = secrets("caller", kSecretA);
  const auto caller = Credentials::open(caller_options).value();
  const auto connects = [&] {
    return connect(rpc::make_identity(proto::ROLE_CLIENT, "c", caller)).has_value();
  };
  EXPECT_TRUE(connects());
  directory_.write("server", both());
  ASSERT_TRUE(credentials->reload(options));
  EXPECT_TRUE(connects()) << "the server accepts either";
  directory_.write("caller", std::string(kSecretB) + "\n" + kSecretA);
  ASSERT_TRUE(caller->reload(caller_options));
  EXPECT_TRUE(connects()) << "the caller uses the new one";
  directory_.write("server", kSecretB);
  ASSERT_TRUE(credentials->reload(options));
  EXPECT_TRUE(connects()) << "the old one has gone";
  directory_.write("caller", kSecretA);
  ASSERT_TRUE(caller->reload(caller_options));
  EXPECT_FALSE(connects());
  directory_.write("caller", "short");
  EXPECT_FALSE(caller->reload(caller_options));
  EXPECT_EQ(caller->secret().reveal(), kSecretA) << "a bad file changes nothing";
  directory_.write("caller", both() + "a third secret, as long");
  EXPECT_FALSE(caller->reload(caller_options));
}

TEST_F(RpcTls, ServersWithACertificateAndASecretTakeEither) {
  auto options = authority_.issue("server");
  options.secret_file = secrets("secret", kSecretA).secret_file;
  serve(proto::ROLE_AGENT, "a", options);
  const auto by_secret = connect(make_identity(proto::ROLE_CLIENT, "c", kSecretA));
  ASSERT_TRUE(by_secret) << by_secret.error().message();
  EXPECT_EQ((*by_secret)->peer().proof, Proof::kSecret);
  const auto by_certificate = connect(authority_.issue("caller"));
  ASSERT_TRUE(by_certificate) << by_certificate.error().message();
  const auto with_both = connect(options);
  ASSERT_TRUE(with_both) << with_both.error().message();
  EXPECT_EQ((*with_both)->peer().proof, Proof::kCertificate) << "it says more";
  serve(make_identity(proto::ROLE_AGENT, "a", kSecretA));
  const auto to_secret = connect(options);
  ASSERT_TRUE(to_secret) << to_secret.error().message();
  EXPECT_EQ((*to_secret)->peer().proof, Proof::kSecret) << "the server has no certificate";
}

// Passes bytes on between a caller and the server.
class Relay {
 public:
  explicit Relay(const std::string& to) : server_(to) {
    listener_.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof name;
    ::bind(listener_.get(), reinterpret_cast<sockaddr*>(&name), size);
    ::listen(listener_.get(), 1);
    ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&name), &size);
    address_ = fmt::format("127.0.0.1:{}", ntohs(name.sin_port));
    thread_ = std::thread([this] { run(); });
  }
  ~Relay() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    ::shutdown(server_.fd(), SHUT_RDWR);
    ::shutdown(caller_.get(), SHUT_RDWR);
    thread_.join();
  }
  const std::string& address() const { return address_; }
  bool inject(std::string_view bytes) { return server_.send(bytes); }
  bool server_hung_up() { return server_gone_; }

 private:
  void run() {
    caller_.reset(::accept(listener_.get(), nullptr, nullptr));
    std::thread back([this] {
      pass(server_.fd(), caller_.get());
      server_gone_ = true;
    });
    pass(caller_.get(), server_.fd());
    back.join();
  }
  static void pass(int from, int to) {
    char chunk[4096];
    for (;;) {
      const ssize_t got = ::recv(from, chunk, sizeof chunk, 0);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (got <= 0) break;
      if (::send(to, chunk, static_cast<std::size_t>(got), MSG_NOSIGNAL) <= 0) break;
    }
    ::shutdown(to, SHUT_WR);
  }

  RawPeer server_;
  UniqueFd listener_;
  UniqueFd caller_;
  std::string address_;
  std::atomic<bool> server_gone_ = false;
  std::thread thread_;
};

TEST_F(RpcTls, S4ARelayWithoutTheSecretCannotInjectACall) {
  serve(make_identity(proto::ROLE_AGENT, "a", kSecretA));
  Relay relay(address_);
  address_ = relay.address();
  const auto client = connect(make_identity(proto::ROLE_CLIENT, "c", kSecretA));
  ASSERT_TRUE(client) << client.error().message();
  EXPECT_THAT(status(*client), HasSubstr("client c"));
  ASSERT_TRUE(relay.inject(encode_frame(request(99, proto::AGENT_STATUS, 1000)).value()));
  loop_.run_until([&] { return relay.server_hung_up(); });
  EXPECT_EQ(calls_, 1) << "the call of the relay was served";
}

TEST_F(RpcTls, ASignatureIsBoundToItsConnection) {
  const Identity caller = make_identity(proto::ROLE_CLIENT, "c");
  const auto own = make_hello(caller, "", {});
  const auto theirs = make_hello(make_identity(proto::ROLE_AGENT, "a"), "", {});
  proto::HelloProof proof;
  proof.set_signature(sign_hello(*caller.key, Side::kCaller, "channel", own, theirs));
  EXPECT_TRUE(check_signature(proof, Side::kCaller, "channel", own, theirs));
  EXPECT_FALSE(check_signature(proof, Side::kCaller, "other", own, theirs)) << "through a relay";
  EXPECT_FALSE(check_signature(proof, Side::kServer, "channel", own, theirs)) << "as the server";
  EXPECT_FALSE(check_signature(proof, Side::kCaller, "channel", theirs, own)) << "reflected";
  auto changed = own;
  changed.set_node_id("d");
  EXPECT_FALSE(check_signature(proof, Side::kCaller, "channel", changed, theirs));
}

// The hello of a process, and its signature for the server's answer.
struct RawGreeting {
  proto::Frame hello;
  proto::Frame proof;
};

std::string refusal_of(RawPeer& peer) {
  while (const auto frame = peer.read()) {
    if (frame->has_proof() && frame->proof().has_refusal())
      return frame->proof().refusal().message();
    if (frame->has_response()) return "accepted";
  }
  return "closed";
}

// Sends the hello; signs with `key`.
RawGreeting greet_with(RawPeer& peer, const proto::Hello& hello, const crypto::SigningKey& key) {
  RawGreeting said;
  *said.hello.mutable_hello() = hello;
  peer.send(said.hello);
  const auto answer = peer.read();
  if (!answer || !answer->has_hello()) return said;
  said.proof.mutable_proof()->set_signature(
      sign_hello(key, Side::kCaller, "", hello, answer->hello()));
  peer.send(said.proof);
  return said;
}

TEST_F(RpcTls, AReplayedHandshakeIsRefused) {
  serve(make_identity(proto::ROLE_AGENT, "a"));
  const Identity honest = make_identity(proto::ROLE_CLIENT, "c");
  RawPeer first(address_);
  const auto said = greet_with(first, make_hello(honest, "", {}), *honest.key);
  first.send(request(1, proto::AGENT_STATUS, 1000));
  EXPECT_EQ(refusal_of(first), "accepted");
  RawPeer replay(address_);
  replay.send(said.hello);
  replay.send(said.proof);
  replay.send(request(1, proto::AGENT_STATUS, 1000));
  EXPECT_THAT(refusal_of(replay), HasSubstr("has not signed its hello"));
  EXPECT_EQ(calls_, 1);
}

TEST_F(RpcTls, S3AnIncarnationCannotBeClaimedWithoutItsKey) {
  serve(make_identity(proto::ROLE_AGENT, "a"));
  const Identity victim = make_identity(proto::ROLE_AGENT, "victim");
  const Identity thief = make_identity(proto::ROLE_AGENT, "victim");
  auto hello = make_hello(thief, "", {});
  hello.set_incarnation(victim.incarnation.to_bytes());
  RawPeer other_key(address_);
  proto::Frame claim;
  *claim.mutable_hello() = hello;
  other_key.send(claim);
  EXPECT_THAT(refusal_of(other_key), HasSubstr("claims an incarnation that is not of its key"));
  RawPeer other_signature(address_);
  greet_with(other_signature, make_hello(victim, "", {}), *thief.key);
  other_signature.send(request(1, proto::AGENT_STATUS, 1000));
  EXPECT_THAT(refusal_of(other_signature), HasSubstr("has not signed its hello"));
  EXPECT_EQ(calls_, 0);
}

TEST_F(RpcTls, AMemberClaimsNoIncarnationAsAPeerOfProtocol2) {
  serve(make_identity(proto::ROLE_AGENT, "a", kSecretA));
  Identity thief = make_identity(proto::ROLE_AGENT, "victim", kSecretA);
  thief.key = nullptr;
  thief.incarnation = make_identity(proto::ROLE_AGENT, "victim").incarnation;
  const auto client = connect(thief);
  ASSERT_FALSE(client) << "it has the secret, but not the key of the victim";
  EXPECT_THAT(client.error().message(), HasSubstr("proves no incarnation"));
  EXPECT_EQ(calls_, 0);
}

// A peer of protocol 2; `secret`: "" for none.
std::string greet_as_protocol_2(const std::string& address, const std::string& secret) {
  Identity identity = make_identity(proto::ROLE_CLIENT, "old");
  identity.key = nullptr;
  proto::Frame own;
  *own.mutable_hello() = make_hello(identity, secret, {});
  RawPeer peer(address);
  peer.send(own);
  const auto answer = peer.read();
  if (answer && answer->has_proof()) return answer->proof().refusal().message();
  if (!answer || !answer->has_hello()) return "closed";
  if (!secret.empty()) {
    proto::Frame proof;
    proof.mutable_proof()->set_mac(make_proof(secret, Side::kCaller, own.hello(), answer->hello()));
    peer.send(proof);
  }
  peer.send(request(1, proto::AGENT_STATUS, 1000));
  return refusal_of(peer);
}

TEST_F(RpcTls, PeersOfProtocol2AreAdmittedByTheRulesOnly) {
  serve(make_identity(proto::ROLE_AGENT, "a"));
  EXPECT_EQ(greet_as_protocol_2(address_, ""), "accepted");
  EXPECT_THAT(greet_as_protocol_2(address_, kSecretA), HasSubstr("--secret-file"));
  serve(proto::ROLE_AGENT, "a", secrets("secret", kSecretA));
  EXPECT_THAT(greet_as_protocol_2(address_, kSecretA), HasSubstr("--admit-protocol-2"));
  EXPECT_THAT(greet_as_protocol_2(address_, ""), HasSubstr("--secret-file"));
  auto admitting = secrets("secret", kSecretA);
  admitting.admit_protocol_2 = true;
  serve(proto::ROLE_AGENT, "a", admitting);
  EXPECT_EQ(greet_as_protocol_2(address_, kSecretA), "accepted");
  EXPECT_THAT(greet_as_protocol_2(address_, kSecretB), HasSubstr("different cluster secrets"));
  EXPECT_THAT(greet_as_protocol_2(address_, ""), HasSubstr("must prove the cluster secret"));
  EXPECT_EQ(refusal(connect(secrets("secret", kSecretA))), "accepted") << "protocol 3 uses TLS";
}

TEST_F(RpcTls, AServerThatTrustsTheNetworkTakesPlainPeersBesideTls) {
  auto options = secrets("secret", kSecretA);
  options.insecure = true;
  serve(proto::ROLE_AGENT, "a", options);
  const auto plain = connect(make_identity(proto::ROLE_CLIENT, "c"));
  ASSERT_TRUE(plain) << plain.error().message();
  EXPECT_EQ(status(*plain), "client c plain");
  const auto secured = connect(make_identity(proto::ROLE_CLIENT, "c", kSecretA));
  ASSERT_TRUE(secured) << secured.error().message();
  EXPECT_THAT(status(*secured), HasSubstr("encrypted"));
  serve(make_identity(proto::ROLE_AGENT, "a"));
  const auto to_plain = connect(options);
  ASSERT_TRUE(to_plain) << to_plain.error().message();
  EXPECT_THAT(refusal(connect(make_identity(proto::ROLE_CLIENT, "c", kSecretA))),
              HasSubstr("does not speak TLS"));
}

TEST_F(RpcTls, HalfAHandshakeAndGarbageEndAndKeepNobodyOut) {
  serve(make_identity(proto::ROLE_AGENT, "a", kSecretA));
  RawPeer half(address_);
  half.send(std::string_view("\x16\x03\x01\x02\x00\x01", 6));
  RawPeer garbage(address_);
  garbage.send(std::string("\x16") + std::string(5000, 'g'));
  RawPeer http(address_);
  http.send("GET / HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(connect(make_identity(proto::ROLE_CLIENT, "c", kSecretA)));
  EXPECT_TRUE(garbage.closed_by_peer());
  EXPECT_TRUE(http.closed_by_peer());
  EXPECT_TRUE(half.closed_by_peer());
  loop_.run_until([&] { return server_->connections() <= 1; });
}

TEST_F(RpcTls, AServerWithoutRoomSaysSoToTlsCallers) {
  serve(make_identity(proto::ROLE_AGENT, "a", kSecretA), {.max_connections = 1});
  const auto first = connect(make_identity(proto::ROLE_CLIENT, "c", kSecretA));
  ASSERT_TRUE(first);
  const auto second = connect(make_identity(proto::ROLE_CLIENT, "d", kSecretA));
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), ErrorCode::kExhausted) << second.error().message();
}

TEST_F(RpcTls, LargeAnswersArriveWholeBesideEachOther) {
  serve(make_identity(proto::ROLE_AGENT, "a", kSecretA));
  const auto client = connect(make_identity(proto::ROLE_PULLER, "c", kSecretA));
  ASSERT_TRUE(client);
  int arrived = 0;
  for (int i = 0; i < 4; ++i) {
    boost::asio::co_spawn(
        loop_.io(), (*client)->call_raw(proto::AGENT_GET_PAGE, std::string(1u << 10, 'q'), 30s),
        [&](std::exception_ptr, Result<std::string> page) {
          EXPECT_TRUE(page) << page.error().message();
          EXPECT_TRUE(page && page->size() == (8u << 20) + (1u << 10));
          ++arrived;
        });
  }
  loop_.run_until([&] { return arrived == 4; });
}

TEST(TlsFiles, WhatIsMissingOrOpenToOthersIsNamed) {
  const TestDirectory directory;
  TestAuthority authority(directory, "fleet");
  const auto good = authority.issue("a");
  const auto problem = [](const CredentialOptions& options) {
    const auto opened = Credentials::open(options);
    return opened ? "accepted" : opened.error().message();
  };
  EXPECT_EQ(problem(good), "accepted");
  auto options = good;
  options.key_file.clear();
  EXPECT_THAT(problem(options), HasSubstr("--tls-key is missing"));
  options = good;
  options.key_file = authority.issue("b").key_file;
  EXPECT_THAT(problem(options), HasSubstr("--tls-key"));
  options = good;
  options.authority_file = directory.file("none");
  EXPECT_THAT(problem(options), HasSubstr("--tls-ca"));
  options = good;
  options.revocation_file = good.certificate_file;
  EXPECT_THAT(problem(options), HasSubstr("--tls-crl"));
  options = good;
  options.admit_protocol_2 = true;
  EXPECT_THAT(problem(options), HasSubstr("--admit-protocol-2 needs --secret-file"));
  std::filesystem::permissions(good.key_file, std::filesystem::perms(0644));
  EXPECT_THAT(problem(good), HasSubstr("chmod 600"));
}

TEST(Exposure, S16AnAddressBeyondLoopbackNeedsAnIdentity) {
  const auto secret = Credentials::of_secret(kSecretA);
  for (const char* open : {"0.0.0.0:0", "[::]:0", "192.0.2.1:7300"}) {
    const auto checked = check_exposure("the agent", open, nullptr, false);
    ASSERT_FALSE(checked) << open;
    EXPECT_EQ(checked.error().code(), ErrorCode::kDenied);
    EXPECT_THAT(checked.error().message(), HasSubstr("--insecure"));
    EXPECT_TRUE(check_exposure("the agent", open, secret, false)) << open;
    EXPECT_TRUE(check_exposure("the agent", open, nullptr, true)) << open;
  }
  for (const char* local : {"127.0.0.1:7300", "127.8.0.1:0", "[::1]:0", "localhost:0"}) {
    EXPECT_TRUE(check_exposure("the agent", local, nullptr, false)) << local;
  }
}

}  // namespace
}  // namespace rekindle::rpc
