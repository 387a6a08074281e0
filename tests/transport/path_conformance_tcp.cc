#include "tests/support/fault_proxy.h"
#include "tests/transport/path_conformance.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::transport::testing {
namespace {

class TcpFixture : public PathFixture {
 public:
  TcpFixture() {
    auto server = tcp::TcpServer::create({.listen_host = "127.0.0.1"}, registry_, incarnation_);
    if (!server) throw std::runtime_error(server.error().message());
    server_ = std::move(*server);
    endpoint_ = server_->endpoint("127.0.0.1");
  }
  RegionKey serve(const TestSegment& segment) override {
    return registry_.add(segment.bytes(), segment.fd(), 0, {}, nullptr);
  }
  void withdraw(RegionKey key) override { registry_.remove(key); }
  SessionToken admit(std::vector<RegionKey> regions) override {
    const SessionToken token = SessionToken::random();
    registry_.admit({.token = token, .puller = "test", .regions = std::move(regions)});
    return token;
  }
  void revoke(const SessionToken& token) override {
    registry_.revoke(token);
    server_->drop_session(token);
  }
  Result<std::unique_ptr<Path>> connect(const SessionToken& token) override {
    return connector_->connect({"tcp", endpoint_, token, incarnation_}, test_deadline());
  }
  void kill_peer() override { server_.reset(); }

 protected:
  SegmentRegistry registry_;
  const Incarnation incarnation_ = Incarnation::random();
  std::unique_ptr<tcp::TcpServer> server_;
  const std::unique_ptr<Connector> connector_ = tcp::make_connector();
  std::string endpoint_;
};

// Behind a proxy that can hold the answers back: what a stopped peer looks like from here.
class ProxiedTcpFixture final : public TcpFixture {
 public:
  ProxiedTcpFixture() : proxy_(server_->port()) { endpoint_ = proxy_.address(); }
  void freeze_peer(bool frozen) override { proxy_.stall(frozen); }
  void kill_peer() override {
    TcpFixture::kill_peer();
    proxy_.cut();
  }

 private:
  rekindle::testing::FaultProxy proxy_;
};

INSTANTIATE_TEST_SUITE_P(Tcp, PathConformance,
                         ::testing::Values(PathBackend{
                             "Tcp", [] { return std::make_unique<TcpFixture>(); }}),
                         [](const auto& parameter) { return parameter.param.name; });

INSTANTIATE_TEST_SUITE_P(Tcp, FreezablePathConformance,
                         ::testing::Values(PathBackend{
                             "Proxied", [] { return std::make_unique<ProxiedTcpFixture>(); }}),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace rekindle::transport::testing
