#include "src/bucket/pipeline.h"

#include <cstring>
#include <thread>

#include <gtest/gtest.h>

#include "src/base/clock.h"
#include "src/bucket/double_device.h"
#include "src/bucket/segment_fetch.h"
#include "tests/bucket/forwarding_device.h"
#include "tests/bucket/pipeline_rig.h"
#include "tests/bucket/sample.h"

namespace rekindle::bucket {
namespace {

using namespace std::chrono_literals;
using testing::kDeviceBytes;
using testing::random_boxes;
using testing::random_sample;
using testing::Rig;
using testing::Sample;
using testing::sample_of;

TEST(Pipeline, EveryByteOfACopyThatIsHereArrives) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 10; ++round) {
    const Sample sample = random_sample(random);
    const auto wanted =
        round % 2 == 0 ? std::vector<NamedBox>() : random_boxes(random, sample.tensors);
    Rig rig(sample, wanted, {.bucket_bytes = 4096 + random() % 300'000});
    rig.fetch.mark_all_ready();
    EXPECT_EQ(rig.run(Pipeline::State::kDone), Pipeline::State::kDone);
    EXPECT_EQ(rig.pipeline.delivered(), rig.plan.size());
    rig.expect_all_arrived();
  }
}

TEST(Pipeline, WhatAPullBringsGoesOnInAnyOrder) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 5; ++round) {
    const Sample sample = random_sample(random);
    Rig rig(sample, {}, {.bucket_bytes = 100'000});
    std::vector<TileIndex> tiles(rig.contents.tiles().tile_count());
    for (TileIndex i = 0; i < tiles.size(); ++i) tiles[i] = i;
    std::shuffle(tiles.begin(), tiles.end(), random);
    for (const TileIndex tile : tiles) {
      rig.run(Pipeline::State::kFetching);
      ASSERT_TRUE(rig.fetch.mark_ready({{tile, tile + 1}}));
    }
    EXPECT_EQ(rig.run(Pipeline::State::kDone), Pipeline::State::kDone);
    rig.expect_all_arrived();
  }
}

TEST(Pipeline, TilesThatDoNotExistAreRefused) {
  Rig rig(sample_of({{"w", DType::kU8, {100}}}, 1), {}, {.bucket_bytes = 4096});
  EXPECT_FALSE(rig.fetch.mark_ready({{0, 2}}));
  EXPECT_FALSE(rig.fetch.mark_ready({{0, 0}}));
  EXPECT_EQ(rig.run(Pipeline::State::kFetching), Pipeline::State::kFetching);
}

TEST(Pipeline, AConsumerHasAsManyBucketsAsThereAreSlotsAndNoMore) {
  for (const std::uint32_t slots : {1u, 2u, 3u}) {
    Rig rig(sample_of({{"w", DType::kU8, {100'000}}}, 1), {},
            {.bucket_bytes = 4096, .slots = slots});
    rig.consumer.willing = false;
    rig.fetch.mark_all_ready();
    EXPECT_EQ(rig.run(Pipeline::State::kReleasing), Pipeline::State::kReleasing);
    EXPECT_EQ(rig.consumer.most_held, slots);
    EXPECT_EQ(rig.pipeline.delivered(), 0u);
    rig.consumer.willing = true;
    EXPECT_EQ(rig.run(Pipeline::State::kDone), Pipeline::State::kDone);
    EXPECT_EQ(rig.consumer.most_held, slots);
    rig.expect_all_arrived();
  }
}

TEST(Pipeline, AConsumerThatKeepsABucketEndsItByTheDeadline) {
  Rig rig(sample_of({{"w", DType::kU8, {100'000}}}, 1), {}, {.bucket_bytes = 4096}, nullptr,
          {.release_deadline = 200s, .fill_deadline = 400s});
  rig.consumer.willing = false;
  rig.fetch.mark_all_ready();
  EXPECT_FALSE(rig.pipeline.deadline());
  rig.run(Pipeline::State::kReleasing);
  const auto deadline = rig.pipeline.deadline();
  ASSERT_TRUE(deadline);
  EXPECT_TRUE(rig.pipeline.step(*deadline - 1s));
  const auto late = rig.pipeline.step(*deadline);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code(), ErrorCode::kTimeout);
}

// A device that hangs: its copies never end.
class Hanging final : public testing::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  Result<bool> is_done(const Event&) override { return false; }
};

// Is never asked, because the device does nothing of what is queued.
class NeverAsked final : public Verify {
 public:
  Result<void> enqueue(std::size_t, std::uint32_t, DeviceAddress, Stream&) override { return {}; }
  Result<bool> check(std::uint32_t) override { return fail(ErrorCode::kInvalid, "asked"); }
  Result<bool> refill(std::uint32_t, Stream&) override { return false; }
  Error wrong(std::uint32_t) const override { return Error(ErrorCode::kCorrupt, "asked"); }
};

TEST(Pipeline, Row38ADeviceThatDoesNotFillABucketEndsItByTheDeadline) {
  for (const bool verifies : {false, true}) {
    Rig rig(sample_of({{"w", DType::kU8, {100'000}}}, 1), {}, {.bucket_bytes = 4096});
    rig.fetch.mark_all_ready();
    rig.consumer.willing = false;  // what is not filled it cannot give back
    Hanging hanging(*rig.device);
    NeverAsked verify;
    Pipeline pipeline(hanging, rig.plan, rig.slots, rig.fetch, nullptr, rig.consumer,
                      {.release_deadline = 400s, .fill_deadline = 200s});
    if (verifies) {
      ASSERT_TRUE(pipeline.verify_with(verify));
    }
    ASSERT_TRUE(pipeline.start());
    const TimePoint begin = steady_now();
    while (!pipeline.deadline()) ASSERT_TRUE(pipeline.step(begin));  // the segment is being pinned
    EXPECT_TRUE(pipeline.step(begin + 199s));
    const auto late = pipeline.step(*pipeline.deadline());
    ASSERT_FALSE(late);
    EXPECT_EQ(late.error().code(), ErrorCode::kInternal) << late.error().message();
    EXPECT_EQ(rig.consumer.most_held > 0, !verifies);
  }
}

// Stands for a broadcast: the bytes come from elsewhere on the device, behind the upload.
class FromPeer final : public Spread {
 public:
  FromPeer(Device& device, std::uint64_t bytes) : bytes_(bytes), memory_(*device.allocate(bytes)) {
    std::memset(reinterpret_cast<void*>(memory_->address()), 'x', bytes);  // the double's
  }
  Result<void> enqueue(std::size_t bucket, DeviceAddress at, Stream& stream) override {
    order.push_back(bucket);
    const Move move{memory_->address(), at, bytes_};
    return stream.move({&move, 1});
  }
  Result<void> check() override { return {}; }
  std::vector<std::size_t> order;

 private:
  std::uint64_t bytes_;
  std::unique_ptr<Memory> memory_;
};

TEST(Pipeline, ASpreadWorksOnWhatWasFetchedAndIsDeliveredAfterIt) {
  const auto device = make_double_device("double:1", kDeviceBytes);
  FromPeer peer(*device, 1000);
  Rig rig(sample_of({{"w", DType::kU8, {50'000}}}, 1), {}, {.bucket_bytes = 4096}, &peer);
  rig.fetch.mark_all_ready();
  EXPECT_EQ(rig.run(Pipeline::State::kDone), Pipeline::State::kDone);
  EXPECT_EQ(peer.order.size(), rig.plan.size());
  std::string expected = rig.sample.bytes_of(rig.contents, rig.contents.pieces()[0]);
  for (std::size_t bucket = 0; bucket < rig.plan.size(); ++bucket) {
    const Part& part = rig.plan.parts(bucket).front();
    const std::uint64_t bytes = std::min<std::uint64_t>(part.bytes, 1000);
    expected.replace(part.offset_bytes, bytes, bytes, 'x');
  }
  EXPECT_EQ(rig.consumer.pieces[0], expected);
}

TEST(Slots, TakeLessWhereTheDeviceHasLess) {
  constexpr std::uint64_t kMiB = 1 << 20;
  const auto slots_with = [](std::uint64_t memory, SlotOptions options) {
    const auto device = make_double_device("double:0", memory);
    auto slots = allocate_slots(*device, options, 10'000 * kMiB);
    struct Got {
      std::uint64_t mib;
      std::uint32_t count;
      bool warned;
      auto operator<=>(const Got&) const = default;
    };
    if (!slots) return Got{0, 0, slots.error().code() == ErrorCode::kExhausted};
    return Got{slots->bucket_bytes / kMiB, slots->count(), !slots->warning.empty()};
  };
  const SlotOptions all{.bucket_bytes = 64 * kMiB, .slots = 3, .free_fraction = 1.0};
  using Got = decltype(slots_with(0, all));
  EXPECT_EQ(slots_with(400 * kMiB, all), (Got{64, 3, false}));
  EXPECT_EQ(slots_with(191 * kMiB, all), (Got{32, 3, true}));
  EXPECT_EQ(slots_with(48 * kMiB, all), (Got{16, 3, true}));
  EXPECT_EQ(slots_with(47 * kMiB, all), (Got{16, 2, true}));
  EXPECT_EQ(slots_with(16 * kMiB, all), (Got{16, 1, true}))
      << "one after the other, with a warning";
  EXPECT_EQ(slots_with(15 * kMiB, all), (Got{0, 0, true})) << "then an error";
  SlotOptions capped = all;
  capped.cap_bytes = 100 * kMiB;
  EXPECT_EQ(slots_with(400 * kMiB, capped), (Got{32, 3, true}));
  SlotOptions part = all;
  part.free_fraction = 0.25;
  EXPECT_EQ(slots_with(400 * kMiB, part), (Got{32, 3, true}));
  const SlotOptions small{.bucket_bytes = 1 * kMiB, .slots = 2, .free_fraction = 1.0};
  EXPECT_EQ(slots_with(3 * kMiB, small), (Got{1, 2, false})) << "who asks for small ones gets them";
}

TEST(Slots, OneIsEnoughForWhatFitsIt) {
  const auto device = make_double_device("double:0", kDeviceBytes);
  const auto slots = allocate_slots(*device, {.bucket_bytes = 1 << 20, .free_fraction = 1.0}, 1000);
  ASSERT_TRUE(slots);
  EXPECT_EQ(slots->count(), 1u);
  EXPECT_EQ(slots->warning, "");
}

}  // namespace
}  // namespace rekindle::bucket
