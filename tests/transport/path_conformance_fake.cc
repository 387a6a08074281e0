#include "tests/transport/fake/fake_transport.h"
#include "tests/transport/path_conformance.h"

namespace rekindle::transport::testing {
namespace {

class FakeFixture final : public PathFixture {
 public:
  explicit FakeFixture(const fake::Script& script) : script_(script) {}
  RegionKey serve(const TestSegment& segment) override { return peer_.add_region(segment.bytes()); }
  void withdraw(RegionKey key) override { peer_.remove_region(key); }
  SessionToken admit(std::vector<RegionKey> regions) override {
    return peer_.admit(std::move(regions));
  }
  void revoke(const SessionToken& token) override { peer_.revoke(token); }
  Result<std::unique_ptr<Path>> connect(const SessionToken& token) override {
    return peer_.connect(token, script_);
  }
  void kill_peer() override { peer_.kill(); }
  void freeze_peer(bool frozen) override { peer_.freeze(frozen); }

 private:
  const fake::Script script_;
  fake::FakePeer peer_;
};

PathBackend backend(std::string name, const fake::Script& script) {
  return {std::move(name), [script] { return std::make_unique<FakeFixture>(script); }};
}

INSTANTIATE_TEST_SUITE_P(
    Fake, PathConformance,
    ::testing::Values(backend("Instant", {}), backend("Late", {.delay = 2ms, .drain_delay = 5ms}),
                      backend("Slow", {.bytes_per_second = 2'000'000'000}),
                      backend("InPrefixes", {.queue_depth = 64, .ops_per_post = 3})),
    [](const auto& parameter) { return parameter.param.name; });

INSTANTIATE_TEST_SUITE_P(Fake, FreezablePathConformance, ::testing::Values(backend("Frozen", {})),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace rekindle::transport::testing
