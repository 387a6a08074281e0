#include "transport/verbs/staged/stage_wire.h"

#include <array>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "transport/verbs/link/verbs_wire.h"

namespace rekindle::transport::verbs {
namespace {

constexpr StageLimits kLimits{4, 256 << 10};

StageRequest sample_request() {
  return {.slot = 3,
          .sequence = 0x01020304,
          .region = {7, 9},
          .offset = 0x1122334455667788,
          .stride = 5000,
          .run_bytes = 1000,
          .count = 200};
}

std::vector<std::byte> bytes_of(const StageRequest& request) {
  std::vector<std::byte> bytes(kStageRequestBytes);
  EXPECT_EQ(encode(request, bytes), kStageRequestBytes);
  return bytes;
}
std::vector<std::byte> bytes_of(const StageAnswer& answer) {
  std::vector<std::byte> bytes(kStageAnswerBytes);
  EXPECT_EQ(encode(answer, bytes), kStageAnswerBytes);
  return bytes;
}

TEST(StageWire, ARequestHasTheseBytes) {
  const std::array<unsigned char, kStageRequestBytes> expected = {
      1,    1,    3,    0,    0x04, 0x03, 0x02, 0x01,  // head, sequence
      7,    0,    0,    0,    9,    0,    0,    0,     // region
      0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11,  // offset
      0x88, 0x13, 0,    0,    0,    0,    0,    0,     // stride
      0xe8, 0x03, 0,    0,    0xc8, 0,    0,    0};    // runs
  const auto bytes = bytes_of(sample_request());
  EXPECT_EQ(std::memcmp(bytes.data(), expected.data(), bytes.size()), 0);
  const auto back = parse_stage_request(bytes, kLimits);
  ASSERT_TRUE(back) << back.error().message();
  EXPECT_EQ(bytes_of(*back), bytes);
}

TEST(StageWire, AnAnswerHasTheseBytes) {
  const std::array<unsigned char, kStageAnswerBytes> expected = {1, 2, 2, 0, 5, 0,    0,    0,
                                                                 0, 0, 0, 0, 0, 0x0d, 0x03, 0};
  const auto bytes =
      bytes_of({.slot = 2, .sequence = 5, .status = OpStatus::kOk, .bytes = 0x30d00});
  const auto back = parse_stage_answer(bytes, kLimits);
  ASSERT_TRUE(back) << back.error().message();
  EXPECT_EQ(back->slot, 2u);
  EXPECT_EQ(back->sequence, 5u);
  EXPECT_EQ(back->status, OpStatus::kOk);
  EXPECT_EQ(back->bytes, 0x30d00u);
  EXPECT_EQ(std::memcmp(bytes.data(), expected.data(), bytes.size()), 0);
}

TEST(StageWire, EveryOtherLengthIsRefused) {
  std::vector<std::byte> request = bytes_of(sample_request());
  std::vector<std::byte> answer = bytes_of(StageAnswer{.bytes = 1});
  request.resize(kStageMessageBytes);
  answer.resize(kStageMessageBytes);
  for (std::size_t bytes = 0; bytes <= kStageMessageBytes; ++bytes) {
    EXPECT_EQ(parse_stage_request(StageBytes(request).first(bytes), kLimits).has_value(),
              bytes == kStageRequestBytes);
    EXPECT_EQ(parse_stage_answer(StageBytes(answer).first(bytes), kLimits).has_value(),
              bytes == kStageAnswerBytes);
  }
}

TEST(StageWire, RequestsThatNoBlockHoldsAreRefused) {
  const auto accepted = [](auto change) {
    StageRequest request = sample_request();
    change(request);
    return parse_stage_request(bytes_of(request), kLimits).has_value();
  };
  EXPECT_TRUE(accepted([](auto&) {}));
  EXPECT_FALSE(accepted([](auto& request) { request.slot = 4; }));
  EXPECT_FALSE(accepted([](auto& request) { request.count = 0; }));
  EXPECT_FALSE(accepted([](auto& request) { request.run_bytes = 0; }));
  EXPECT_FALSE(accepted([](auto& request) { request.count = 1; }));  // with a stride
  EXPECT_FALSE(accepted([](auto& request) { request.run_bytes = ~0u, request.count = ~0u; }));
  EXPECT_FALSE(
      accepted([](auto& request) { request.run_bytes = 1 << 16, request.count = 1 << 16; }));
  EXPECT_FALSE(accepted([](auto& request) { request.count = 263; }));
  EXPECT_TRUE(accepted([](auto& request) { request.count = 262; }));
}

TEST(StageWire, AnswersThatNoSourceGivesAreRefused) {
  const auto accepted = [](StageAnswer answer) {
    return parse_stage_answer(bytes_of(answer), kLimits).has_value();
  };
  EXPECT_FALSE(accepted({.status = OpStatus::kOk, .bytes = 0}));
  EXPECT_FALSE(accepted({.status = OpStatus::kOk, .bytes = (256 << 10) + 1}));
  EXPECT_FALSE(accepted({.status = OpStatus::kStale, .bytes = 1}));
  EXPECT_FALSE(accepted({.slot = 4, .bytes = 1}));
  for (const auto status :
       {OpStatus::kStale, OpStatus::kDenied, OpStatus::kInvalid, OpStatus::kFault}) {
    EXPECT_TRUE(accepted({.status = status}));
  }
  for (const auto status : {OpStatus::kPeerLost, OpStatus::kTimeout, OpStatus::kAborted,
                            OpStatus::kLocalFault, OpStatus{200}}) {
    EXPECT_FALSE(accepted({.status = status}));
  }
}

TEST(StageWire, WhateverIsAcceptedFitsItsBlock) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  std::size_t accepted = 0;
  for (int round = 0; round < 200'000; ++round) {
    auto bytes = bytes_of(sample_request());
    for (std::uint64_t changes = 1 + random() % 4; changes > 0; --changes) {
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    }
    const auto request = parse_stage_request(bytes, kLimits);
    if (!request) continue;
    ++accepted;
    ASSERT_LT(request->slot, kLimits.slots);
    ASSERT_GT(request->total_bytes(), 0u);
    ASSERT_LE(request->total_bytes(), kLimits.block_bytes);
    ASSERT_EQ(bytes_of(*request), bytes);
  }
  EXPECT_GT(accepted, 0u);
}

TEST(StageWire, AnOfferThatMakesNoSenseIsRefused) {
  const auto parses = [](auto change) {
    ConnectResponse response;
    response.source = Incarnation::random();
    LinkResponse& link = response.links.emplace_back();
    link.mtu_bytes = 4096;
    link.queue_pairs = {{1, 2}};
    link.stage =
        StageOffer{.block_bytes = 4096, .blocks = {{1 << 20, 5}}, .regions = {{{1, 1}, 9}}};
    change(link);
    return ConnectResponse::parse(response.to_bytes()).has_value();
  };
  EXPECT_TRUE(parses([](auto&) {}));
  EXPECT_FALSE(parses([](auto& link) { link.stage->block_bytes = 0; }));
  EXPECT_FALSE(parses([](auto& link) { link.stage->block_bytes = kMaxStageBlockBytes + 1; }));
  EXPECT_FALSE(parses([](auto& link) { link.stage->blocks.clear(); }));
  EXPECT_FALSE(parses([](auto& link) { link.stage->blocks.resize(kMaxStageBlocks + 1); }));
  EXPECT_FALSE(parses([](auto& link) { link.stage->blocks[0].address = ~std::uint64_t{0}; }));
  EXPECT_FALSE(parses([](auto& link) { link.queue_pairs.push_back({3, 4}); }));
  EXPECT_FALSE(parses([](auto& link) { link.queue_pairs.clear(); }));
  EXPECT_FALSE(parses([](auto& link) { link.windows.push_back({{1, 1}, 0, 9, 0, {1}}); }));
}

}  // namespace
}  // namespace rekindle::transport::verbs
