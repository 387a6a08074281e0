#include "tests/transport/path_conformance.h"
#include "transport/shm/shm_transport.h"

namespace rekindle::transport::testing {
namespace {

class ShmFixture final : public PathFixture {
 public:
  ShmFixture() {
    auto server = shm::ShmServer::create({}, registry_, incarnation_);
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
    return connector_->connect({"shm", endpoint_, token, incarnation_}, test_deadline());
  }
  void kill_peer() override { server_.reset(); }

 private:
  SegmentRegistry registry_;
  const Incarnation incarnation_ = Incarnation::random();
  std::unique_ptr<shm::ShmServer> server_;
  const std::unique_ptr<Connector> connector_ = shm::make_connector();
  std::string endpoint_;
};

INSTANTIATE_TEST_SUITE_P(Shm, PathConformance,
                         ::testing::Values(PathBackend{
                             "Shm", [] { return std::make_unique<ShmFixture>(); }}),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace rekindle::transport::testing
