// Sessions that take part in a broadcast round, each on a device of its own.
#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <numeric>

#include <unistd.h>

#include <gtest/gtest.h>

#include "recovery/device/segment_cache.h"
#include "recovery/device/session.h"
#include "src/base/units.h"
#include "src/bucket/double_collective.h"
#include "src/bucket/double_device.h"
#include "tests/device/bucket_worker.h"
#include "tests/ipc/socket_pair.h"

namespace rekindle::device {
namespace {

using namespace std::chrono_literals;
using testing::BucketWorker;

constexpr std::uint64_t kBucket = 64 * kKiB;

// What a session says, for the test's thread to wait for.
class Heard {
 public:
  void say(RoundNews news) {
    const std::lock_guard lock(mutex_);
    if (auto* const joined = std::get_if<DeviceJoined>(&news)) joined_ = std::move(*joined);
    if (auto* const over = std::get_if<SpreadOver>(&news)) {
      if (over_) ADD_FAILURE() << "it was over before";
      over_ = std::move(*over);
    }
    if (auto* const progress = std::get_if<SpreadProgress>(&news)) {
      EXPECT_GT(progress->bytes, bytes_);
      bytes_ = progress->bytes;
    }
    changed_.notify_all();
  }
  DeviceJoined joined() { return wait(joined_); }
  SpreadOver over() { return wait(over_); }
  bool is_over() {
    const std::lock_guard lock(mutex_);
    return over_.has_value();
  }

 private:
  template <typename T>
  T wait(std::optional<T>& item) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, 20s, [&] { return item.has_value(); })) {
      throw std::runtime_error("nothing is said");
    }
    return *item;
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<DeviceJoined> joined_;
  std::optional<SpreadOver> over_;
  std::uint64_t bytes_ = 0;
};

struct Member {
  std::shared_ptr<Heard> heard = std::make_shared<Heard>();
  std::future<SessionEnd> end;
  std::unique_ptr<BucketWorker> worker;
  std::future<void> taken;
  std::unique_ptr<Session> session;

  SessionEnd wait() {
    if (end.wait_for(20s) != std::future_status::ready) throw std::runtime_error("it goes on");
    return end.get();
  }
  void take_all() {
    taken = std::async(std::launch::async, [this] {
      worker->take_all();
      worker->close();
    });
  }
};

class RoundSessionTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kRanks = 3;
  using Members = std::vector<Member>;

  RoundSessionTest() {
    for (std::size_t i = 0; i < kRanks; ++i) {
      devices_.push_back(bucket::make_double_device(fmt::format("double:{}", i), 64 * kMiB));
      communicators_.push_back(std::make_unique<Communicators>(Communicators::loader(true)));
    }
    pinner_.emplace(*devices_.front(), 2);
    cache_.emplace(*pinner_);
    times_.progress = 0ms;
  }

  Member join(std::size_t index) {
    auto [ours, workers] = ipc::testing::socket_pair();
    Member member;
    SessionOrder order;
    order.number = index + 1;
    order.open = [device = devices_[index].get()]() -> Result<bucket::Device*> { return device; };
    order.pinner = &*pinner_;
    order.communicators = communicators_[index].get();
    order.attached = *parse_attached(testing::attached_frame(sample_));
    const auto files = lacks_ && index >= owners_ ? blank_files() : sample_.files();
    lent_[index].clear();
    for (std::size_t i = 0; i < files.size(); ++i) {
      lent_[index].emplace_back(::dup(files[i].get()));
      order.segments.push_back(*cache_->get(files[i].get(), sample_.segment_bytes[i]));
      // What is not pinned yet is not kept.
      if (lacks_) {
        EXPECT_TRUE(pinner_->wait(*order.segments.back(), SteadyClock().now() + 20s));
      }
    }
    order.socket = std::move(ours);
    order.slots.bucket_bytes = kBucket;
    order.slots.free_fraction = 1;
    order.times = times_;
    order.in_round = true;
    order.say = [heard = member.heard](RoundNews news) { heard->say(std::move(news)); };
    auto promise = std::make_shared<std::promise<SessionEnd>>();
    member.end = promise->get_future();
    member.worker = std::make_unique<BucketWorker>(std::move(workers));
    member.session = *Session::start(
        std::move(order), [promise](SessionEnd end) { promise->set_value(std::move(end)); });
    member.worker->open();
    return member;
  }
  // Of a host that lacks the version.
  std::vector<UniqueFd> blank_files() const {
    auto blank = sample_;
    for (std::string& segment : blank.segments) std::ranges::fill(segment, '?');
    return blank.files();
  }
  // Which bytes of the pieces are in the segments that a rank was lent; the others are as before.
  void expect_kept(std::size_t rank, std::uint64_t bytes) const {
    const auto contents = sample_.contents();
    std::uint64_t right = 0;
    for (const auto& piece : contents.pieces()) {
      const auto expected = sample_.bytes_of(contents, piece);
      std::string seen(expected.size(), '\0');
      ASSERT_EQ(::pread(lent_.at(rank)[piece.segment].get(), seen.data(), seen.size(),
                        static_cast<off_t>(piece.offset_bytes)),
                static_cast<ssize_t>(seen.size()));
      for (std::size_t i = 0; i < seen.size(); ++i) {
        ASSERT_TRUE(seen[i] == expected[i] || seen[i] == '?') << piece.name << " at " << i;
        if (seen[i] == expected[i]) ++right;
      }
    }
    EXPECT_GE(right, bytes);
    if (bytes == 0) {
      EXPECT_LT(right, contents.total_bytes() / 16) << "'?' by chance";
    }
  }
  Members join_all(std::size_t ranks = 2) {
    Members members;
    for (std::size_t i = 0; i < ranks; ++i) members.push_back(join(i));
    return members;
  }
  SpreadOrder order_for(std::size_t rank, std::size_t ranks, const std::string& id) const {
    SpreadOrder order;
    order.session = rank + 1;
    order.communicator = "c-1";
    order.id = id;
    order.rank = static_cast<std::uint32_t>(rank);
    order.ranks = static_cast<std::uint32_t>(ranks);
    order.bucket_bytes = kBucket;
    order.owners.resize(owners_);
    std::iota(order.owners.begin(), order.owners.end(), 0u);
    return order;
  }
  void spread(Members& members, const std::string& id) {
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (i < owners_) members[i].session->tell({}, true);
      members[i].session->spread(order_for(i, members.size(), id));
    }
  }
  Members begin_round(std::size_t ranks = 2) {
    auto members = join_all(ranks);
    spread(members, *communicators_[0]->make_id());
    return members;
  }
  // Every worker has one bucket and keeps it: so the round is under way, and does not end.
  static std::vector<bucket::FilledMessage> take_one_each(Members& members) {
    std::vector<bucket::FilledMessage> taken;
    for (auto& member : members) {
      taken.push_back(member.worker->next().value());
      member.worker->read(taken.back());
    }
    return taken;
  }
  void expect_all_by_round(Member& member) {
    const auto over = member.heard->over();
    EXPECT_FALSE(over.error) << over.error->message();
    EXPECT_FALSE(over.worker_lost) << over.worker_lost->message();
    EXPECT_EQ(over.bytes, sample_.contents().total_bytes());
    EXPECT_GT(over.buckets, 3u);
    expect_all(member);
  }
  void expect_all(Member& member) {
    member.taken.get();
    EXPECT_EQ(member.worker->compare(sample_), "");
    const auto end = member.wait();
    EXPECT_FALSE(end.error) << end.error->message();
    EXPECT_EQ(end.bytes, sample_.contents().total_bytes());
  }
  void expect_nothing_used() const {
    for (const auto& device : devices_) {
      EXPECT_EQ(device->memory()->free_bytes, device->memory()->total_bytes);
    }
  }

  const bucket::testing::Sample sample_ =
      bucket::testing::sample_of({{"a", DType::kBF16, Shape{700, 512}},
                                  {"b", DType::kF32, Shape{33, 77}},
                                  {"none", DType::kF32, Shape{0, 4}},
                                  {"scalar", DType::kI64, Shape{}},
                                  {"c", DType::kU8, Shape{9, 70'001}}},
                                 7, kMiB);
  SessionTimes times_;
  std::size_t owners_ = 2;                             // the first ranks
  bool lacks_ = false;                                 // the others' hosts have no copy
  std::map<std::size_t, std::vector<UniqueFd>> lent_;  // of ranks: what their segments are
  std::vector<std::unique_ptr<bucket::Device>> devices_;
  std::vector<std::unique_ptr<Communicators>> communicators_;  // as of several processes
  std::optional<bucket::Pinner> pinner_;
  std::optional<SegmentCache> cache_;
};

TEST_F(RoundSessionTest, EveryRankGetsAllAndKeepsItsCommunicatorForTheNext) {
  for (const bool again : {false, true}) {
    auto members = join_all();
    const auto first = members[0].heard->joined();
    EXPECT_EQ(first.payload_bytes, sample_.contents().total_bytes());
    EXPECT_EQ(first.bucket_bytes, kBucket);
    EXPECT_EQ(first.contents, members[1].heard->joined().contents);
    const std::vector<std::string> kept{"c-1"};
    EXPECT_EQ(first.communicators, again ? kept : std::vector<std::string>{});
    spread(members, again ? "" : *communicators_[0]->make_id());
    for (auto& member : members) member.take_all();
    for (auto& member : members) expect_all_by_round(member);
  }
  expect_nothing_used();
}

TEST_F(RoundSessionTest, RanksWithoutACopyGetItFromOneThatVerifiesItMeanwhile) {
  owners_ = 1;
  auto members = join_all(3);
  const auto id = *communicators_[0]->make_id();
  for (std::size_t i = 0; i < 3; ++i) members[i].session->spread(order_for(i, 3, id));
  for (auto& member : members) member.take_all();
  const auto tiles = sample_.contents().tiles().tile_count();
  for (TileIndex tile = 0; tile < tiles; ++tile) {
    members[0].session->tell({{tile, tile + 1}}, false);
    std::this_thread::sleep_for(1ms);
  }
  for (auto& member : members) expect_all_by_round(member);
}

TEST_F(RoundSessionTest, WhatPassesIsKeptInTheSegmentsOfAHostThatLacksIt) {
  owners_ = 1;
  lacks_ = true;
  times_.keep_bytes_per_second = std::uint64_t{1} << 60;
  auto members = join_all();
  const auto id = *communicators_[0]->make_id();
  members[0].session->tell({}, true);
  members[0].session->spread(order_for(0, 2, id));
  auto keeps = order_for(1, 2, id);
  keeps.keep_count = 1;
  members[1].session->spread(keeps);
  for (auto& member : members) member.take_all();
  for (auto& member : members) expect_all_by_round(member);
  EXPECT_TRUE(members[0].heard->over().kept.empty());
  const auto over = members[1].heard->over();
  EXPECT_EQ(over.kept_bytes, sample_.contents().total_bytes());
  TileIndex tiles = 0;
  for (const auto& run : over.kept) {
    EXPECT_EQ(run.parts, run.of);
    tiles += run.end - run.begin;
  }
  EXPECT_EQ(tiles, sample_.contents().tiles().tile_count());
  expect_kept(1, over.kept_bytes);
  expect_nothing_used();
}

TEST_F(RoundSessionTest, NothingIsKeptWithoutARateOrAnOrder) {
  owners_ = 1;
  lacks_ = true;
  for (const bool ordered : {false, true}) {
    times_.keep_bytes_per_second = ordered ? 0 : std::uint64_t{1} << 60;
    auto members = join_all();
    const auto id = *communicators_[0]->make_id();
    members[0].session->tell({}, true);
    for (std::size_t i = 0; i < 2; ++i) {
      auto order = order_for(i, 2, id);
      order.keep_count = ordered ? 1 : 0;
      members[i].session->spread(order);
    }
    for (auto& member : members) member.take_all();
    for (auto& member : members) expect_all_by_round(member);
    EXPECT_EQ(members[1].heard->over().kept_bytes, 0u);
    expect_kept(1, 0);
  }
}

TEST_F(RoundSessionTest, Row43StoppedMidwayWhatWasKeptIsSaidAndRight) {
  owners_ = 1;
  lacks_ = true;
  times_.keep_bytes_per_second = std::uint64_t{1} << 60;
  auto members = join_all();
  const auto id = *communicators_[0]->make_id();
  members[0].session->tell({}, true);
  members[0].session->spread(order_for(0, 2, id));
  auto keeps = order_for(1, 2, id);
  keeps.keep_count = 1;
  members[1].session->spread(keeps);
  const auto taken = take_one_each(members);
  for (auto& member : members) member.session->stop("another rank has failed");
  const auto over = members[1].heard->over();
  ASSERT_TRUE(over.error);
  EXPECT_GT(over.kept_bytes, 0u);
  EXPECT_LT(over.kept_bytes, sample_.contents().total_bytes());
  expect_kept(1, over.kept_bytes);
  // The copy is completed: the rest comes from there.
  for (std::size_t i = 0; i < lent_[1].size(); ++i) {
    const auto& segment = sample_.segments[i];
    ASSERT_EQ(::pwrite(lent_[1][i].get(), segment.data(), segment.size(), 0),
              static_cast<ssize_t>(segment.size()));
  }
  members[1].session->tell({}, true);
  for (std::size_t i = 0; i < members.size(); ++i) {
    members[i].worker->release(taken[i]);
    members[i].take_all();
  }
  for (auto& member : members) expect_all(member);
  expect_nothing_used();
}

TEST_F(RoundSessionTest, StoppedBeforeItBeganItIsServedAsAlways) {
  auto members = join_all(1);
  members[0].session->tell({}, true);  // kept until it knows what for
  members[0].session->stop("nobody else wants the same");
  members[0].take_all();
  expect_all(members[0]);
  EXPECT_FALSE(members[0].heard->is_over());
}

TEST_F(RoundSessionTest, AnOrderAfterTheStopIsAnswered) {
  auto members = join_all(1);
  members[0].session->stop("over");
  members[0].session->spread(order_for(0, 2, "x"));
  EXPECT_EQ(members[0].heard->over().error->code(), ErrorCode::kStale);
  members[0].session->tell({}, true);
  members[0].take_all();
  expect_all(members[0]);
}

TEST_F(RoundSessionTest, WhatCannotBeSpreadIsSaidAndServedAsAlways) {
  owners_ = 1;
  const auto good = order_for(0, 2, "no id of a meeting");
  auto large = good;
  large.bucket_bytes = 2 * kBucket;
  auto lost = good;
  lost.id.clear();  // and none is kept
  for (const auto& order : {good, large, lost}) {
    auto member = join(0);
    member.session->tell({}, true);
    member.session->spread(order);
    const auto over = member.heard->over();
    ASSERT_TRUE(over.error);
    EXPECT_EQ(over.error->message().find('\n'), std::string::npos);
    EXPECT_EQ(over.bytes, 0u);
    member.take_all();
    expect_all(member);
  }
}

TEST_F(RoundSessionTest, WhenTheOthersDoNotComeItIsServedAsAlways) {
  times_.meet = 200ms;
  auto members = join_all(1);
  members[0].session->tell({}, true);
  members[0].session->spread(order_for(0, 2, *communicators_[0]->make_id()));
  EXPECT_EQ(members[0].heard->over().error->code(), ErrorCode::kTimeout);
  members[0].take_all();
  expect_all(members[0]);
  EXPECT_TRUE(communicators_[0]->kept("double:0").empty());
}

TEST_F(RoundSessionTest, StoppedMidwayTheRestComesFromTheSegments) {
  auto members = begin_round();
  const auto kept = take_one_each(members);
  for (auto& member : members) member.session->stop("another rank has failed");
  for (std::size_t i = 0; i < members.size(); ++i) {
    const auto over = members[i].heard->over();
    ASSERT_TRUE(over.error);
    EXPECT_EQ(over.error->code(), ErrorCode::kStale);
    EXPECT_EQ(over.error->message(), "another rank has failed");
    EXPECT_LT(over.bytes, sample_.contents().total_bytes());
    members[i].worker->read(kept[i]);  // it is the worker's still
    members[i].worker->release(kept[i]);
    members[i].take_all();
  }
  for (auto& member : members) expect_all(member);
  EXPECT_TRUE(communicators_[0]->kept("double:0").empty());
  expect_nothing_used();
}

TEST_F(RoundSessionTest, AfterTheStopARankWithoutACopyWaitsForItsTiles) {
  owners_ = 1;
  auto members = begin_round();
  const auto kept = take_one_each(members);
  for (auto& member : members) member.session->stop("another rank has failed");
  for (std::size_t i = 0; i < members.size(); ++i) {
    ASSERT_TRUE(members[i].heard->over().error);
    members[i].worker->release(kept[i]);
    members[i].take_all();
  }
  expect_all(members[0]);
  members[1].session->tell({}, true);
  expect_all(members[1]);
}

TEST_F(RoundSessionTest, Row39WorkerThatDiesInARoundDisturbsNobody) {
  auto members = begin_round(3);
  const auto kept = take_one_each(members);
  members[1].worker->close();
  const std::vector<std::size_t> survivors{0, 2};
  for (const std::size_t i : survivors) members[i].worker->release(kept[i]);
  for (const std::size_t i : survivors) members[i].take_all();
  for (const std::size_t i : survivors) expect_all_by_round(members[i]);
  const auto over = members[1].heard->over();
  EXPECT_FALSE(over.error) << over.error->message();
  ASSERT_TRUE(over.worker_lost) << "not all that was spread was given";
  EXPECT_EQ(over.worker_lost->code(), ErrorCode::kPeerLost);
  EXPECT_LT(over.bytes, sample_.contents().total_bytes());
  EXPECT_EQ(members[1].wait().error->code(), ErrorCode::kPeerLost);
  EXPECT_EQ(communicators_[1]->kept("double:1").size(), 1u);
  expect_nothing_used();
}

TEST_F(RoundSessionTest, Row40WorkerThatHangsInARoundIsDoneWithoutByItsDeadline) {
  auto members = join_all(1);
  times_.round_release = 300ms;
  members.push_back(join(1));
  spread(members, *communicators_[0]->make_id());
  const auto kept = take_one_each(members);
  members[0].worker->release(kept[0]);
  members[0].take_all();
  expect_all_by_round(members[0]);
  EXPECT_FALSE(members[1].heard->over().error);
  EXPECT_EQ(members[1].heard->over().worker_lost->code(), ErrorCode::kTimeout);
  while (members[1].worker->next()) {
  }
  EXPECT_TRUE(members[1].worker->failed());
  members[1].worker.reset();  // until then it may read what it has
  EXPECT_EQ(members[1].wait().error->code(), ErrorCode::kTimeout);
}

TEST_F(RoundSessionTest, Row40WorkerThatBreaksTheRulesInARoundDisturbsNobody) {
  auto members = begin_round();
  const auto kept = take_one_each(members);
  members[0].worker->release(kept[0]);
  members[0].take_all();
  members[1].worker->say(bucket::ReleasedMessage{99, 0});
  members[1].take_all();
  expect_all_by_round(members[0]);
  members[1].taken.get();
  EXPECT_EQ(members[1].worker->failed()->code(), ErrorCode::kInvalid);
  EXPECT_EQ(members[1].wait().error->code(), ErrorCode::kInvalid);
}

TEST_F(RoundSessionTest, EndedWhileItSpreadsItGoesOnAndDiscards) {
  for (const bool at_once : {true, false}) {
    auto members = join_all();
    if (!at_once) spread(members, *communicators_[0]->make_id());
    std::vector<bucket::FilledMessage> kept;
    if (!at_once) kept = take_one_each(members);
    if (at_once) spread(members, *communicators_[0]->make_id());
    members[1].session->end(Error(ErrorCode::kStale, "the worker's session has ended"), true);
    if (!at_once) members[0].worker->release(kept[0]);
    members[0].take_all();
    members[1].take_all();
    expect_all_by_round(members[0]);
    EXPECT_FALSE(members[1].heard->over().error);
    EXPECT_EQ(members[1].wait().error->code(), ErrorCode::kStale);
    members[1].taken.get();
    EXPECT_TRUE(members[1].worker->failed());
  }
  expect_nothing_used();
}

TEST_F(RoundSessionTest, Row43RankThatGoesLeavesTheOthersToTheirSegments) {
  times_.round_fill = 400ms;
  auto members = begin_round();
  const auto kept = take_one_each(members);
  members[1].session.reset();  // as when its process ends
  EXPECT_EQ(members[1].wait().error->code(), ErrorCode::kStale);
  members[0].worker->release(kept[0]);
  members[0].take_all();
  const auto over = members[0].heard->over();
  ASSERT_TRUE(over.error);
  EXPECT_EQ(over.error->code(), ErrorCode::kTimeout) << over.error->message();
  EXPECT_EQ(over.error->message().find('\n'), std::string::npos);
  expect_all(members[0]);
}

}  // namespace
}  // namespace rekindle::device
