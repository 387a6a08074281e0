// Whole rounds: double devices, each with a pipeline of its own, that spread to each other.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <thread>

#include <unistd.h>

#include <gtest/gtest.h>

#include "src/base/clock.h"
#include "src/bucket/double_device.h"
#include "src/bucket/round_stages.h"
#include "tests/bucket/sample.h"
#include "tests/support/must.h"

namespace rekindle::bucket {
namespace {

using namespace std::chrono_literals;
using testing::random_boxes;
using testing::random_sample;
using testing::Sample;
using testing::sample_of;

constexpr std::uint64_t kDeviceBytes = 64ull << 20;

// What all ranks agree on.
struct Party {
  Party(Sample from, std::vector<NamedBox> boxes, std::uint32_t count,
        std::vector<std::uint32_t> owner_ranks, std::uint64_t bucket)
      : sample(std::move(from)),
        wanted(std::move(boxes)),
        ranks(count),
        owners(std::move(owner_ranks)),
        bucket_bytes(bucket),
        collectives(make_double_collectives()),
        id(must(collectives->make_id())) {}
  std::uint32_t shares() const { return static_cast<std::uint32_t>(owners.size()); }

  const Sample sample;
  const std::vector<NamedBox> wanted;
  const std::uint32_t ranks;
  const std::vector<std::uint32_t> owners;
  const std::uint64_t bucket_bytes;
  const std::unique_ptr<Collectives> collectives;
  const std::string id;
};

// Copies a slot out when it gives it back, not before: what is written over meanwhile is seen.
class Consumer final : public Deliver {
 public:
  Consumer(const RoundPlan& plan, const Slots& slots, const Contents& contents, Device& device)
      : plan_(plan), slots_(slots), device_(device), held_(slots.count()) {
    for (const Piece& piece : contents.pieces()) pieces.emplace_back(piece.bytes, '\0');
  }
  Result<void> hand_over(std::size_t bucket, std::uint32_t slot) override {
    EXPECT_FALSE(held_[slot]) << "a slot was filled that the consumer still has";
    if (tail == nullptr) {
      EXPECT_EQ(bucket, of_round++) << "strictly in order";
      EXPECT_TRUE(*device_.is_done(*slots_.filled[slot])) << "told before it is here";
    }
    held_[slot] = tail == nullptr ? plan_.parts(bucket) : tail->parts(bucket);
    return {};
  }
  Result<bool> released(std::uint32_t slot) override {
    TRY(const bool filled, device_.is_done(*slots_.filled[slot]));
    if (!filled || !willing || (hesitates && ++asked_ % 3 != 0)) return false;
    for (const Part& part : *held_[slot]) {
      const auto* from = reinterpret_cast<const char*>(slots_.at(slot) + part.at);
      std::memcpy(pieces[part.piece].data() + part.offset_bytes, from, part.bytes);
    }
    held_[slot].reset();
    return true;
  }

  std::vector<std::string> pieces;
  const RoundTail* tail = nullptr;  // once the round is given up
  std::size_t of_round = 0;
  bool willing = true;
  bool hesitates = false;

 private:
  const RoundPlan& plan_;
  const Slots& slots_;
  Device& device_;
  std::vector<std::optional<std::vector<Part>>> held_;
  unsigned asked_ = 0;
};

class Rank {
 public:
  Rank(const Party& party, std::uint32_t rank, std::chrono::milliseconds patience = 60s)
      : party_(party),
        device_(make_double_device("double:" + std::to_string(rank), kDeviceBytes)),
        contents_(party.sample.contents(party.wanted)),
        plan_(must(RoundPlan::create(contents_, share_out(contents_.pieces(), party.shares()),
                                     party.shares(), party.bucket_bytes))),
        files_(owned_files(rank)),
        pinner_(*device_, 1),
        slots_(must(allocate_slots(
            *device_, {.bucket_bytes = plan_.bucket_bytes(), .slots = 3, .free_fraction = 1.0},
            4 * plan_.bucket_bytes()))),
        consumer(plan_, slots_, contents_, *device_),
        collective(must(party.collectives->meet(*device_, rank, party.ranks, party.id))),
        spread_(*collective, plan_.share_bytes(), party.owners, {}),
        own_(fetch_of(share_of(rank).value_or(0))),
        fetch_(plan_, own(rank)),
        pipeline(*device_, plan_.size(), slots_, fetch_, &spread_, consumer,
                 {.release_deadline = 60s, .fill_deadline = patience}) {
    must(pipeline.start());
    own_->mark_all_ready();
  }

  // Until all is here, or `until`; an error's text, or "".
  template <typename Until>
  std::string run(const Until& until) {
    while (!until()) {
      const auto state = pipeline.step(steady_now());
      if (!state) {
        error = state.error().code();
        return state.error().message();
      }
      if (*state == Pipeline::State::kDone) return "";
      std::this_thread::sleep_for(50us);
    }
    return "";
  }
  std::string run() {
    return run([] { return false; });
  }

  // The host gets what it lacked, and the rest comes from there.
  void fall_back() {
    collective->abort();
    const std::size_t first = pipeline.handed_over();
    EXPECT_EQ(first, consumer.of_round);
    for (std::uint32_t share = 0; share < plan_.shares(); ++share) {
      tail_fetches_.push_back(fetch_of(share));
    }
    tail_ = std::make_unique<RoundTail>(plan_, tail_fetches_, first);
    consumer.tail = tail_.get();
    must(pipeline.go_on_without_spread(tail_->size(), *tail_, steady_now() + 30s));
    EXPECT_FALSE(pipeline.awaits_hand_over());
  }
  void get_all_tiles(std::mt19937_64& random) {
    for (std::size_t i = 0; i < files_.size(); ++i) {
      const std::string& segment = party_.sample.segments[i];
      const auto put = ::pwrite(files_[i].get(), segment.data(), segment.size(), 0);
      if (put != static_cast<ssize_t>(segment.size())) throw std::runtime_error("pwrite");
    }
    std::vector<TileIndex> tiles(contents_.tiles().tile_count());
    std::iota(tiles.begin(), tiles.end(), TileIndex{0});
    std::shuffle(tiles.begin(), tiles.end(), random);
    for (const TileIndex tile : tiles) {
      for (const auto& fetch : tail_fetches_) must(fetch->mark_ready({{tile, tile + 1}}));
      must(pipeline.step(steady_now()));
    }
  }
  void expect_all_arrived() {
    for (std::size_t i = 0; i < contents_.pieces().size(); ++i) {
      const Piece& piece = contents_.pieces()[i];
      ASSERT_EQ(consumer.pieces[i], party_.sample.bytes_of(contents_, piece)) << piece.name();
    }
  }
  std::size_t buckets() const { return plan_.size(); }

 private:
  std::optional<std::uint32_t> share_of(std::uint32_t rank) const {
    const auto found = std::find(party_.owners.begin(), party_.owners.end(), rank);
    if (found == party_.owners.end()) return std::nullopt;
    return static_cast<std::uint32_t>(found - party_.owners.begin());
  }
  std::optional<RoundFetch::Own> own(std::uint32_t rank) {
    const auto share = share_of(rank);
    if (!share) return std::nullopt;
    return RoundFetch::Own{*share, *own_};
  }
  // A host has what its rank owns; the rest of its memory is wrong.
  std::vector<UniqueFd> owned_files(std::uint32_t rank) const {
    Sample mine = party_.sample;
    for (std::string& segment : mine.segments) std::fill(segment.begin(), segment.end(), '?');
    const auto share = share_of(rank);
    for (std::size_t bucket = 0; share && bucket < plan_.plan_of(*share).size(); ++bucket) {
      for (const SegmentCopy& copy : plan_.plan_of(*share).copies(bucket)) {
        for (std::uint64_t row = 0; row < copy.rows; ++row) {
          const std::uint64_t from = copy.from + row * copy.from_stride;
          mine.segments[copy.segment].replace(
              from, copy.run_bytes, party_.sample.segments[copy.segment], from, copy.run_bytes);
        }
      }
    }
    return mine.files();
  }
  std::unique_ptr<SegmentFetch> fetch_of(std::uint32_t share) {
    SegmentFetch::Segments segments;
    for (std::size_t i = 0; i < files_.size(); ++i) {
      segments.push_back(must(pinner_.add(files_[i].get(), party_.sample.segment_bytes[i])));
    }
    return std::make_unique<SegmentFetch>(plan_.plan_of(share), pinner_, std::move(segments),
                                          contents_.tiles().tile_count());
  }

  const Party& party_;
  const std::unique_ptr<Device> device_;
  const Contents contents_;
  const RoundPlan plan_;
  const std::vector<UniqueFd> files_;
  Pinner pinner_;
  Slots slots_;

 public:
  Consumer consumer;
  const std::unique_ptr<Collective> collective;
  std::optional<ErrorCode> error;

 private:
  RoundSpread spread_;
  const std::unique_ptr<SegmentFetch> own_;
  RoundFetch fetch_;
  RoundTail::Fetches tail_fetches_;
  std::unique_ptr<RoundTail> tail_;

 public:
  Pipeline pipeline;
};

// Some of the ranks, in any order.
std::vector<std::uint32_t> random_owners(std::mt19937_64& random, std::uint32_t ranks) {
  std::vector<std::uint32_t> all(ranks);
  std::iota(all.begin(), all.end(), 0u);
  if (random() % 3 == 0) return all;
  std::shuffle(all.begin(), all.end(), random);
  all.resize(1 + random() % ranks);
  return all;
}

Party random_party(std::mt19937_64& random, std::uint32_t ranks,
                   std::uint64_t most_more = 200'000) {
  Sample sample = random_sample(random);
  auto wanted = random() % 2 == 0 ? std::vector<NamedBox>() : random_boxes(random, sample.tensors);
  auto owners = random_owners(random, ranks);
  const std::uint64_t bucket_bytes = owners.size() * 1024 + random() % most_more;
  return {std::move(sample), std::move(wanted), ranks, std::move(owners), bucket_bytes};
}

// `body` of each rank, each in a thread.
template <typename Body>
void in_threads(std::uint32_t ranks, const Body& body) {
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&body, rank] { body(rank); });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Round, EveryRankHasEveryByteFromItsOwner) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (const std::uint32_t ranks : {1u, 2u, 3u, 4u, 2u, 3u, 4u}) {
    const Party party = random_party(random, ranks);
    in_threads(ranks, [&](std::uint32_t number) {
      Rank rank(party, number);
      rank.consumer.hesitates = number % 2 == 1;
      EXPECT_EQ(rank.run(), "");
      EXPECT_EQ(rank.pipeline.delivered(), rank.buckets());
      EXPECT_EQ(rank.pipeline.handed_over(), rank.buckets());
      rank.expect_all_arrived();
    });
  }
}

// One rank stops in the middle and stays where it is: the others notice, and end without it.
TEST(Round, Row43SurvivorsOfARankThatStopsGetTheRestFromTheirHosts) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (const std::uint32_t ranks : {2u, 3u, 4u}) {
    const Party party = random_party(random, ranks, 10'000);
    const auto stopped = static_cast<std::uint32_t>(random() % ranks);
    const std::uint64_t last = random() % 10;
    std::vector<std::unique_ptr<Rank>> all(ranks);
    for (std::uint32_t i = 0; i < ranks; ++i) all[i] = std::make_unique<Rank>(party, i, 400ms);
    std::vector<std::mt19937_64> randoms;
    for (std::uint32_t i = 0; i < ranks; ++i) randoms.emplace_back(random());
    in_threads(ranks, [&](std::uint32_t number) {
      Rank& rank = *all[number];
      if (number == stopped) {
        rank.run([&] { return rank.pipeline.handed_over() >= last; });
        return;
      }
      rank.consumer.hesitates = true;
      if (rank.run() != "") {
        EXPECT_EQ(rank.error, ErrorCode::kTimeout);
        rank.fall_back();
        rank.get_all_tiles(randoms[number]);
        EXPECT_EQ(rank.run(), "");
      }
      rank.expect_all_arrived();
    });
    // The stopped one takes part in what its slots had under way, and others may be a little ahead,
    // a chunk for each of these small buckets: further nobody came by the round.
    const std::size_t most = all[stopped]->pipeline.handed_over() + 3 + kDoubleChunksAhead;
    for (std::uint32_t i = 0; i < ranks; ++i) {
      EXPECT_TRUE(i == stopped || most >= all[i]->buckets() || all[i]->error) << i;
    }
    all[stopped]->collective->abort();
  }
}

TEST(Round, Row43OthersComeALittleFurtherThanARankThatOwnsNothingAndStops) {
  const Party party(sample_of({{"a", DType::kU8, {50'000}}, {"b", DType::kU8, {50'000}}}, 1), {}, 3,
                    {0, 1}, 8192);
  Rank stopped(party, 2);
  std::vector<std::unique_ptr<Rank>> others;
  for (std::uint32_t i = 0; i < 2; ++i) others.push_back(std::make_unique<Rank>(party, i));
  in_threads(2, [&](std::uint32_t number) {
    Rank& rank = *others[number];
    EXPECT_EQ(rank.run([&] { return rank.pipeline.handed_over() >= kDoubleChunksAhead; }), "");
    int steps = 0;
    EXPECT_EQ(rank.run([&] { return ++steps > 200; }), "");
    EXPECT_EQ(rank.pipeline.handed_over(), kDoubleChunksAhead);
    rank.fall_back();
    std::mt19937_64 random(number);
    rank.get_all_tiles(random);
    EXPECT_EQ(rank.run(), "");
    rank.expect_all_arrived();
  });
  stopped.collective->abort();
}

TEST(Round, Row43ABucketQueuedBehindAnAbortIsNotHandedOver) {
  const Party party(sample_of({{"a", DType::kU8, {50'000}}, {"b", DType::kU8, {50'000}}}, 1), {}, 2,
                    {0, 1}, 8192);
  Rank one(party, 0);
  Rank two(party, 1);
  // The other rank is there, and queues nothing.
  const TimePoint give_up = steady_now() + 60s;
  while (*one.pipeline.step(steady_now()) == Pipeline::State::kFetching) {
    ASSERT_LT(steady_now(), give_up);
  }
  EXPECT_TRUE(one.pipeline.awaits_hand_over());
  one.collective->abort();
  ASSERT_TRUE(one.pipeline.drain(steady_now() + 30s)) << "what is queued ends";
  const auto state = one.pipeline.step(steady_now());
  ASSERT_FALSE(state);
  EXPECT_EQ(one.pipeline.handed_over(), 0u);
  EXPECT_EQ(one.consumer.of_round, 0u);
  one.fall_back();
  std::mt19937_64 random(1);
  one.get_all_tiles(random);
  EXPECT_EQ(one.run(), "");
  one.expect_all_arrived();
}

TEST(Round, Row43WhatTheConsumerHasIsNotWrittenOverByTheFallBack) {
  const Party party(sample_of({{"a", DType::kU8, {50'000}}, {"b", DType::kU8, {50'000}}}, 1), {}, 2,
                    {0, 1}, 8192);
  Rank one(party, 0);
  Rank two(party, 1);
  one.consumer.willing = false;
  const TimePoint give_up = steady_now() + 60s;
  while (one.pipeline.handed_over() < 2) {
    ASSERT_TRUE(one.pipeline.step(steady_now()));
    ASSERT_TRUE(two.pipeline.step(steady_now()));
    ASSERT_LT(steady_now(), give_up);
  }
  one.fall_back();
  std::mt19937_64 random(1);
  one.get_all_tiles(random);
  const std::size_t held = one.pipeline.handed_over();
  for (int i = 0; i < 100; ++i) must(one.pipeline.step(steady_now()));
  EXPECT_LE(one.pipeline.handed_over(), 3u) << "there are three slots, and none has come back";
  EXPECT_GE(held, 2u);
  one.consumer.willing = true;
  EXPECT_EQ(one.run(), "");
  one.expect_all_arrived();
  two.collective->abort();
}

}  // namespace
}  // namespace rekindle::bucket
