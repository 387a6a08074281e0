#include "src/bucket/block_digests.h"

#include <gtest/gtest.h>

#include "src/base/blake3.h"
#include "src/bucket/double_device.h"
#include "tests/bucket/device_child.h"
#include "tests/bucket/forwarding_device.h"
#include "tests/support/must.h"

namespace rekindle::bucket {
namespace {

using testing::pattern;

constexpr std::uint64_t kMiB = 1 << 20;

class BlockDigestsTest : public ::testing::Test {
 protected:
  BlockFile block_with(const std::vector<std::byte>& bytes) {
    const auto block = must(device_->allocate_block(bytes.size()));
    EXPECT_EQ(block->bytes(), bytes.size());
    const Upload upload{.from = bytes.data(), .to = block->address(), .run_bytes = bytes.size()};
    const auto stream = must(device_->make_stream());
    must(stream->upload({&upload, 1}));
    must(stream->finish(soon()));
    return {must(block->export_descriptor()), block->bytes()};
  }
  static TimePoint soon() { return steady_now() + std::chrono::seconds(60); }

  const std::unique_ptr<Device> device_ = make_double_device("double:0", 64 * kMiB);
};

TEST_F(BlockDigestsTest, EachMebibyteOfEachBlockIsDigestedInOrder) {
  const auto first = pattern(4 * kMiB, 1);
  const auto second = pattern(2 * kMiB, 2);
  std::vector<BlockFile> blocks;
  blocks.push_back(block_with(first));
  blocks.push_back(block_with(second));
  std::vector<Digest> expected;
  for (const auto& bytes : {first, second}) {
    for (std::size_t at = 0; at < bytes.size(); at += kMiB) {
      expected.push_back(blake3(std::span(bytes).subspan(at, kMiB)));
    }
  }
  EXPECT_EQ(must(digest_blocks(*device_, blocks, soon())), expected);
  // Without kernels for digests, the host computes them.
  testing::WithoutDigests slow(*device_);
  EXPECT_EQ(must(digest_blocks(slow, blocks, soon())), expected);
}

TEST_F(BlockDigestsTest, OneChangedBitChangesTheDigestOfItsPiece) {
  auto bytes = pattern(4 * kMiB, 3);
  std::vector<BlockFile> blocks;
  blocks.push_back(block_with(bytes));
  const auto before = must(digest_blocks(*device_, blocks, soon()));
  const auto writer = must(device_->open_block(blocks[0].descriptor, 4 * kMiB, Access::kWrite));
  reinterpret_cast<std::byte*>(writer->address())[3 * kMiB - 1] ^= std::byte{0x10};
  const auto after = must(digest_blocks(*device_, blocks, soon()));
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(before[i] == after[i], i != 2) << i;
}

TEST_F(BlockDigestsTest, WhatIsNoBlockIsRefused) {
  std::vector<BlockFile> blocks;
  blocks.push_back(block_with(pattern(2 * kMiB, 1)));
  blocks.push_back({UniqueFd(), kMiB});
  EXPECT_EQ(digest_blocks(*device_, blocks, soon()).error().code(), ErrorCode::kInvalid);
  EXPECT_TRUE(must(digest_blocks(*device_, {}, soon())).empty());
}

}  // namespace
}  // namespace rekindle::bucket
