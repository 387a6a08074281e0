// What every Path promises, over real verbs: the source and the puller of one process, each on the
// devices of its side.
#include "tests/rdma/rails.h"
#include "tests/transport/path_conformance.h"
#include "tests/verbs/verbs_hosts.h"

namespace rekindle::transport::testing {
namespace {

using verbs::VerbsPuller;
using verbs::VerbsSource;

verbs::FabricOptions only(const std::vector<std::string>& devices) {
  verbs::FabricOptions options;
  for (const auto& device : devices) options.hca += (options.hca.empty() ? "=" : ",") + device;
  return options;
}

class RdmaFixture final : public PathFixture {
 public:
  explicit RdmaFixture(bool registers_local)
      : registers_local_(registers_local),
        api_(verbs::make_system_api()),
        source_(std::make_unique<VerbsSource>(*api_, only(rekindle::testing::rdma_rails().b))),
        puller_(std::make_unique<VerbsPuller>(*api_, only(rekindle::testing::rdma_rails().a))) {}
  RegionKey serve(const TestSegment& segment) override { return source_->serve(segment); }
  void withdraw(RegionKey key) override { source_->registry().remove(key); }
  SessionToken admit(std::vector<RegionKey> regions) override {
    return source_->admit(std::move(regions));
  }
  void revoke(const SessionToken& token) override { source_->revoke(token); }
  Result<std::unique_ptr<Path>> connect(const SessionToken& token) override {
    TRY(auto paths, puller_->connect(*source_, token));
    return std::move(paths.front());
  }
  void kill_peer() override { source_->stop(); }
  std::shared_ptr<const void> use_local(std::span<std::byte> memory) override {
    return registers_local_ ? puller_->use(memory) : nullptr;
  }

 private:
  const bool registers_local_;
  const std::unique_ptr<verbs::Api> api_;
  const std::unique_ptr<VerbsSource> source_;
  const std::unique_ptr<VerbsPuller> puller_;
};

// Skips where there is no device; the lane that has them counts a skip as a failure.
class NoDeviceFixture final : public PathFixture {
 public:
  RegionKey serve(const TestSegment&) override { return {}; }
  void withdraw(RegionKey) override {}
  SessionToken admit(std::vector<RegionKey>) override { return {}; }
  void revoke(const SessionToken&) override {}
  Result<std::unique_ptr<Path>> connect(const SessionToken&) override {
    return fail(ErrorCode::kUnavailable, "no RDMA device");
  }
  void kill_peer() override {}
  bool skips() const override { return true; }
};

PathBackend backend(std::string name, bool registers_local) {
  return {std::move(name), [registers_local]() -> std::unique_ptr<PathFixture> {
            if (rekindle::testing::rdma_rails().a.empty()) {
              return std::make_unique<NoDeviceFixture>();
            }
            return std::make_unique<RdmaFixture>(registers_local);
          }};
}

INSTANTIATE_TEST_SUITE_P(Rdma, PathConformance,
                         ::testing::Values(backend("Registered", true), backend("Bounced", false)),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace rekindle::transport::testing
