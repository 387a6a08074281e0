#include "src/bucket/round.h"

#include <barrier>
#include <map>
#include <numeric>
#include <thread>

#include <gtest/gtest.h>

#include "src/bucket/double_device.h"
#include "tests/bucket/sample.h"

namespace rekindle::bucket {
namespace {

using namespace std::chrono_literals;
using testing::random_sample;
using testing::Sample;
using testing::sample_of;

TimePoint clock_now() { return std::chrono::steady_clock::now(); }

TEST(RoundPlan, OwnersHaveAboutAsManyBytes) {
  std::vector<TensorInfo> tensors;
  for (int i = 0; i < 300; ++i) {
    tensors.push_back(
        {"t" + std::to_string(i), DType::kU8, {static_cast<std::uint64_t>(1000 + i)}});
  }
  const Sample sample = sample_of(std::move(tensors), 1);
  for (const std::uint32_t ranks : {1u, 2u, 4u, 7u}) {
    const auto owner = share_out(sample.tensors, ranks);
    std::vector<std::uint64_t> bytes(ranks);
    for (TensorIndex i = 0; i < owner.size(); ++i)
      bytes[owner[i]] += sample.tensors[i].size_bytes();
    const std::uint64_t fair =
        std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0}) / ranks;
    for (const std::uint64_t own : bytes) EXPECT_NEAR(double(own), double(fair), 1300) << ranks;
  }
}

TEST(RoundPlan, MoreRanksThanTensorsIsFine) {
  const Sample sample = sample_of({{"a", DType::kU8, {10}}, {"b", DType::kU8, {10}}}, 1);
  const auto plan =
      RoundPlan::create(sample.contents(), share_out(sample.tensors, 4), 4, 4 * kPartAlignment);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->size(), 1u);
  EXPECT_EQ(plan->parts(0).size(), 2u);
}

TEST(RoundPlan, OnlyWholeTensorsWithAnOwnerAreBroadcast) {
  const Sample sample = sample_of({{"a", DType::kU8, {10, 10}}}, 1);
  const std::vector<std::uint32_t> owner{0};
  EXPECT_FALSE(RoundPlan::create(sample.contents({{"a", {0, 0}, {5, 10}}}), owner, 2, 1 << 20));
  const std::vector<std::uint32_t> nobody{2};
  EXPECT_FALSE(RoundPlan::create(sample.contents(), nobody, 2, 1 << 20));
  EXPECT_TRUE(RoundPlan::create(sample.contents(), owner, 2, 1 << 20));
}

// An all-gather of the double's: all ranks meet at each bucket, then each fetches what it lacks.
class Gathering {
 public:
  explicit Gathering(std::uint32_t ranks) : ranks_(ranks), barrier_(static_cast<int>(ranks)) {
    at_.resize(ranks);
    uploaded_.resize(ranks);
  }
  class Member final : public Spread {
   public:
    Member(Gathering& all, std::uint32_t rank, std::uint64_t share_bytes, Device& device)
        : all_(all), rank_(rank), share_bytes_(share_bytes), uploaded_(*device.make_event()) {}
    Result<void> enqueue(std::size_t bucket, DeviceAddress at, Stream& stream) override {
      order.push_back(bucket);
      TRY_VOID(stream.record(*uploaded_));
      all_.at_[rank_] = at;
      all_.uploaded_[rank_] = uploaded_.get();
      all_.barrier_.arrive_and_wait();
      std::vector<Move> moves;
      for (std::uint32_t peer = 0; peer < all_.ranks_; ++peer) {
        if (peer == rank_) continue;
        TRY_VOID(stream.wait(*all_.uploaded_[peer]));
        const std::uint64_t share = peer * share_bytes_;
        moves.push_back({all_.at_[peer] + share, at + share, share_bytes_});
      }
      TRY_VOID(stream.move(moves));
      TRY_VOID(stream.finish(clock_now() + 30s));  // before a peer reuses its slot
      all_.barrier_.arrive_and_wait();
      return {};
    }
    std::vector<std::size_t> order;

   private:
    Gathering& all_;
    const std::uint32_t rank_;
    const std::uint64_t share_bytes_;
    std::unique_ptr<Event> uploaded_;
  };

 private:
  const std::uint32_t ranks_;
  std::barrier<> barrier_;
  std::vector<DeviceAddress> at_;
  std::vector<Event*> uploaded_;
};

// Copies every part out and gives the slot back.
class Taker final : public Deliver {
 public:
  Taker(const RoundPlan& plan, Slots& slots, const Contents& contents, Device& device)
      : plan_(plan), slots_(slots), stream_(*device.make_stream()) {
    for (const Piece& piece : contents.pieces()) pieces.emplace_back(piece.bytes, '\0');
  }
  Result<void> hand_over(std::size_t bucket, std::uint32_t slot) override {
    TRY_VOID(stream_->wait(*slots_.filled[slot]));
    std::vector<Download> copies;
    for (const Part& part : plan_.parts(bucket)) {
      auto* const to = reinterpret_cast<std::byte*>(pieces[part.piece].data());
      copies.push_back({slots_.at(slot) + part.at, to + part.offset_bytes, part.bytes});
    }
    TRY_VOID(stream_->download(copies));
    return stream_->finish(clock_now() + 30s);
  }
  Result<bool> released(std::uint32_t) override { return true; }
  std::vector<std::string> pieces;

 private:
  const RoundPlan& plan_;
  Slots& slots_;
  std::unique_ptr<Stream> stream_;
};

// Each rank's host has its own part only: the rest of its memory is wrong.
std::vector<std::string> run_rank(const Sample& sample, std::span<const std::uint32_t> owner,
                                  std::uint32_t rank, Gathering& gathering, std::uint32_t ranks,
                                  std::uint64_t bucket_bytes) {
  const auto device = make_double_device("double:" + std::to_string(rank), 64 << 20);
  const Contents contents = sample.contents();
  const auto plan = RoundPlan::create(contents, owner, ranks, bucket_bytes);
  if (!plan) throw std::runtime_error(plan.error().message());
  Sample mine = sample;
  for (const Piece& piece : contents.pieces()) {
    if (owner[piece.tensor] == rank) continue;
    mine.segments[piece.segment].replace(piece.offset_bytes, piece.bytes, piece.bytes, '?');
  }
  Pinner pinner(*device, 1);
  SegmentFetch::Segments segments;
  const auto files = mine.files();
  for (std::size_t i = 0; i < files.size(); ++i) {
    segments.push_back(*pinner.add(files[i].get(), mine.segment_bytes[i]));
  }
  SegmentFetch own(plan->plan_of(rank), pinner, std::move(segments), contents.tiles().tile_count());
  own.mark_all_ready();
  Slots slots = *allocate_slots(
      *device, {.bucket_bytes = plan->bucket_bytes(), .slots = 2, .free_fraction = 1.0},
      contents.total_bytes() + plan->bucket_bytes());
  RoundFetch fetch(*plan, rank, own);
  Gathering::Member spread(gathering, rank, plan->share_bytes(), *device);
  Taker taker(*plan, slots, contents, *device);
  Pipeline pipeline(*device, plan->size(), slots, fetch, &spread, taker);
  if (!pipeline.start()) throw std::runtime_error("no streams");
  for (;;) {
    const auto state = pipeline.step(clock_now());
    if (!state) throw std::runtime_error(state.error().message());
    if (*state == Pipeline::State::kDone) break;
    std::this_thread::sleep_for(20us);
  }
  EXPECT_EQ(spread.order.size(), plan->size());
  EXPECT_TRUE(std::is_sorted(spread.order.begin(), spread.order.end()));
  return taker.pieces;
}

TEST(Round, EveryRankHasEveryTensorFromItsOwner) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (const std::uint32_t ranks : {1u, 2u, 3u}) {
    const Sample sample = random_sample(random);
    const std::uint64_t bucket_bytes = ranks * kPartAlignment + random() % 100'000;
    const auto owner = share_out(sample.tensors, ranks);
    Gathering gathering(ranks);
    std::vector<std::vector<std::string>> got(ranks);
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      threads.emplace_back(
          [&, rank] { got[rank] = run_rank(sample, owner, rank, gathering, ranks, bucket_bytes); });
    }
    for (std::thread& thread : threads) thread.join();
    const Contents contents = sample.contents();
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      for (std::size_t i = 0; i < contents.pieces().size(); ++i) {
        ASSERT_EQ(got[rank][i], sample.bytes_of(contents, contents.pieces()[i]))
            << "rank " << rank << ", " << contents.pieces()[i].name;
      }
    }
  }
}

}  // namespace
}  // namespace rekindle::bucket
