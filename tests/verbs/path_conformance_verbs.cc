// The promises of every Path, over the verbs backend: with the fake, and (label rdma) with the
// devices of this machine.
#include "tests/transport/path_conformance.h"
#include "tests/verbs/fake_verbs.h"
#include "tests/verbs/verbs_hosts.h"

namespace rekindle::transport::testing {
namespace {

using verbs::FakeNetwork;
using verbs::FakeVerbs;
using verbs::VerbsPuller;
using verbs::VerbsSource;

struct FakeSetup {
  std::size_t rails = 1;
  bool registers_local = true;
  bool late = false;    // by a thread, not at once
  bool windows = true;  // memory windows 2B
  std::uint32_t send_depth = 128;
  bool staged = false;                 // no region is registered whole
  std::uint64_t source_registers = 0;  // bytes, at most, of its devices; 0: all
};

class FakeVerbsFixture final : public PathFixture {
 public:
  explicit FakeVerbsFixture(const FakeSetup& setup) : setup_(setup) {
    if (setup.late) give_up_silence();
    for (auto* host : {&source_api_, &puller_api_}) {
      for (std::size_t i = 0; i < setup.rails; ++i) {
        verbs::FakeDevice device{.name = fmt::format("mlx5_{}", i)};
        if (host == &source_api_) device.max_registered_bytes = setup.source_registers;
        if (!setup.windows)
          device.attr.device_cap_flags &= ~unsigned{IBV_DEVICE_MEM_WINDOW_TYPE_2B};
        const std::string name = host->add_device(std::move(device));
        if (host == &source_api_) source_devices_.push_back(name);
      }
    }
    verbs::RegistrarOptions registrar;
    if (setup.staged) registrar.max_bytes_per_device = 4096;
    source_ = std::make_unique<VerbsSource>(source_api_, verbs::FabricOptions{}, registrar);
    puller_ =
        std::make_unique<VerbsPuller>(puller_api_, verbs::FabricOptions{},
                                      verbs::VerbsConnectorOptions{.send_depth = setup.send_depth});
  }
  RegionKey serve(const TestSegment& segment) override { return source_->serve(segment); }
  void withdraw(RegionKey key) override { source_->registry().remove(key); }
  SessionToken admit(std::vector<RegionKey> regions) override {
    return source_->admit(std::move(regions));
  }
  void revoke(const SessionToken& token) override {
    source_->revoke(token);
    give_up_silence();
  }
  Result<std::unique_ptr<Path>> connect(const SessionToken& token) override {
    if (killed_) return fail(ErrorCode::kUnavailable, "the source is gone");
    TRY(auto paths, puller_->connect(*source_, token));
    const bool staged = paths.front()->describe().ends_with("(staged)");
    EXPECT_EQ(staged, setup_.staged || !setup_.windows || setup_.source_registers != 0)
        << paths.front()->describe();
    return std::move(paths.front());
  }
  void kill_peer() override {
    killed_ = true;
    for (const auto& device : source_devices_) network_.remove_device(device);
    give_up_silence();
  }
  std::shared_ptr<const void> use_local(std::span<std::byte> memory) override {
    return setup_.registers_local ? puller_->use(memory) : nullptr;
  }

 private:
  // From now on a queue pair that is gone is noticed by the one at the other end.
  void give_up_silence() { network_.deliver_by_thread(100us, 50ms); }

  const FakeSetup setup_;
  FakeNetwork network_;
  FakeVerbs source_api_{network_, "source"}, puller_api_{network_, "puller"};
  std::vector<std::string> source_devices_;
  std::unique_ptr<VerbsSource> source_;
  std::unique_ptr<VerbsPuller> puller_;
  bool killed_ = false;
};

PathBackend backend(std::string name, const FakeSetup& setup) {
  return {std::move(name), [setup] { return std::make_unique<FakeVerbsFixture>(setup); }};
}

INSTANTIATE_TEST_SUITE_P(
    FakeVerbs, PathConformance,
    ::testing::Values(backend("Registered", {}), backend("Bounced", {.registers_local = false}),
                      backend("Late", {.late = true}),
                      backend("WithoutWindows", {.windows = false}),
                      backend("ShallowQueues", {.late = true, .send_depth = 4}),
                      backend("Staged", {.staged = true}),
                      backend("StagedAndBounced", {.registers_local = false, .staged = true}),
                      backend("StagedLate", {.late = true, .staged = true}),
                      backend("StagedShallow", {.late = true, .send_depth = 3, .staged = true}),
                      backend("StagedInLittle", {.source_registers = 1400 * kKiB})),
    [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace rekindle::transport::testing
