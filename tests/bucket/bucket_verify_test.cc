// Uploads to double devices, and rounds of them, in which bits change on their way.
#include "src/bucket/bucket_verify.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

#include "src/base/blake3.h"
#include "src/base/clock.h"
#include "src/bucket/double_device.h"
#include "src/bucket/double_stream.h"
#include "tests/bucket/flipping_device.h"
#include "tests/bucket/forwarding_device.h"
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

void expect_pieces(const Sample& sample, const Contents& contents, const PieceConsumer& consumer) {
  for (const auto& [bucket, why] : consumer.spoiled) ADD_FAILURE() << bucket << why.message();
  for (std::size_t i = 0; i < contents.pieces().size(); ++i) {
    const Piece& piece = contents.pieces()[i];
    EXPECT_EQ(consumer.pieces[i], sample.bytes_of(contents, piece)) << piece.name();
  }
}

// The segments of a host that holds these bytes.
SegmentFetch::Segments add_segments(Pinner& pinner, const Sample& host) {
  SegmentFetch::Segments segments;
  const auto files = host.files();
  for (std::size_t i = 0; i < files.size(); ++i) {
    segments.push_back(must(pinner.add(files[i].get(), host.segment_bytes[i])));
  }
  return segments;
}

Slots slots_of(Device& device, std::uint64_t bucket_bytes) {
  const SlotOptions options{.bucket_bytes = bucket_bytes, .slots = 3, .free_fraction = 1.0};
  return must(allocate_slots(device, options, 4 * bucket_bytes));
}

// --- uploads

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
        slots_(slots_of(device_, kBucket)),
        consumer(plan_, slots_, contents_) {
    Sample host = sample_;
    const Piece& first = contents_.pieces().front();
    if (of.wrong_host) host.segments[first.segment][first.offset_bytes] ^= 1;
    segments_ = add_segments(pinner_, host);
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
  void expect_all_arrived() { expect_pieces(sample_, contents_, consumer); }
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
    const std::string tensor(shape.contents().pieces()[part->piece].name());
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

// --- rounds

// Changes a byte of one bucket behind its collective.
class Flipping final : public Collective {
 public:
  Flipping(std::unique_ptr<Collective> inner, std::size_t bucket, std::uint64_t offset)
      : inner_(std::move(inner)), bucket_(bucket), offset_(offset) {}
  std::uint32_t rank() const override { return inner_->rank(); }
  std::uint32_t ranks() const override { return inner_->ranks(); }
  Result<void> spread(DeviceAddress at, std::uint64_t share_bytes,
                      std::span<const std::uint32_t> owners, Stream& stream) override {
    TRY_VOID(inner_->spread(at, share_bytes, owners, stream));
    if (count_++ != bucket_) return {};
    return push_work(stream, [byte = at + offset_](const auto& /*stop*/) {
      *reinterpret_cast<unsigned char*>(static_cast<std::uintptr_t>(byte)) ^= 0x10;
      return true;
    });
  }
  Result<bool> settled() override { return inner_->settled(); }
  void abort() override { inner_->abort(); }

 private:
  const std::unique_ptr<Collective> inner_;
  const std::size_t bucket_;
  const std::uint64_t offset_;
  std::size_t count_ = 0;
};

struct Fault {
  std::uint32_t rank = 0;
  std::size_t bucket = 0;
  std::uint64_t offset = 0;  // in the bucket
};
enum class HostCopy { kRight, kWrong, kNone };

// Two ranks that own a share each, and a third one.
struct Party {
  Party(Sample from, std::vector<NamedBox> boxes, std::uint64_t bytes)
      : sample(std::move(from)), wanted(std::move(boxes)), bucket_bytes(bytes) {}
  RoundPlan plan_for(const Contents& contents) const {
    return must(
        RoundPlan::create(contents, share_out(contents.pieces(), 2), 2, bucket_bytes, kSealRoom));
  }

  const Sample sample;
  const std::vector<NamedBox> wanted;
  const std::uint64_t bucket_bytes;
  const std::vector<Digest> leaves = sample.leaves();
  const std::unique_ptr<Collectives> collectives = make_double_collectives();
  const std::string id = must(collectives->make_id());
  HostCopy copy = HostCopy::kRight;  // of the third rank's host
  bool by_host = false;              // the devices compute no digests
  std::optional<Fault> fault;
};

class Rank {
 public:
  Rank(const Party& party, std::uint32_t rank)
      : party_(party),
        inner_(make_double_device("double:" + std::to_string(rank), 64 << 20)),
        without_(*inner_),
        device_(party.by_host ? static_cast<Device&>(without_) : *inner_),
        contents_(party.sample.contents(party.wanted)),
        plan_(party.plan_for(contents_)),
        pinner_(device_, 1),
        slots_(slots_of(device_, plan_.bucket_bytes())),
        consumer(plan_, slots_, contents_),
        collective_(must(party.collectives->meet(*inner_, rank, 3, party.id))) {
    Sample mine = party.sample;
    if (rank == 2 && party.copy != HostCopy::kRight) {
      for (std::string& segment : mine.segments) std::fill(segment.begin(), segment.end(), '?');
    }
    segments_ = add_segments(pinner_, mine);
    has_copy_ = rank != 2 || party.copy != HostCopy::kNone;
    if (party.fault && party.fault->rank == rank) {
      collective_ = std::make_unique<Flipping>(std::move(collective_), party.fault->bucket,
                                               party.fault->offset);
    }
    std::optional<RoundFetch::Own> own;
    if (rank < 2) {
      own_ = fetch_of(rank);
      own_->wait_for_no_pins();
      seal_ = must(RoundSeal::create(device_, plan_, contents_, segments_, rank));
      own.emplace(RoundFetch::Own{rank, *own_, seal_.get()});
    }
    fetch_.emplace(plan_, own);
    spread_.emplace(*collective_, plan_.share_bytes(), std::vector<std::uint32_t>{0, 1},
                    RoundSpread::Patience{60s, {}});
    verify_ = must(RoundVerify::create({device_, plan_, contents_, party.leaves}, slots_.count(),
                                       [this]() -> Result<RoundTail::Fetches> {
                                         RoundTail::Fetches all;
                                         all.push_back(fetch_of(0));
                                         all.push_back(fetch_of(1));
                                         return all;
                                       }));
    pipeline_.emplace(device_, plan_.size(), slots_, *fetch_, &*spread_, consumer,
                      PipelineOptions{60s, 60s});
    must(pipeline_->verify_with(*verify_));
    must(pipeline_->start());
  }
  ~Rank() { collective_->abort(); }

  void run() {
    for (;;) {
      const auto state = pipeline_->step(steady_now());
      if (!state) throw std::runtime_error(state.error().message());
      if (*state == Pipeline::State::kDone) return;
      std::this_thread::sleep_for(50us);
    }
  }
  void expect_all_arrived() { expect_pieces(party_.sample, contents_, consumer); }
  std::uint64_t refilled() const { return verify_->refilled(); }

 private:
  std::unique_ptr<SegmentFetch> fetch_of(std::uint32_t share) {
    auto fetch = std::make_unique<SegmentFetch>(plan_.plan_of(share), pinner_, segments_,
                                                contents_.tiles().tile_count());
    if (has_copy_) fetch->mark_all_ready();
    return fetch;
  }

  const Party& party_;
  const std::unique_ptr<Device> inner_;
  testing::WithoutDigests without_;
  Device& device_;
  const Contents contents_;
  const RoundPlan plan_;
  Pinner pinner_;
  SegmentFetch::Segments segments_;
  Slots slots_;

 public:
  PieceConsumer consumer;

 private:
  std::unique_ptr<Collective> collective_;
  bool has_copy_ = true;
  std::unique_ptr<SegmentFetch> own_;
  std::unique_ptr<RoundSeal> seal_;
  std::optional<RoundFetch> fetch_;
  std::optional<RoundSpread> spread_;
  std::unique_ptr<RoundVerify> verify_;
  std::optional<Pipeline> pipeline_;
};

// Of all three, to their end.
std::vector<std::unique_ptr<Rank>> run(const Party& party) {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (std::uint32_t i = 0; i < 3; ++i) ranks.push_back(std::make_unique<Rank>(party, i));
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&rank] { rank->run(); });
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

// Every bucket's first byte of each share, and its last one that is used.
std::vector<Fault> faults_of(const Party& party, std::uint32_t rank) {
  const Contents contents = party.sample.contents(party.wanted);
  const RoundPlan plan = party.plan_for(contents);
  std::vector<Fault> faults;
  for (std::size_t bucket = 0; bucket < plan.size(); ++bucket) {
    for (std::uint32_t share = 0; share < plan.shares(); ++share) {
      if (bucket >= plan.plan_of(share).size()) continue;
      const std::uint64_t at = share * plan.share_bytes();
      faults.push_back({rank, bucket, at});
      faults.push_back({rank, bucket, at + plan.plan_of(share).bytes(bucket) - 1});
    }
  }
  return faults;
}

TEST(RoundVerify, B7WhatArrivesRightIsHandedOverOnce) {
  for (const bool of_shard : {false, true}) {
    for (const bool by_host : {false, true}) {
      Party party(small_sample(), boxes(of_shard), kBucket);
      party.by_host = by_host;
      for (auto& rank : run(party)) {
        rank->expect_all_arrived();
        EXPECT_EQ(rank->refilled(), 0u);
      }
    }
  }
}

TEST(RoundVerify, B7AByteThatChangesOnItsWayComesAgainFromTheHost) {
  for (const bool of_shard : {false, true}) {
    const auto wanted = boxes(of_shard);
    std::size_t turn = 0;
    for (const Fault& fault : faults_of({small_sample(), wanted, kBucket}, 2)) {
      Party party(small_sample(), wanted, kBucket);
      party.fault = fault;
      party.fault->rank = turn % 3 == 0 ? 0 : 2;  // an owner's own share, too
      party.by_host = turn++ % 4 == 3;
      auto ranks = run(party);
      for (std::uint32_t i = 0; i < 3; ++i) {
        ranks[i]->expect_all_arrived();
        EXPECT_EQ(ranks[i]->refilled(), i == party.fault->rank ? 1u : 0u)
            << "bucket " << fault.bucket << " at " << fault.offset;
      }
    }
  }
}

TEST(RoundVerify, B7ASealThatChangesOnItsWayComesAgainToo) {
  const Party shape(small_sample(), shard(), kBucket);
  const Contents contents = shape.sample.contents(shape.wanted);
  const RoundPlan plan = shape.plan_for(contents);
  ASSERT_FALSE(checks_of(contents, plan.plan_of(1).parts(0)).rests.empty());
  Party party(small_sample(), shard(), kBucket);
  party.fault = Fault{2, 0, plan.share_bytes() + plan.seal_at() + 7};
  auto ranks = run(party);
  for (auto& rank : ranks) rank->expect_all_arrived();
  EXPECT_EQ(ranks[2]->refilled(), 1u);
}

TEST(RoundVerify, B7WithoutRightBytesTheRankFailsAloneAndNamesDeviceAndTensor) {
  for (const bool of_shard : {false, true}) {
    for (const HostCopy copy : {HostCopy::kWrong, HostCopy::kNone}) {
      Party party(small_sample(), boxes(of_shard), kBucket);
      const Contents contents = party.sample.contents(party.wanted);
      const RoundPlan plan = party.plan_for(contents);
      const Part first = plan.plan_of(0).parts(0).front();
      ASSERT_EQ(checks_of(contents, {&first, 1}).rests.empty(), !of_shard);
      party.copy = copy;
      party.fault = Fault{2, 0, first.at + 5};
      auto ranks = run(party);
      ranks[0]->expect_all_arrived();
      ranks[1]->expect_all_arrived();
      const auto& spoiled = ranks[2]->consumer.spoiled;
      ASSERT_EQ(spoiled.size(), 1u);
      EXPECT_EQ(spoiled.front().first, 0u);
      EXPECT_EQ(spoiled.front().second.code(), ErrorCode::kCorrupt);
      const std::string text = spoiled.front().second.message();
      EXPECT_NE(text.find("double:2"), std::string::npos) << text;
      const std::string tensor(contents.pieces()[first.piece].name());
      EXPECT_NE(text.find("'" + tensor + "'"), std::string::npos) << text;
      const char* const then = copy == HostCopy::kWrong ? "upload from host memory" : "no copy";
      EXPECT_NE(text.find(then), std::string::npos) << text;
    }
  }
}

TEST(RoundVerify, B7LeavesOfAnotherVersionAreRefused) {
  const Party party(small_sample(), {}, kBucket);
  const Contents contents = party.sample.contents();
  const RoundPlan plan = party.plan_for(contents);
  const auto device = make_double_device("double:0", 64 << 20);
  const auto made =
      RoundVerify::create({*device, plan, contents, std::span(party.leaves).first(1)}, 3, {});
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code(), ErrorCode::kInvalid);
}

}  // namespace
}  // namespace rekindle::bucket
