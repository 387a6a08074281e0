#include "src/bucket/round_stages.h"

#include <map>
#include <numeric>
#include <set>

#include <gtest/gtest.h>

#include "src/bucket/double_device.h"
#include "tests/bucket/sample.h"

namespace rekindle::bucket {
namespace {

using namespace std::chrono_literals;
using testing::random_boxes;
using testing::random_sample;
using testing::Sample;
using testing::sample_of;

std::vector<std::uint32_t> shares_of(const Contents& contents, std::uint32_t shares) {
  return share_out(contents.pieces(), shares);
}

// The same bytes, packed otherwise.
Sample repacked(const Sample& from, std::uint64_t most_segment_bytes) {
  std::vector<TensorInfo> infos;
  for (TensorIndex i = 0; i < from.tensors.size(); ++i) infos.push_back(from.tensors[i]);
  Sample other = sample_of(std::move(infos), 1, most_segment_bytes);
  const Contents theirs = from.contents();
  const Contents ours = other.contents();
  for (std::size_t i = 0; i < ours.pieces().size(); ++i) {
    const Piece& piece = ours.pieces()[i];
    if (piece.bytes == 0) continue;
    other.segments[piece.segment].replace(piece.offset_bytes, piece.bytes,
                                          from.bytes_of(theirs, theirs.pieces()[i]));
  }
  return other;
}

TEST(RoundPlan, OwnersHaveAboutAsManyBytes) {
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < 300; ++i) {
    tensors.push_back(
        {"t" + std::to_string(i), DType::kU8, {static_cast<std::uint64_t>(1000 + i)}});
  }
  const Contents contents = sample_of(std::move(tensors), 1).contents();
  for (const std::uint32_t shares : {1u, 2u, 4u, 7u}) {
    const auto share_of = shares_of(contents, shares);
    std::vector<std::uint64_t> bytes(shares);
    for (std::size_t i = 0; i < share_of.size(); ++i) {
      bytes[share_of[i]] += contents.pieces()[i].bytes;
    }
    const std::uint64_t fair =
        std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0}) / shares;
    for (const std::uint64_t own : bytes) EXPECT_NEAR(double(own), double(fair), 1300) << shares;
  }
}

// The plan of the shares must not depend on what only some ranks want: all ranks need the same one.
TEST(RoundPlan, PiecesWithoutAShareChangeNoShare) {
  std::vector<TensorInfo> common;
  std::vector<TensorInfo> all;
  PieceRuns brought;
  for (std::uint32_t i = 0; i < 40; ++i) {
    const TensorInfo info{fmt::format("t{:02}", i), DType::kU8, {1000 + 700 * std::uint64_t{i}}};
    all.push_back(info);
    if (i % 5 == 0) continue;
    common.push_back(info);
    if (!brought.empty() && brought.back().second == i) {
      ++brought.back().second;
    } else {
      brought.emplace_back(i, i + 1);
    }
  }
  const Contents only = sample_of(std::move(common), 1).contents();
  const Contents with_more = sample_of(std::move(all), 1).contents();
  constexpr std::uint64_t kBytes = 48'000;
  const auto small = *RoundPlan::create(only, share_out(only.pieces(), 3), 3, kBytes, kSealRoom);
  const auto large = *RoundPlan::create(with_more, share_out(with_more.pieces(), 3, brought), 3,
                                        kBytes, kSealRoom);
  EXPECT_EQ(small.rest(), nullptr);
  ASSERT_NE(large.rest(), nullptr);
  ASSERT_EQ(small.size(), large.size());
  std::set<std::string_view> in_round;
  for (std::size_t bucket = 0; bucket < small.size(); ++bucket) {
    const auto parts = small.parts(bucket);
    const auto its_parts = large.parts(bucket);
    ASSERT_EQ(parts.size(), its_parts.size()) << bucket;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const Piece& piece = with_more.pieces()[its_parts[i].piece];
      EXPECT_EQ(only.pieces()[parts[i].piece].name(), piece.name());
      EXPECT_EQ(parts[i].at, its_parts[i].at);
      EXPECT_EQ(parts[i].offset_bytes, its_parts[i].offset_bytes);
      EXPECT_EQ(parts[i].bytes, its_parts[i].bytes);
      in_round.insert(piece.name());
    }
  }
  EXPECT_EQ(in_round.size(), 32u);
  std::uint64_t rest_bytes = 0;
  for (std::uint32_t i = 0; i < 40; i += 5) rest_bytes += 1000 + 700 * std::uint64_t{i};
  EXPECT_EQ(large.rest()->payload_bytes(), rest_bytes);
  for (std::size_t bucket = 0; bucket < large.rest()->size(); ++bucket) {
    EXPECT_LE(large.rest()->bytes(bucket), large.bucket_bytes());
  }
}

TEST(RoundPlan, MoreOwnersThanTensorsIsFine) {
  const Sample sample = sample_of({{"a", DType::kU8, {10}}, {"b", DType::kU8, {10}}}, 1);
  const Contents contents = sample.contents();
  const auto plan = RoundPlan::create(contents, shares_of(contents, 4), 4, 4 * kPartAlignment);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->size(), 1u);
  EXPECT_EQ(plan->parts(0).size(), 2u);
}

TEST(RoundPlan, WhatCannotBeSharedOutIsRefused) {
  const Contents contents = sample_of({{"a", DType::kU8, {100, 1000}}}, 1).contents();
  const auto refused = [&](const std::vector<std::uint32_t>& share_of, std::uint32_t shares,
                           std::uint64_t bucket_bytes) {
    const auto plan = RoundPlan::create(contents, share_of, shares, bucket_bytes);
    return !plan && plan.error().code() == ErrorCode::kInvalid;
  };
  EXPECT_FALSE(refused({1}, 2, 1 << 20));
  EXPECT_TRUE(refused({2}, 2, 1 << 20)) << "a share that is none";
  EXPECT_TRUE(refused({}, 2, 1 << 20)) << "a piece without a share";
  EXPECT_TRUE(refused({0, 0}, 2, 1 << 20)) << "a share of no piece";
  EXPECT_TRUE(refused({0}, 0, 1 << 20)) << "no owners";
  EXPECT_FALSE(refused({0}, 4, 4 * kPartAlignment));
  EXPECT_TRUE(refused({0}, 4, 4 * kPartAlignment - 1)) << "shares of no bytes";
}

TEST(RoundPlan, ARoundOfTooManyBucketsIsRefused) {
  const std::uint64_t rows = kMostBuckets + 1;
  const Contents contents =
      sample_of({{"a", DType::kU8, {rows, kPartAlignment}}, {"b", DType::kU8, {1}}}, 1).contents();
  const std::vector<std::uint32_t> apart{0, 1};
  EXPECT_FALSE(RoundPlan::create(contents, apart, 2, 2 * kPartAlignment));
  EXPECT_TRUE(RoundPlan::create(contents, apart, 2, 4 * kPartAlignment));
  // Room for its bytes, but not once they are aligned.
  std::vector<TensorInfo> infos;
  for (std::uint64_t i = 0; i < rows; ++i) infos.push_back({std::to_string(i), DType::kU8, {2}});
  const Contents small = sample_of(std::move(infos), 1).contents();
  const std::vector<std::uint32_t> one(rows, 0);
  EXPECT_FALSE(RoundPlan::create(small, one, 1, kPartAlignment));
}

// Ranks come to the same plan, whatever their copies look like, also of boxes; and each byte of
// each piece is in it once.
TEST(RoundPlan, IsTheSameAtEveryRankWhateverTheLayout) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int turn = 0; turn < 20; ++turn) {
    const Sample sample = random_sample(random);
    const Sample other = repacked(sample, 200'000 + random() % 100'000'000);
    const auto wanted =
        turn % 2 == 0 ? std::vector<NamedBox>() : random_boxes(random, sample.tensors);
    const Contents here = sample.contents(wanted);
    const Contents there = other.contents(wanted);
    EXPECT_EQ(digest_of(here), digest_of(there));
    const auto shares = static_cast<std::uint32_t>(1 + random() % 5);
    const std::uint64_t bucket_bytes = shares * (kPartAlignment + random() % 50'000);
    ASSERT_EQ(shares_of(here, shares), shares_of(there, shares));
    const auto one = RoundPlan::create(here, shares_of(here, shares), shares, bucket_bytes);
    const auto two = RoundPlan::create(there, shares_of(there, shares), shares, bucket_bytes);
    ASSERT_TRUE(one && two);
    ASSERT_EQ(one->size(), two->size());
    std::map<std::uint32_t, std::uint64_t> bytes;
    for (std::size_t bucket = 0; bucket < one->size(); ++bucket) {
      EXPECT_EQ(one->parts(bucket), two->parts(bucket));
      for (const Part& part : one->parts(bucket)) {
        EXPECT_EQ(part.offset_bytes, bytes[part.piece]) << "in order";
        bytes[part.piece] += part.bytes;
        EXPECT_LE(part.at + part.bytes, one->bucket_bytes());
      }
    }
    for (std::uint32_t i = 0; i < here.pieces().size(); ++i) {
      EXPECT_EQ(bytes[i], here.pieces()[i].bytes);
    }
  }
}

TEST(RoundDigest, DiffersWithWhatIsWanted) {
  const Sample sample = sample_of({{"a", DType::kF32, {8, 8}}, {"b", DType::kF32, {8, 8}}}, 1);
  std::set<Digest> all;
  const auto is_new = [&all](const Sample& of, const std::vector<NamedBox>& wanted) {
    return all.insert(digest_of(of.contents(wanted))).second;
  };
  EXPECT_TRUE(is_new(sample, {}));
  EXPECT_FALSE(is_new(sample, {{"a", {}, {}}, {"b", {}, {}}})) << "the same, said otherwise";
  EXPECT_TRUE(is_new(sample, {{"a", {}, {}}}));
  EXPECT_TRUE(is_new(sample, {{"b", {}, {}}}));
  EXPECT_TRUE(is_new(sample, {{"a", {0, 0}, {4, 8}}}));
  EXPECT_TRUE(is_new(sample, {{"a", {4, 0}, {4, 8}}}));
  EXPECT_TRUE(is_new(sample, {{"a", {0, 0}, {8, 4}}}));
  EXPECT_TRUE(is_new(sample_of({{"a", DType::kI32, {8, 8}}}, 1), {}));
  EXPECT_TRUE(is_new(sample_of({{"a", DType::kF32, {64}}}, 1), {}));
}

TEST(PieceKeys, AreEqualForTheSamePiecesInTheOrderOfASession) {
  const Sample sample = sample_of({{"a", DType::kF32, {8, 8}}, {"b", DType::kF32, {4}}}, 1);
  const Box whole = Box::whole(sample.tensors[0].shape);
  const Box upper{*Dims::from(std::vector<std::uint64_t>{0, 0}),
                  *Dims::from(std::vector<std::uint64_t>{4, 8})};
  const Box b = Box::whole(sample.tensors[1].shape);
  const auto keys = keys_of(sample.tensors, std::vector<TensorBox>{{1, b}, {0, whole}});
  ASSERT_EQ(keys.size(), 2u);
  EXPECT_EQ(keys[0].bytes, 256u);
  EXPECT_EQ(keys[1].bytes, 16u);
  EXPECT_NE(keys[0].key, keys[1].key);
  const auto others = keys_of(sample.tensors, std::vector<TensorBox>{{0, upper}, {1, b}});
  EXPECT_EQ(others[1], keys[1]);
  EXPECT_NE(others[0].key, keys[0].key) << "another box of the same tensor";
  const Sample wider = sample_of({{"b", DType::kI32, {4}}}, 1);
  EXPECT_NE(keys_of(wider.tensors, std::vector<TensorBox>{{0, b}})[0].key, keys[1].key)
      << "another type";
}

// What a tail gives out is what the round had left, each byte once.
TEST(RoundTail, BringsWhatIsLeftAndNothingElse) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto device = make_double_device("double:0", 64 << 20);
  for (int turn = 0; turn < 10; ++turn) {
    const Sample sample = random_sample(random);
    const Contents contents = sample.contents();
    const auto shares = static_cast<std::uint32_t>(1 + random() % 4);
    const auto pieces = static_cast<std::uint32_t>(contents.pieces().size());
    PieceRuns brought;
    if (turn % 2 == 1) brought.emplace_back(random() % pieces, pieces);
    const auto plan = *RoundPlan::create(contents, share_out(contents.pieces(), shares, brought),
                                         shares, shares * (kPartAlignment + random() % 50'000));
    Pinner pinner(*device, 1);
    SegmentFetch::Segments segments;
    const auto files = sample.files();
    for (std::size_t i = 0; i < files.size(); ++i) {
      segments.push_back(*pinner.add(files[i].get(), sample.segment_bytes[i]));
      ASSERT_TRUE(pinner.wait(*segments.back(), std::chrono::steady_clock::now() + 30s));
    }
    RoundTail::Fetches fetches;
    for (std::uint32_t share = 0; share < shares; ++share) {
      fetches.push_back(std::make_unique<SegmentFetch>(plan.plan_of(share), pinner, segments,
                                                       contents.tiles().tile_count()));
    }
    if (plan.rest() != nullptr) {
      fetches.push_back(std::make_unique<SegmentFetch>(*plan.rest(), pinner, segments,
                                                       contents.tiles().tile_count()));
    }
    const std::size_t first = random() % (plan.size() + 1);
    std::map<std::uint32_t, std::uint64_t> bytes;
    for (std::size_t bucket = 0; bucket < first; ++bucket) {
      for (const Part& part : plan.parts(bucket)) bytes[part.piece] += part.bytes;
    }
    RoundTail tail(plan, fetches, first);
    for (const auto& fetch : fetches) fetch->mark_all_ready();
    std::size_t given = 0;
    while (const auto bucket = tail.next()) {
      EXPECT_EQ(*bucket, given++);
      for (const Part& part : tail.parts(*bucket)) {
        bytes[part.piece] += part.bytes;
        EXPECT_LE(part.at + part.bytes, plan.bucket_bytes());
      }
    }
    EXPECT_EQ(given, tail.size());
    for (std::uint32_t i = 0; i < contents.pieces().size(); ++i) {
      EXPECT_EQ(bytes[i], contents.pieces()[i].bytes) << contents.pieces()[i].name();
    }
  }
}

// Ranks that do not come.
class Unsettled final : public Collective {
 public:
  std::uint32_t rank() const override { return 0; }
  std::uint32_t ranks() const override { return 2; }
  Result<void> spread(DeviceAddress, std::uint64_t, std::span<const std::uint32_t>,
                      Stream&) override {
    return {};
  }
  Result<bool> settled() override { return false; }
  void abort() override {}
};

TEST(RoundSpread, DoesNotWaitForPeersForEver) {
  const auto device = make_double_device("double:0", 1 << 20);
  const auto stream = *device->make_stream();
  Unsettled collective;
  RoundSpread spread(collective, kPartAlignment, {0}, {.peers = 20ms, .stop = nullptr});
  const auto late = spread.enqueue(0, 0, *stream);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code(), ErrorCode::kTimeout);
  EXPECT_FALSE(spread.check()) << "nor takes what is not settled for spread";
}

TEST(RoundSpread, StopsToWaitWhenItIsTold) {
  const auto device = make_double_device("double:0", 1 << 20);
  const auto stream = *device->make_stream();
  Unsettled collective;
  int asked = 0;
  RoundSpread spread(collective, kPartAlignment, {0},
                     {.peers = std::chrono::hours(1), .stop = [&asked] { return ++asked == 3; }});
  const auto stopped = spread.enqueue(0, 0, *stream);
  ASSERT_FALSE(stopped);
  EXPECT_EQ(stopped.error().code(), ErrorCode::kStale);
}

}  // namespace
}  // namespace rekindle::bucket
