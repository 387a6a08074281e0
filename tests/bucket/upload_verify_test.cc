// Uploads to a double device in which bits change on their way.
#include "src/bucket/upload_verify.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

#include "src/base/clock.h"
#include "src/bucket/double_device.h"
#include "tests/bucket/flipping_device.h"
#include "tests/bucket/piece_consumer.h"
#include "tests/bucket/sample.h"
#include "tests/support/must.h"

namespace rekindle::bucket {
namespace {

using namespace std::chrono_literals;
using testing::FlippingDevice;
using testing::PieceConsumer;
using testing::Sample;
using testing::sample_of;
using testing::UploadFlip;

constexpr std::uint64_t kBucket = 128 << 10;

struct Case {
  std::vector<NamedBox> wanted = {};
  std::vector<UploadFlip> flips = {};
  bool by_host = false;     // the device computes no digests
  bool wrong_host = false;  // a byte of the first tensor
};

// One device that is filled from this host's memory.
class Loading {
 public:
  Loading(Sample from, const Case& of)
      : sample_(std::move(from)),
        inner_(make_double_device("double:7", 64 << 20)),
        flipping_(*inner_, of.flips),
        without_(flipping_),
        device_(of.by_host ? static_cast<Device&>(without_) : flipping_),
        contents_(sample_.contents(of.wanted)),
        plan_(must(Plan::create(contents_, kBucket))),
        pinner_(device_, 1),
        slots_(must(allocate_slots(
            device_, {.bucket_bytes = kBucket, .slots = 3, .free_fraction = 1.0}, 4 * kBucket))),
        consumer(plan_, slots_, contents_) {
    Sample host = sample_;
    const Piece& first = contents_.pieces().front();
    if (of.wrong_host) host.segments[first.segment][first.offset_bytes] ^= 1;
    const auto files = host.files();
    for (std::size_t i = 0; i < files.size(); ++i) {
      segments_.push_back(must(pinner_.add(files[i].get(), sample_.segment_bytes[i])));
    }
    fetch_.emplace(plan_, pinner_, segments_, contents_.tiles().tile_count());
    fetch_->wait_for_no_pins();
    fetch_->mark_all_ready();
    verify_ = must(UploadVerify::create({device_, *fetch_, contents_, leaves_, segments_},
                                        slots_.count(), plan_.most_tiles(), [this](std::size_t i) {
                                          const auto parts = plan_.parts(i);
                                          return std::vector<Part>(parts.begin(), parts.end());
                                        }));
    pipeline_.emplace(device_, plan_, slots_, *fetch_, nullptr, consumer,
                      PipelineOptions{60s, 60s});
    must(pipeline_->verify_with(*verify_));
    must(pipeline_->start());
  }

  void run() {
    while (must(pipeline_->step(steady_now())) != Pipeline::State::kDone) {
      ASSERT_TRUE(pipeline_->deadline());
      ASSERT_TRUE(pipeline_->awaits_hand_over()) << "nobody would call step() again";
      std::this_thread::sleep_for(50us);
    }
    EXPECT_FALSE(pipeline_->awaits_hand_over());
  }
  void expect_all_arrived() {
    for (const auto& [bucket, why] : consumer.spoiled) ADD_FAILURE() << bucket << why.message();
    for (std::size_t i = 0; i < contents_.pieces().size(); ++i) {
      const Piece& piece = contents_.pieces()[i];
      EXPECT_EQ(consumer.pieces[i], sample_.bytes_of(contents_, piece)) << piece.name;
    }
  }
  std::uint64_t refilled() const { return verify_->refilled(); }
  const Contents& contents() const { return contents_; }
  const Plan& plan() const { return plan_; }

 private:
  const Sample sample_;
  const std::vector<Digest> leaves_ = sample_.leaves();
  const std::unique_ptr<Device> inner_;
  FlippingDevice flipping_;
  testing::WithoutDigests without_;
  Device& device_;
  const Contents contents_;
  const Plan plan_;
  Pinner pinner_;
  SegmentFetch::Segments segments_;
  Slots slots_;

 public:
  PieceConsumer consumer;

 private:
  std::optional<SegmentFetch> fetch_;
  std::unique_ptr<UploadVerify> verify_;
  std::optional<Pipeline> pipeline_;
};

Sample small_sample() {
  return sample_of({{"a", DType::kU8, {60'000}},
                    {"b", DType::kBF16, {300, 512}},
                    {"c", DType::kF32, {33, 77}},
                    {"d", DType::kBF16, {200, 512}}},
                   5);
}
// A tensor-parallel shard: its border cuts through tiles.
std::vector<NamedBox> shard() {
  return {{"a", {100}, {50'000}}, {"b", {0, 256}, {300, 256}}, {"d", {50, 8}, {111, 401}}};
}
std::vector<NamedBox> boxes(bool of_shard) { return of_shard ? shard() : std::vector<NamedBox>(); }

// The first part of the bucket that is made of rests, or of whole tiles.
std::optional<Part> part_of(const Loading& loading, std::size_t bucket, bool of_rests) {
  for (const Part& part : loading.plan().parts(bucket)) {
    const auto checks = checks_of(loading.contents(), {&part, 1});
    if (of_rests ? checks.tiles.empty() : checks.rests.empty()) return part;
  }
  return std::nullopt;
}

TEST(UploadVerify, WhatArrivesRightIsHandedOverOnce) {
  for (const bool of_shard : {false, true}) {
    for (const bool by_host : {false, true}) {
      Loading loading(small_sample(), {.wanted = boxes(of_shard), .by_host = by_host});
      ASSERT_GT(loading.plan().size(), 1u);
      loading.run();
      loading.expect_all_arrived();
      EXPECT_EQ(loading.refilled(), 0u);
    }
  }
}

TEST(UploadVerify, AFlippedBitIsFoundAndItsBucketIsFilledAgain) {
  for (const bool of_shard : {false, true}) {
    const std::size_t buckets = Loading(small_sample(), {.wanted = boxes(of_shard)}).plan().size();
    for (std::size_t bucket = 0; bucket < buckets; ++bucket) {
      for (const bool by_host : {false, true}) {
        Loading loading(small_sample(), {.wanted = boxes(of_shard),
                                         .flips = {{.bucket = bucket, .offset = 9}},
                                         .by_host = by_host});
        loading.run();
        loading.expect_all_arrived();
        EXPECT_EQ(loading.refilled(), 1u) << "bucket " << bucket;
      }
    }
  }
}

TEST(UploadVerify, EveryBucketMayBeFilledAgain) {
  std::vector<UploadFlip> flips;
  for (std::size_t bucket = 0; bucket < 16; ++bucket) flips.push_back({bucket, 1});
  Loading loading(small_sample(), {.flips = std::move(flips)});
  loading.run();
  loading.expect_all_arrived();
  EXPECT_EQ(loading.refilled(), loading.plan().size());
}

TEST(UploadVerify, PartsOfTilesAreComparedWithTheHostsBytes) {
  const Loading shape(small_sample(), {.wanted = shard()});
  const auto part = part_of(shape, 0, true);
  ASSERT_TRUE(part) << "the shard cuts through no tile";
  Loading loading(small_sample(),
                  {.wanted = shard(), .flips = {{.bucket = 0, .offset = part->at + 1}}});
  loading.run();
  loading.expect_all_arrived();
  EXPECT_EQ(loading.refilled(), 1u);
}

TEST(UploadVerify, WrongTwiceItIsAnErrorThatNamesDeviceAndTensor) {
  for (const bool of_shard : {false, true}) {
    const Loading shape(small_sample(), {.wanted = boxes(of_shard)});
    const auto part = part_of(shape, 0, of_shard);
    ASSERT_TRUE(part);
    Loading loading(small_sample(), {.wanted = boxes(of_shard),
                                     .flips = {{.bucket = 0, .offset = part->at + 1, .times = 2}}});
    loading.run();
    EXPECT_EQ(loading.refilled(), 1u);
    ASSERT_EQ(loading.consumer.spoiled.size(), 1u);
    const auto& [bucket, why] = loading.consumer.spoiled.front();
    EXPECT_EQ(bucket, 0u);
    EXPECT_EQ(why.code(), ErrorCode::kCorrupt);
    const std::string tensor(shape.contents().pieces()[part->piece].name);
    EXPECT_NE(why.message().find("double:7"), std::string::npos) << why.message();
    EXPECT_NE(why.message().find("'" + tensor + "'"), std::string::npos) << why.message();
  }
}

// Whole tiles know their leaves: a host's copy that has gone wrong does not pass.
TEST(UploadVerify, WrongBytesInTheHostsMemoryDoNotReachTheConsumer) {
  Loading loading(small_sample(), {.wrong_host = true});
  loading.run();
  ASSERT_EQ(loading.consumer.spoiled.size(), 1u);
  const Error& why = loading.consumer.spoiled.front().second;
  EXPECT_EQ(why.code(), ErrorCode::kCorrupt);
  EXPECT_NE(why.message().find("tensor 'a'"), std::string::npos) << why.message();
}

TEST(UploadVerify, LeavesOfAnotherVersionAreRefused) {
  const Sample sample = small_sample();
  const Contents contents = sample.contents();
  const Plan plan = must(Plan::create(contents, kBucket));
  const auto device = make_double_device("double:7", 64 << 20);
  Pinner pinner(*device, 1);
  SegmentFetch fetch(plan, pinner, {}, contents.tiles().tile_count());
  const auto leaves = sample.leaves();
  const SegmentFetch::Segments none;
  const auto made = UploadVerify::create(
      {*device, fetch, contents, std::span(leaves).first(1), none}, 3, plan.most_tiles(), {});
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code(), ErrorCode::kInvalid);
}

}  // namespace
}  // namespace rekindle::bucket
