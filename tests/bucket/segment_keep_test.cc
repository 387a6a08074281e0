// What a round brings is kept in the segments of a host that lacks it: on a double device, with a
// spread that is the test's.
#include "src/bucket/segment_keep.h"

#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <thread>

#include <fcntl.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "src/base/clock.h"
#include "src/bucket/double_device.h"
#include "src/bucket/double_stream.h"
#include "src/bucket/round_stages.h"
#include "tests/bucket/sample.h"

namespace rekindle::bucket {
namespace {

using namespace std::chrono_literals;
using testing::random_boxes;
using testing::random_sample;
using testing::Sample;
using testing::sample_of;

constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 62;

TEST(Allowance, GrowsWithTimeAndIsNotLostWhenItIsNotUsed) {
  const TimePoint begin = steady_now();
  Allowance allowance(1000, begin);
  EXPECT_FALSE(allowance.take(1, begin));
  EXPECT_TRUE(allowance.take(500, begin + 1s));
  EXPECT_FALSE(allowance.take(501, begin + 1s));
  EXPECT_TRUE(allowance.take(500, begin + 1s));
  EXPECT_FALSE(allowance.take(1, begin + 1s));
  EXPECT_TRUE(allowance.take(9000, begin + 10s));
  EXPECT_EQ(allowance.taken(), 10'000u);
}

TEST(Allowance, NothingIsAllowedBeforeItBeginsOrWithoutARate) {
  const TimePoint begin = steady_now();
  EXPECT_FALSE(Allowance(kNoLimit, begin).take(1, begin - 1s));
  EXPECT_FALSE(Allowance(0, begin).take(1, begin + 24h));
}

TEST(Allowance, WhatIsUsedAnywayTakesRoom) {
  const TimePoint begin = steady_now();
  Allowance allowance(1000, begin);
  allowance.use(1500);
  EXPECT_FALSE(allowance.has_room(1, begin + 1s));
  EXPECT_TRUE(allowance.has_room(500, begin + 2s));
  EXPECT_FALSE(allowance.take(501, begin + 2s));
}

TEST(Allowance, LargeNumbersDoNotWrapAround) {
  const TimePoint begin = steady_now();
  Allowance allowance(kNoLimit, begin);
  EXPECT_TRUE(allowance.take(kNoLimit, begin + 1000s));
  EXPECT_TRUE(allowance.take(kNoLimit, begin + 1000s));
  EXPECT_FALSE(Allowance(1, begin).take(~std::uint64_t{0}, begin + 1000s));
}

// The bytes come from where the test says; from bucket `good` on they are garbage, as after an
// abort.
class Brings final : public Spread {
 public:
  Brings(const RoundPlan& plan, const Sample& sample) : plan_(plan), sample_(sample) {}
  Result<void> enqueue(std::size_t bucket, DeviceAddress at, Stream& stream) override {
    return push_work(stream, [this, bucket, at](const auto& /*stop*/) {
      auto* const to = reinterpret_cast<char*>(static_cast<std::uintptr_t>(at));
      std::memset(to, '!', plan_.bucket_bytes());
      for (std::uint32_t share = 0; bucket < good && share < plan_.shares(); ++share) {
        if (bucket >= plan_.plan_of(share).size()) continue;
        for (const SegmentCopy& copy : plan_.plan_of(share).copies(bucket)) {
          for (std::uint64_t row = 0; row < copy.rows; ++row) {
            std::memcpy(to + share * plan_.share_bytes() + copy.at + row * copy.to_stride,
                        sample_.segments[copy.segment].data() + copy.from + row * copy.from_stride,
                        copy.run_bytes);
          }
        }
      }
      return true;
    });
  }
  Result<void> check() override {
    if (checked_++ < good) return {};
    return fail(ErrorCode::kPeerLost, "a rank is gone");
  }
  std::size_t good = ~std::size_t{0};

 private:
  const RoundPlan& plan_;
  const Sample& sample_;
  std::size_t checked_ = 0;
};

class GivesBack final : public Deliver {
 public:
  Result<void> hand_over(std::size_t bucket, std::uint32_t) override {
    EXPECT_EQ(bucket, handed_over++);
    return {};
  }
  Result<bool> released(std::uint32_t) override { return true; }
  std::size_t handed_over = 0;
};

// A host whose segments have nothing but '?'.
struct Host {
  Host(const Sample& from, const std::vector<NamedBox>& wanted, std::uint32_t shares,
       std::uint64_t bucket_bytes, bool may_write = true)
      : sample(from),
        contents(sample.contents(wanted)),
        plan(*RoundPlan::create(contents, share_out(contents.pieces(), shares), shares,
                                bucket_bytes)),
        final_tiles(contents.tiles().tile_count()) {
    Sample blank = sample;
    for (std::string& segment : blank.segments) std::fill(segment.begin(), segment.end(), '?');
    files = blank.files();
    for (std::size_t i = 0; i < files.size(); ++i) {
      const std::string path = fmt::format("/proc/self/fd/{}", files[i].get());
      const UniqueFd reader(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
      segments.push_back(
          *pinner.add(may_write ? files[i].get() : reader.get(), sample.segment_bytes[i]));
      EXPECT_TRUE(pinner.wait(*segments.back(), steady_now() + 30s));
      EXPECT_EQ(segments.back()->writable() != nullptr, may_write);
    }
  }

  // A round with one device that keeps some; what it has kept, and the error that ended it.
  struct Outcome {
    std::vector<KeptTiles> kept;
    std::uint64_t bytes = 0;
    std::optional<Error> error;
    std::size_t handed_over = 0;
  };
  Outcome run(SegmentKeep::Which which, std::size_t good = ~std::size_t{0},
              std::uint64_t rate = kNoLimit, std::optional<SegmentKeep::Link> link = std::nullopt) {
    Slots slots = *allocate_slots(
        *device, {.bucket_bytes = plan.bucket_bytes(), .slots = 3, .free_fraction = 1.0},
        4 * plan.bucket_bytes());
    RoundFetch fetch(plan, std::nullopt);
    Brings spread(plan, sample);
    spread.good = good;
    GivesBack deliver;
    SegmentKeep keep(*device, plan, pinner, segments, final_tiles, which,
                     {Allowance(rate, steady_now() - 1s), link}, slots.count());
    EXPECT_TRUE(keep.start());
    Pipeline pipeline(*device, plan.size(), slots, fetch, &spread, deliver, {60s, 60s});
    EXPECT_TRUE(pipeline.start());
    pipeline.keep_with(keep);
    Outcome outcome;
    const TimePoint give_up = steady_now() + 60s;
    for (;;) {
      const auto state = pipeline.step(steady_now());
      if (!state) outcome.error = state.error();
      if (!state || *state == Pipeline::State::kDone) break;
      if (steady_now() > give_up) throw std::runtime_error("the pipeline stands still");
      std::this_thread::sleep_for(20us);
    }
    EXPECT_TRUE(pipeline.drain(steady_now() + 30s));
    EXPECT_FALSE(!outcome.error && pipeline.awaits_keep());
    outcome.kept = keep.kept();
    outcome.bytes = keep.kept_bytes();
    outcome.handed_over = deliver.handed_over;
    return outcome;
  }

  // The segments, as far as the buckets that `is_kept` says have been written to them.
  void expect_segments(const std::function<bool(std::size_t)>& is_kept,
                       std::uint32_t first_share = 0) const {
    std::vector<std::string> expected;
    for (const auto bytes : sample.segment_bytes) expected.emplace_back(bytes, '?');
    for (std::uint32_t share = first_share; share < plan.shares(); ++share) {
      for (std::size_t bucket = 0; bucket < plan.plan_of(share).size(); ++bucket) {
        if (!is_kept(bucket)) continue;
        for (const SegmentCopy& copy : plan.plan_of(share).copies(bucket)) {
          for (std::uint64_t row = 0; row < copy.rows; ++row) {
            const std::uint64_t from = copy.from + row * copy.from_stride;
            expected[copy.segment].replace(from, copy.run_bytes, sample.segments[copy.segment],
                                           from, copy.run_bytes);
          }
        }
      }
    }
    for (std::size_t i = 0; i < files.size(); ++i) {
      std::string seen(sample.segment_bytes[i], '\0');
      ASSERT_EQ(::pread(files[i].get(), seen.data(), seen.size(), 0),
                static_cast<ssize_t>(seen.size()));
      ASSERT_TRUE(seen == expected[i]) << "segment " << i;
    }
  }

  const Sample sample;
  const std::unique_ptr<Device> device = make_double_device("double:0", 64 << 20);
  const Contents contents;
  const RoundPlan plan;
  std::vector<UniqueFd> files;
  Pinner pinner{*device, 1};
  SegmentFetch::Segments segments;
  TileSet final_tiles;
};

// Tiles by whether all parts of them were kept, over several devices.
std::set<TileIndex> whole_tiles(const std::vector<std::vector<KeptTiles>>& of_devices) {
  std::map<TileIndex, std::uint32_t> parts;
  std::set<TileIndex> whole;
  for (const auto& kept : of_devices) {
    for (const KeptTiles& run : kept) {
      for (TileIndex tile = run.begin; tile < run.end; ++tile) {
        EXPECT_LE(parts[tile] += run.parts, run.of) << tile;
        if (parts[tile] == run.of) whole.insert(tile);
      }
    }
  }
  return whole;
}

TEST(SegmentKeep, AllThatPassesIsKeptWhateverTheShapes) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int turn = 0; turn < 10; ++turn) {
    const Sample sample = random_sample(random);
    const auto wanted =
        turn % 2 == 0 ? std::vector<NamedBox>() : random_boxes(random, sample.tensors);
    const auto shares = static_cast<std::uint32_t>(1 + random() % 4);
    Host host(sample, wanted, shares, shares * (kPartAlignment + random() % 100'000));
    if (host.contents.total_bytes() == 0) continue;
    const auto outcome = host.run({});
    ASSERT_FALSE(outcome.error);
    EXPECT_EQ(outcome.bytes, host.contents.total_bytes());
    host.expect_segments([](std::size_t) { return true; });
    for (const KeptTiles& run : outcome.kept) EXPECT_EQ(run.parts, run.of);
  }
}

TEST(SegmentKeep, DevicesThatShareTheWorkKeepItAllTogether) {
  Host host(sample_of({{"a", DType::kU8, {3000, 700}}, {"b", DType::kBF16, {90'000}}}, 3), {}, 2,
            40'000);
  const std::uint32_t devices = 3;
  std::vector<std::vector<KeptTiles>> kept;
  std::uint64_t bytes = 0;
  for (std::uint32_t i = 0; i < devices; ++i) {
    const auto outcome = host.run({i, devices});
    kept.push_back(outcome.kept);
    bytes += outcome.bytes;
    host.expect_segments([&](std::size_t bucket) { return bucket % devices <= i; });
  }
  EXPECT_EQ(bytes, host.contents.total_bytes());
  EXPECT_EQ(whole_tiles(kept).size(), host.contents.tiles().tile_count());
  kept.pop_back();
  EXPECT_LT(whole_tiles(kept).size(), host.contents.tiles().tile_count());
}

TEST(SegmentKeep, WhatTheAllowanceHasNoRoomForIsLeft) {
  Host host(sample_of({{"a", DType::kU8, {100'000}}}, 1), {}, 1, 10'240);
  const auto outcome = host.run({}, ~std::size_t{0}, 1);
  EXPECT_FALSE(outcome.error);
  EXPECT_TRUE(outcome.kept.empty());
  EXPECT_EQ(outcome.bytes, 0u);
  host.expect_segments([](std::size_t) { return false; });
}

TEST(SegmentKeep, BucketsThatPassOverTheSameLinkTakeItsRoom) {
  Host host(sample_of({{"a", DType::kU8, {100'000}}}, 1), {}, 1, 10'240);
  const std::uint64_t passing = host.plan.bucket_bytes();
  ASSERT_GE(host.plan.size(), 4u);
  // Room for the first bucket and its copy. At one byte a second, no more comes.
  const SegmentKeep::Link link{Allowance(1, steady_now() - std::chrono::seconds(2 * passing)),
                               passing};
  const auto outcome = host.run({}, ~std::size_t{0}, kNoLimit, link);
  EXPECT_FALSE(outcome.error);
  host.expect_segments([](std::size_t bucket) { return bucket == 0; });
}

TEST(SegmentKeep, Row43WhatComesAfterASpreadHasFailedIsNotKept) {
  Host host(sample_of({{"a", DType::kU8, {100'000}}}, 1), {}, 2, 10'240);
  constexpr std::size_t kGood = 4;
  const auto outcome = host.run({}, kGood);
  ASSERT_TRUE(outcome.error);
  EXPECT_EQ(outcome.handed_over, kGood);
  EXPECT_GT(outcome.bytes, 0u);
  host.expect_segments([](std::size_t bucket) { return bucket < kGood; });
}

TEST(SegmentKeep, TilesThatAreFinalAreNotWritten) {
  Host host(sample_of({{"a", DType::kU8, {100'000}}, {"b", DType::kU8, {100'000}}}, 1), {}, 1,
            10'240);
  const TileIndex of_b = host.contents.tiles().first_tile(1);
  host.final_tiles.set_range(of_b, host.final_tiles.size());
  const auto outcome = host.run({});
  EXPECT_FALSE(outcome.kept.empty());
  for (const KeptTiles& run : outcome.kept) EXPECT_LE(run.end, of_b);
  const auto touches_b = [&](std::size_t bucket) {
    for (const auto& [begin, end] : host.plan.plan_of(0).tiles(bucket)) {
      if (end > of_b) return true;
    }
    return false;
  };
  host.expect_segments([&](std::size_t bucket) { return !touches_b(bucket); });
}

// This host fetches the first share.
TEST(SegmentKeep, AShareOfFinalTilesDoesNotKeepTheOthersOut) {
  Host host(sample_of({{"a", DType::kU8, {100'000}}, {"b", DType::kU8, {100'000}}}, 1), {}, 2,
            20'480);
  for (std::size_t bucket = 0; bucket < host.plan.plan_of(0).size(); ++bucket) {
    for (const auto& [begin, end] : host.plan.plan_of(0).tiles(bucket)) {
      host.final_tiles.set_range(begin, end);
    }
  }
  const auto outcome = host.run({});
  EXPECT_FALSE(outcome.error);
  EXPECT_EQ(outcome.bytes, 100'000u);
  for (const KeptTiles& run : outcome.kept) {
    EXPECT_GE(run.begin, host.contents.tiles().first_tile(1));
    EXPECT_EQ(run.parts, run.of);
  }
  host.expect_segments([](std::size_t) { return true; }, 1);
}

TEST(SegmentKeep, FilesThatMayOnlyBeReadAreLeft) {
  Host host(sample_of({{"a", DType::kU8, {100'000}}}, 1), {}, 1, 10'240, false);
  const auto outcome = host.run({});
  EXPECT_FALSE(outcome.error);
  EXPECT_TRUE(outcome.kept.empty());
  host.expect_segments([](std::size_t) { return false; });
}

}  // namespace
}  // namespace rekindle::bucket
