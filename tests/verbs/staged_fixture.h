#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/units.h"
#include "tests/verbs/fake_verbs.h"
#include "tests/verbs/raw_puller.h"
#include "tests/verbs/verbs_hosts.h"

// A source that could register nothing of a segment, and a puller.
namespace rekindle::transport::verbs {

using namespace std::chrono_literals;

inline constexpr std::uint64_t kStagedBytes = 2 * kMiB;

class StagedLinkTest : public ::testing::Test {
 protected:
  StagedLinkTest() {
    device_ = source_api_.add_device({.name = "mlx5_0"});
    puller_api_.add_device({.name = "mlx5_0"});
    network_.deliver_by_thread(20us, 50ms);
  }
  void start(const VerbsServerOptions& options = {}, const VerbsConnectorOptions& connector = {}) {
    RegistrarOptions registrar;
    registrar.max_bytes_per_device = 4096;  // none of the segment's registrations fits
    source_ = std::make_unique<VerbsSource>(source_api_, FabricOptions{}, registrar, options);
    puller_ = std::make_unique<VerbsPuller>(puller_api_, FabricOptions{}, connector);
    key_ = source_->serve(segment_);
    token_ = source_->admit({key_});
  }
  std::unique_ptr<Path> connect(const SessionToken& token) {
    auto paths = puller_->connect(*source_, token);
    if (paths) return std::move(paths->front());
    ADD_FAILURE() << paths.error().message();
    return nullptr;
  }
  ReadOp read(std::uint64_t offset, std::byte* local, std::uint64_t bytes) const {
    return {.remote = key_, .remote_offset = offset, .local = local, .run_bytes = bytes};
  }
  StageRequest request() const {
    return {.slot = 0, .sequence = 1, .region = key_, .run_bytes = 64, .count = 1};
  }
  // Says it on a link of its own, beside an honest one.
  void expect_only_its_own_link_to_end(const std::vector<std::vector<std::byte>>& messages) {
    const auto bystander = connect(token_);
    ASSERT_NE(bystander, nullptr);
    const auto links = source_->server()->link_count();
    RawPuller raw(puller_api_);
    const auto connected = raw.connect(*source_, source_->admit({key_}));
    ASSERT_TRUE(connected) << connected.error().message();
    EXPECT_EQ(source_->server()->link_count(), links + 1);
    raw.say(messages);
    EXPECT_TRUE(testing::eventually([&] { return source_->server()->link_count() == links; }));
    std::vector<std::byte> local(kStagedBytes);
    EXPECT_EQ(testing::read_one(*bystander, read(0, local.data(), local.size())), OpStatus::kOk);
    EXPECT_EQ(std::memcmp(local.data(), segment_.bytes().data(), local.size()), 0);
  }

  testing::TestSegment segment_{kStagedBytes};
  FakeNetwork network_;
  FakeVerbs source_api_{network_, "source"}, puller_api_{network_, "puller"};
  std::string device_;
  std::unique_ptr<VerbsSource> source_;
  std::unique_ptr<VerbsPuller> puller_;
  RegionKey key_;
  SessionToken token_;
};

}  // namespace rekindle::transport::verbs
