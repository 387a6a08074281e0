#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "src/base/units.h"
#include "tests/transport/transport_fixture.h"
#include "tests/verbs/fake_verbs.h"
#include "tests/verbs/verbs_hosts.h"

// A source and a puller on a fake network, and reads between them.
namespace rekindle::transport::verbs {

using namespace std::chrono_literals;

struct LabOptions {
  std::vector<FakeDevice> source_devices{{.name = "mlx5_0"}};
  std::vector<FakeDevice> puller_devices{{.name = "mlx5_0"}};
  VerbsServerOptions server{.registration_patience = 10s};
  VerbsConnectorOptions connector{};
  std::size_t segment_bytes = 8 * kMiB;
};

// Names in scripts: "source/mlx5_0", "puller/mlx5_0".
class VerbsLab {
 public:
  explicit VerbsLab(LabOptions options = {}) : segment_(options.segment_bytes, 7) {
    for (auto& device : options.source_devices) source_api_.add_device(std::move(device));
    for (auto& device : options.puller_devices) puller_api_.add_device(std::move(device));
    source_ = std::make_unique<VerbsSource>(source_api_, FabricOptions{}, RegistrarOptions{},
                                            options.server);
    puller_ = std::make_unique<VerbsPuller>(puller_api_, FabricOptions{}, options.connector);
    key_ = source_->serve(segment_);
    token_ = source_->admit({key_});
  }

  FakeNetwork& network() { return network_; }
  VerbsSource& source() { return *source_; }
  VerbsPuller& puller() { return *puller_; }
  const testing::TestSegment& segment() const { return segment_; }
  RegionKey key() const { return key_; }
  const SessionToken& token() const { return token_; }

  Result<Paths> connect() { return puller_->connect(*source_, token_); }
  // The first of them; fails the test when there is none.
  std::unique_ptr<Path> path() { return path(token_); }
  std::unique_ptr<Path> path(const SessionToken& token) {
    auto paths = puller_->connect(*source_, token);
    if (!paths) {
      ADD_FAILURE() << paths.error().message();
      return nullptr;
    }
    return std::move(paths->front());
  }

  ReadOp read(std::uint64_t id, std::uint64_t offset, std::byte* local, std::uint64_t bytes) const {
    return {
        .wr_id = id, .remote = key_, .remote_offset = offset, .local = local, .run_bytes = bytes};
  }
  // `count` reads of consecutive bytes.
  std::vector<ReadOp> reads(std::size_t count, std::uint64_t bytes, std::byte* local) const {
    std::vector<ReadOp> ops;
    for (std::size_t i = 0; i < count; ++i)
      ops.push_back(read(i, i * bytes, local + i * bytes, bytes));
    return ops;
  }
  bool landed(const ReadOp& op) const {
    for (std::uint64_t run = 0; run < op.count; ++run) {
      const std::byte* const there =
          segment_.bytes().data() + op.remote_offset + run * op.remote_stride;
      if (std::memcmp(op.local + run * op.local_stride, there, op.run_bytes) != 0) return false;
    }
    return true;
  }
  // Until the fabric of this host has seen that its first rail is up, or down.
  static bool wait_rail(Fabric& fabric, bool up) {
    return testing::eventually([&] {
      fabric.refresh();
      return fabric.rails().front()->state().up == up;
    });
  }

 private:
  testing::TestSegment segment_;
  FakeNetwork network_;
  FakeVerbs source_api_{network_, "source"}, puller_api_{network_, "puller"};
  std::unique_ptr<VerbsSource> source_;
  std::unique_ptr<VerbsPuller> puller_;
  RegionKey key_;
  SessionToken token_;
};

inline const FakePortId kSourcePort{"source/mlx5_0"};
inline const FakePortId kPullerPort{"puller/mlx5_0"};

// By wr_id, for tests that expect each once.
inline std::vector<OpStatus> statuses(const std::vector<Completion>& completions,
                                      std::size_t count) {
  EXPECT_EQ(testing::sorted_ids(completions), testing::first_ids(count));
  std::vector<OpStatus> result(count, OpStatus::kInvalid);
  for (const auto& completion : completions) {
    if (completion.wr_id < count) result[completion.wr_id] = completion.status;
  }
  return result;
}

}  // namespace rekindle::transport::verbs
