// What every Path promises, over real verbs: the source and the puller of one process, each on the
// devices of its side.
#include "tests/rdma/rails.h"
#include "tests/rdma/windowless.h"
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

struct RdmaSetup {
  bool registers_local = true;
  bool staged = false;  // no region is registered whole
  bool windows = true;
};

verbs::RegistrarOptions registrar_options(const RdmaSetup& setup) {
  verbs::RegistrarOptions options;
  if (setup.staged) options.max_bytes_per_device = 4096;
  return options;
}

class RdmaFixture final : public PathFixture {
 public:
  explicit RdmaFixture(const RdmaSetup& setup)
      : setup_(setup),
        source_(std::make_unique<VerbsSource>(setup.windows ? api_ : windowless_,
                                              only(rekindle::testing::rdma_rails().b),
                                              registrar_options(setup))),
        puller_(std::make_unique<VerbsPuller>(api_, only(rekindle::testing::rdma_rails().a))) {}
  RegionKey serve(const TestSegment& segment) override { return source_->serve(segment); }
  void withdraw(RegionKey key) override { source_->registry().remove(key); }
  SessionToken admit(std::vector<RegionKey> regions) override {
    return source_->admit(std::move(regions));
  }
  void revoke(const SessionToken& token) override { source_->revoke(token); }
  Result<std::unique_ptr<Path>> connect(const SessionToken& token) override {
    TRY(auto paths, puller_->connect(*source_, token));
    EXPECT_EQ(paths.front()->describe().ends_with("(staged)"), setup_.staged || !setup_.windows);
    return std::move(paths.front());
  }
  void kill_peer() override { source_->stop(); }
  std::shared_ptr<const void> use_local(std::span<std::byte> memory) override {
    return setup_.registers_local ? puller_->use(memory) : nullptr;
  }

 private:
  const RdmaSetup setup_;
  verbs::SystemApi api_;
  verbs::WithoutWindows windowless_;
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

PathBackend backend(std::string name, const RdmaSetup& setup) {
  return {std::move(name), [setup]() -> std::unique_ptr<PathFixture> {
            if (rekindle::testing::rdma_rails().a.empty()) {
              return std::make_unique<NoDeviceFixture>();
            }
            return std::make_unique<RdmaFixture>(setup);
          }};
}

INSTANTIATE_TEST_SUITE_P(Rdma, PathConformance,
                         ::testing::Values(backend("Registered", {}),
                                           backend("Bounced", {.registers_local = false}),
                                           backend("Staged", {.staged = true}),
                                           backend("NoWindows", {.windows = false})),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace rekindle::transport::testing
