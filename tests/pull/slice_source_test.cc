// Slices that land and are verified, with a real store and the real planner: tiles that several
// sources bring together, and parts of tiles that a source has to prove.
#include "recovery/pull/slice_source.h"

#include <condition_variable>
#include <cstring>
#include <map>
#include <set>

#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "recovery/pull/swarm_follower.h"
#include "src/tensor/tile_proof.h"
#include "tests/store/store_fixture.h"
#include "tests/tensor/random_tensors.h"

namespace rekindle::pull {
namespace {

using transport::SliceIndex;
using transport::SourceIndex;
using transport::Verdict;

// A batch that only keeps the verdicts.
class Verdicts final : public transport::Batch {
 public:
  void add_paths(SourceIndex, std::vector<std::unique_ptr<transport::Path>>) override {}
  void remove_source(SourceIndex, Error) override {}
  void add_neighbour(SourceIndex source, std::uint64_t order_seed) override {
    neighbours[source] = order_seed;
  }
  void candidates_added(SourceIndex, std::vector<SliceIndex>) override {}
  void cancel() override {}
  transport::BatchProgress progress() const override { return {}; }
  void resolve(SliceIndex slice, Verdict verdict) override {
    const std::lock_guard lock(mutex_);
    verdicts_[slice] = verdict;
    changed_.notify_all();
  }
  Verdict take(SliceIndex slice) {
    std::unique_lock lock(mutex_);
    const bool came = changed_.wait_for(lock, std::chrono::seconds(20),
                                        [&] { return verdicts_.contains(slice); });
    if (!came) throw std::runtime_error("no verdict");
    const Verdict verdict = verdicts_[slice];
    verdicts_.erase(slice);
    return verdict;
  }

  std::map<SourceIndex, std::uint64_t> neighbours;  // and their salts

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<SliceIndex, Verdict> verdicts_;  // guarded by mutex_
};

// The tiles of this tensor are 768 × 192, so every cut of rows goes through all of them.
constexpr std::uint64_t kRows = 768;
constexpr std::uint64_t kColumns = 3072;

class SliceSourceTest : public ::testing::Test {
 protected:
  struct Source {
    PackedLayout packed;
    std::vector<std::string> segments;
  };

  void SetUp() override {
    store::write_safetensors(directory_.path() / "in" / "model.safetensors",
                             {{"w", DType::kBF16, {kRows, kColumns}}}, 5);
    whole_store_ = store::open_store(directory_.path() / "whole");
    auto whole = store::publish(*whole_store_, {"m", 1}, directory_.path() / "in");
    ASSERT_TRUE(whole) << whole.error().message();
    whole_ = *whole;
    store_ = store::open_store(directory_.path() / "store");
  }

  const Checkpoint& checkpoint() const { return *whole_->manifest.checkpoint; }
  static Box rows(std::uint64_t begin, std::uint64_t end) {
    return {{begin, 0}, {end - begin, kColumns}};
  }
  PackedLayout pack(const Box& box) const {
    const TensorBox boxes[] = {{0, box}};
    return *pack_layout(checkpoint().tensors, boxes, 1 << 30);
  }

  // Adds a source that holds these rows.
  void add_source(std::uint64_t begin, std::uint64_t end) {
    Source source{pack(rows(begin, end)), {}};
    const LayoutEntry& entry = source.packed.layout.entries()[0];
    source.segments.emplace_back(source.packed.layout.segments()[0].size_bytes, '\0');
    const auto from = whole_->array(whole_->manifest.layout.entries()[0]);
    std::memcpy(source.segments[0].data() + entry.offset_bytes, from.data() + begin * kColumns * 2,
                (end - begin) * kColumns * 2);
    sources_.push_back(std::move(source));
  }

  // Plans a pull of these rows from all sources.
  void want(std::uint64_t begin, std::uint64_t end) {
    wanted_ = rows(begin, end);
    packed_ = pack(wanted_);
    auto pending = store_->begin(whole_->manifest.checkpoint, packed_);
    ASSERT_TRUE(pending) << pending.error().message();
    pending_ = std::move(*pending);
    verified_ = std::make_shared<VerifiedTiles>(pending_->verified());
    replan(0);
  }
  void replan(std::uint32_t suspicion) {
    std::vector<planner::SourceView> views;
    for (const auto& source : sources_) views.push_back({&source.packed.layout, nullptr});
    const TileSet have = verified_->snapshot();
    auto plan = planner::plan_pull({&checkpoint(), &packed_.layout, views, &have}, {});
    ASSERT_TRUE(plan) << plan.error().message();
    plan_ = std::move(*plan);
    ASSERT_TRUE(plan_->missing().empty());
    slices_ = std::make_unique<PlanSliceSource>(
        SliceWork{
            std::make_shared<swarm::SliceCandidates>(plan_, transport::SourceMask(), suspicion),
            pending_, verified_, counters_},
        pool_,
        [this](SourceIndex source, const std::vector<planner::TileWork>& items,
               const std::function<void(RangeProofs)>& done) { done(prove(source, items)); });
    for (SourceIndex i = 0; i < sources_.size(); ++i) slices_->set_regions(i, {{0, i}});
    slices_->bind(&verdicts_);
  }

  // Answers like a source: a scripted error, or proofs from the bytes that it holds.
  RangeProofs prove(SourceIndex index, const std::vector<planner::TileWork>& items) {
    asked_.push_back(index);
    if (refusals_.contains(index)) return fail(Error(refusals_.at(index)));
    std::vector<std::string> proofs;
    const LayoutEntry& entry = sources_[index].packed.layout.entries()[0];
    const auto bytes = std::as_bytes(std::span(sources_[index].segments[0]));
    for (const auto& item : items) {
      const Box tile = checkpoint().tiles.tile_box(item.tile);
      EXPECT_TRUE(contains(entry.box, tile)) << "source " << index << " cannot prove that";
      const auto packed =
          test::naive_extract(tile, entry.box, bytes.subspan(entry.offset_bytes), 2);
      proofs.push_back(prove_range(packed, range_in_tile(item.box, tile, 2)));
      if (tamper_) tamper_(proofs.back());
    }
    return proofs;
  }

  // Reads a slice from a source like a path. `wrong`: with one wrong byte.
  Verdict fetch(SliceIndex slice, SourceIndex source, bool wrong = false) {
    land(slice, source, wrong);
    slices_->landed(slice, source);
    return verdicts_.take(slice);
  }
  void land(SliceIndex slice, SourceIndex source, bool wrong = false) {
    std::vector<transport::ReadOp> reads;
    const auto expanded = slices_->expand(slice, source, reads);
    if (!expanded) throw std::runtime_error(expanded.error().message());
    for (const auto& read : reads) {
      const std::string& from = sources_[read.remote.generation].segments[read.remote.region];
      for (std::uint64_t i = 0; i < read.count; ++i) {
        std::memcpy(read.local + i * read.local_stride,
                    from.data() + read.remote_offset + i * read.remote_stride, read.run_bytes);
      }
      if (std::exchange(wrong, false)) read.local[0] ^= std::byte{1};
    }
  }
  // Cuts the file of the destination short.
  void cut_destination(std::uint64_t bytes) const {
    const auto file = pending_->directory() / (packed_.layout.segments()[0].name + ".partial");
    std::filesystem::resize_file(file, bytes);
  }
  SourceIndex first_holder(SliceIndex slice) const {
    SourceIndex source = 0;
    while (!plan_->candidates(slice).test(source)) ++source;
    return source;
  }
  void fetch_all() {
    for (SliceIndex slice = 0; slice < plan_->slice_count(); ++slice) {
      EXPECT_EQ(fetch(slice, first_holder(slice)), Verdict::kAccept) << slice;
    }
  }
  std::set<planner::SliceKind> kinds() const {
    std::set<planner::SliceKind> kinds;
    for (SliceIndex i = 0; i < plan_->slice_count(); ++i) kinds.insert(plan_->kind(i));
    return kinds;
  }
  bool grouped() const {
    for (SliceIndex i = 0; i < plan_->slice_count(); ++i) {
      if (plan_->group_size(i) > 1) return true;
    }
    return false;
  }
  void expect_done() {
    EXPECT_TRUE(verified_->snapshot().all());
    EXPECT_TRUE(eventually_idle());
    const LayoutEntry& entry = packed_.layout.entries()[0];
    const auto from = whole_->array(whole_->manifest.layout.entries()[0]);
    EXPECT_EQ(std::memcmp(pending_->segment(0).data() + entry.offset_bytes,
                          from.data() + wanted_.offset[0] * kColumns * 2, wanted_.elements() * 2),
              0);
  }
  bool eventually_idle() const {
    for (int i = 0; i < 2000 && slices_->verifier().busy(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return !slices_->verifier().busy();
  }

  store::TempDirectory directory_;
  std::unique_ptr<store::SegmentStore> whole_store_, store_;
  std::shared_ptr<const store::StoredVersion> whole_;
  std::vector<Source> sources_;
  Box wanted_;
  PackedLayout packed_{*Layout::create(*TensorSet::create({}), {}, {}), {}};
  std::shared_ptr<store::PendingVersion> pending_;
  std::shared_ptr<VerifiedTiles> verified_;
  std::shared_ptr<PullCounters> counters_ = std::make_shared<PullCounters>();
  WorkerPool pool_{"test-digest", 2, 64};
  std::shared_ptr<const planner::Plan> plan_;
  std::map<SourceIndex, Error> refusals_;
  std::vector<SourceIndex> asked_;
  std::function<void(std::string&)> tamper_;  // with a proof
  Verdicts verdicts_;
  std::unique_ptr<PlanSliceSource> slices_;
};

TEST_F(SliceSourceTest, TilesThatThreeSourcesHoldInPartsAreStagedTogetherAndVerified) {
  for (const std::uint64_t i : {0u, 1u, 2u}) add_source(i * 256, (i + 1) * 256);
  want(0, kRows / 2);
  ASSERT_TRUE(kinds().contains(planner::SliceKind::kStaged));
  ASSERT_TRUE(grouped());
  fetch_all();
  expect_done();
}

// On a host with one node, the pages of the destination are there.
// Pages are allocated while the pull runs. So the node is what the store has asked the kernel for,
// or unknown, and at the end all pages are there.
TEST_F(SliceSourceTest, TheNodeOfTheDestinationIsThatOfItsPages) {
  add_source(0, kRows);
  want(0, kRows);
  const int node = slices_->numa_node();
  EXPECT_EQ(node, pending_->mapped(0)->numa_node());
  fetch_all();
  expect_done();
  const int of_pages = node_of_memory(pending_->segment(0));
  EXPECT_TRUE(node < 0 || of_pages < 0 || node == of_pages) << node << ", " << of_pages;
}

TEST_F(SliceSourceTest, AStagedGroupWithAWrongByteIsNotMarkedAndReadAgain) {
  for (const std::uint64_t i : {0u, 1u, 2u}) add_source(i * 256, (i + 1) * 256);
  want(0, kRows / 2);
  ASSERT_TRUE(grouped());
  for (SliceIndex slice = 0; slice < plan_->slice_count(); ++slice) {
    fetch(slice, first_holder(slice), true);
  }
  EXPECT_EQ(verified_->snapshot().count(), 0u);
  EXPECT_GT(counters_->corrupt_tiles, 0u);
  EXPECT_EQ(slices_->verifier().wrong_bytes(std::nullopt).slices, counters_->corrupt_tiles);
  for (const SourceIndex i : {0u, 1u, 2u})
    EXPECT_EQ(slices_->verifier().wrong_bytes(i).slices, 0u) << i;
  replan(1);
  fetch_all();
  expect_done();
}

TEST_F(SliceSourceTest, StagingOfAbandonedSlicesIsFreeAgain) {
  for (const std::uint64_t i : {0u, 1u, 2u}) add_source(i * 256, (i + 1) * 256);
  want(0, kRows / 2);
  std::vector<transport::ReadOp> reads;
  for (int round = 0; round < 100; ++round) {  // far more often than there are buffers
    ASSERT_TRUE(slices_->expand(0, first_holder(0), reads)) << round;
    slices_->dropped(0, first_holder(0));
  }
  fetch_all();
  expect_done();
}

TEST_F(SliceSourceTest, PartsOfTilesWhoseRestNobodyHoldsAreMissing) {
  add_source(0, 256);
  add_source(256, 512);
  packed_ = pack(rows(208, 304));
  std::vector<planner::SourceView> views;
  for (const auto& source : sources_) views.push_back({&source.packed.layout, nullptr});
  const auto plan = *planner::plan_pull({&checkpoint(), &packed_.layout, views, nullptr}, {});
  EXPECT_EQ(plan->slice_count(), 0u);
  ASSERT_EQ(plan->missing().size(), 1u);
  EXPECT_EQ(plan->missing()[0].box, rows(512, kRows));
}

// S1: the source does not hold the published bytes, and its proof fits the bytes that it holds.
TEST_F(SliceSourceTest, S1AForgedPartWithItsOwnProofIsRefused) {
  add_source(0, kRows);
  add_source(0, kRows);
  want(96, 192);
  ASSERT_EQ(kinds(), std::set{planner::SliceKind::kRange});
  const std::string honest = sources_[0].segments[0];
  const LayoutEntry& entry = sources_[0].packed.layout.entries()[0];
  sources_[0].segments[0][entry.offset_bytes + 100 * kColumns * 2 + 8] ^= 1;
  EXPECT_EQ(fetch(0, 0), Verdict::kRetry);
  EXPECT_EQ(verified_->snapshot().count(), 0u);
  sources_[0].segments[0] = honest;
  fetch_all();
  expect_done();
}

TEST_F(SliceSourceTest, ATamperedProofProvesNothing) {
  add_source(0, kRows);
  want(96, 192);
  ASSERT_EQ(kinds(), std::set{planner::SliceKind::kRange});
  const std::vector<std::function<void(std::string&)>> ways = {
      [](std::string& proof) { proof.clear(); }, [](std::string& proof) { proof.pop_back(); },
      [](std::string& proof) { proof += 'x'; },
      [](std::string& proof) { proof.back() = static_cast<char>(proof.back() ^ 1); },
      [](std::string& proof) { proof.resize(proof.size() + sizeof(Digest)); }};
  for (const auto& way : ways) {
    tamper_ = way;
    EXPECT_EQ(fetch(0, 0), Verdict::kRetry);
    EXPECT_EQ(verified_->snapshot().count(), 0u);
  }
  tamper_ = nullptr;
  fetch_all();
  expect_done();
}

TEST_F(SliceSourceTest, WhenASourceCannotGiveAProofAnotherOneIsAsked) {
  add_source(0, kRows);
  add_source(0, kRows);
  want(96, 192);
  ASSERT_EQ(kinds(), std::set{planner::SliceKind::kRange});
  for (const ErrorCode code : {ErrorCode::kTimeout, ErrorCode::kPeerLost, ErrorCode::kExhausted,
                               ErrorCode::kDenied, ErrorCode::kStale}) {
    refusals_.insert_or_assign(0, Error(code, "scripted"));
    asked_.clear();
    EXPECT_EQ(fetch(0, 0), Verdict::kAccept);
    EXPECT_EQ(asked_, (std::vector<SourceIndex>{0, 1}));
    verified_ = std::make_shared<VerifiedTiles>(TileSet(checkpoint().tiles.tile_count()));
    replan(0);
  }
}

TEST_F(SliceSourceTest, WithoutAnyProofASliceIsUndecidedNotWrong) {
  add_source(0, kRows);
  add_source(0, kRows);
  want(96, 192);
  refusals_.insert_or_assign(0, Error(ErrorCode::kTimeout, "scripted"));
  refusals_.insert_or_assign(1, Error(ErrorCode::kPeerLost, "scripted"));
  EXPECT_EQ(fetch(0, 0), Verdict::kUndecided);
  EXPECT_EQ(asked_, (std::vector<SourceIndex>{0, 1}));  // each once
  EXPECT_EQ(verified_->snapshot().count(), 0u);
  refusals_.clear();
  fetch_all();
  expect_done();
}

TEST_F(SliceSourceTest, AWrongByteInARangeIsFoundWithAnotherSourcesProofToo) {
  add_source(0, kRows);
  add_source(0, kRows);
  want(96, 192);
  EXPECT_EQ(fetch(0, 0, true), Verdict::kRetry);
  EXPECT_EQ(slices_->verifier().wrong_bytes(0).slices, 1u);
  EXPECT_EQ(slices_->verifier().wrong_bytes(0).where.rfind("w[", 0), 0u)
      << slices_->verifier().wrong_bytes(0).where;
  refusals_.insert_or_assign(0, Error(ErrorCode::kTimeout, "scripted"));
  EXPECT_EQ(fetch(0, 0, true), Verdict::kRetry);
  EXPECT_EQ(verified_->snapshot().count(), 0u);
}

// Somebody truncates the file that is filled. No source sent the wrong bytes that are read back.
TEST_F(SliceSourceTest, ADestinationThatWasCutShortIsALocalFaultForEachKindOfSlice) {
  struct Case {
    std::vector<std::uint64_t> holders;  // of the rows between these
    std::uint64_t begin, end;
    planner::SliceKind kind;
  };
  for (const Case& c : {Case{{0, kRows}, 0, kRows, planner::SliceKind::kDirect},
                        Case{{0, 256, 512, kRows}, 0, kRows / 2, planner::SliceKind::kStaged},
                        Case{{0, kRows}, 96, 192, planner::SliceKind::kRange}}) {
    SCOPED_TRACE(static_cast<int>(c.kind));
    sources_.clear();
    for (std::size_t i = 1; i < c.holders.size(); ++i) add_source(c.holders[i - 1], c.holders[i]);
    want(c.begin, c.end);
    ASSERT_TRUE(kinds().contains(c.kind));
    for (SliceIndex slice = 0; slice < plan_->slice_count(); ++slice) {
      land(slice, first_holder(slice));
    }
    cut_destination(100);
    std::set<Verdict> verdicts;
    for (SliceIndex slice = 0; slice < plan_->slice_count(); ++slice) {
      slices_->landed(slice, first_holder(slice));
      verdicts.insert(verdicts_.take(slice));
    }
    EXPECT_TRUE(verdicts.contains(Verdict::kLocalFault));
    EXPECT_FALSE(verdicts.contains(Verdict::kRetry));
    EXPECT_EQ(verified_->snapshot().count(), 0u);
    EXPECT_EQ(counters_->corrupt_tiles, 0u);
    const Error error = slices_->local_fault(0);
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    EXPECT_NE(error.message().find(".safetensors.partial"), std::string::npos) << error.message();
    slices_.reset();
    pending_.reset();
  }
}

// No access fails here: the file reads as zeros up to the end of its last page.
TEST_F(SliceSourceTest, ADestinationThatLostItsLastBytesIsALocalFaultToo) {
  add_source(0, kRows);
  want(0, kRows);
  const LayoutEntry& entry = packed_.layout.entries()[0];
  std::map<SliceIndex, Verdict> verdicts;
  for (SliceIndex slice = 0; slice < plan_->slice_count(); ++slice) land(slice, 0);
  cut_destination(entry.offset_bytes + kRows * kColumns * 2 - 10);
  for (SliceIndex slice = 0; slice < plan_->slice_count(); ++slice) {
    slices_->landed(slice, 0);
    verdicts[slice] = verdicts_.take(slice);
  }
  EXPECT_EQ(verdicts[plan_->slice_count() - 1], Verdict::kLocalFault);
  for (const auto& [slice, verdict] : verdicts) EXPECT_NE(verdict, Verdict::kRetry) << slice;
}

TEST_F(SliceSourceTest, ASourceThatFindsItsOwnCopyCorruptIsBelieved) {
  add_source(0, kRows);
  add_source(0, kRows);
  want(96, 192);
  refusals_.insert_or_assign(0, Error(ErrorCode::kCorrupt, "scripted"));
  EXPECT_EQ(fetch(0, 0), Verdict::kRetry);
  EXPECT_EQ(fetch(0, 1), Verdict::kAccept);
}

TEST_F(SliceSourceTest, TheBatchHearsOfASourceThatFillsUpAndOfItsSalt) {
  add_source(0, kRows);
  want(0, kRows);
  slices_->add_source(5, std::make_shared<const Layout>(sources_[0].packed.layout), false, 4711);
  EXPECT_EQ(verdicts_.neighbours, (std::map<SourceIndex, std::uint64_t>{{5, 4711}}));
}

// A connection whose loss nobody has noticed yet. Each call fails before it waits for anything.
class LostClient final : public rpc::RpcClient {
 public:
  const rpc::Peer& peer() const override { return peer_; }
  bool connected() const override { return true; }
  async::Task<Result<std::string>> call_raw(proto::Method, std::string, std::chrono::milliseconds,
                                            std::function<void(std::string)>,
                                            trace::Context) override {
    ++calls;
    co_return fail(ErrorCode::kPeerLost, "the connection is lost");
  }
  void close() override {}

  int calls = 0;

 private:
  rpc::Peer peer_;
};

class SwarmFollowerTest : public SliceSourceTest {
 protected:
  void SetUp() override {
    SliceSourceTest::SetUp();
    add_source(0, kRows);
    want(0, kRows);
    ActiveSource& source = table_.emplace_back();
    source.name = "a";
    source.held = TileSet(checkpoint().tiles.tile_count());
    source.peer = std::make_shared<SourcePeer>(proto::Source(), client_);
    source.session.emplace();
    source.state.connect();
    source.state.connected();
  }

  boost::asio::io_context io_;
  SourceTable table_;
  std::shared_ptr<LostClient> client_ = std::make_shared<LostClient>();
  Silence silence_{std::chrono::seconds(1), steady_now()};
};

TEST_F(SwarmFollowerTest, ACallThatEndsBeforeItWaitsIsNotMadeAgain) {
  SwarmFollower follower(io_.get_executor(), table_, *slices_, silence_);
  follower.follow(0);
  io_.run();
  EXPECT_EQ(client_->calls, 1);
}

TEST_F(SwarmFollowerTest, MayGoWhileACallIsUnderWay) {
  for (const bool dropped : {false, true}) {
    SwarmFollower follower(io_.get_executor(), table_, *slices_, silence_);
    follower.follow(0);
    if (dropped) follower.drop(0);
  }
  io_.run();
}

}  // namespace
}  // namespace rekindle::pull
