// A session's thread with a worker that keeps the protocol, and with workers that do not.
#include <future>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "recovery/device/process/pinned_copies.h"
#include "src/base/units.h"
#include "src/bucket/double_device.h"
#include "tests/bucket/flipping_device.h"
#include "tests/device/started_session.h"

namespace rekindle::device {
namespace {

using namespace std::chrono_literals;
using testing::BucketWorker;

constexpr std::uint64_t kBucket = 256 * kKiB;

class DeviceSessionTest : public ::testing::Test {
 protected:
  using Begun = testing::StartedSession;

  Begun begin() { return begin(*device_); }
  Begun begin(bucket::Device& device) {
    SessionOrder order;
    order.open = [&device]() -> Result<bucket::Device*> { return &device; };
    order.pinner = &pinner_;
    order.attached = *parse_attached(testing::attached_frame(sample_));
    const auto files = sample_.files();
    for (std::size_t i = 0; i < files.size(); ++i) {
      order.segments.push_back(*cache_.get(files[i].get(), sample_.segment_bytes[i]));
    }
    order.slots.bucket_bytes = kBucket;
    order.slots.free_fraction = 1;
    order.times = times_;
    order.verify_upload = verify_upload_;
    order.leaves = leaves_;
    Begun begun;
    begun.start(std::move(order));
    return begun;
  }
  Begun begin_complete() {
    auto begun = begin();
    begun.session->tell({}, true);
    return begun;
  }
  std::uint64_t used() const { return device_->memory()->total_bytes - free_bytes(); }
  std::uint64_t free_bytes() const { return device_->memory()->free_bytes; }

  const bucket::testing::Sample sample_ =
      bucket::testing::sample_of({{"a", DType::kBF16, Shape{1024, 1024}},
                                  {"b", DType::kF32, Shape{33, 77}},
                                  {"none", DType::kF32, Shape{0, 4}},
                                  {"scalar", DType::kI64, Shape{}},
                                  {"c", DType::kU8, Shape{3, 70'001}}},
                                 7, kMiB);
  SessionTimes times_;
  bool verify_upload_ = false;
  std::vector<Digest> leaves_;
  std::unique_ptr<bucket::Device> device_ = bucket::make_double_device("double:0", 64 * kMiB);
  bucket::Pinner pinner_{*device_, 2};
  SegmentCache cache_{pinner_};
};

TEST_F(DeviceSessionTest, EveryByteArrivesAndTheMemoryIsFree) {
  auto begun = begin_complete();
  begun.worker->open();
  begun.worker->take_all();
  EXPECT_TRUE(begun.worker->finished());
  EXPECT_EQ(begun.worker->compare(sample_), "");
  EXPECT_EQ(used(), 3 * kBucket) << "while the worker has it open";
  begun.worker->close();
  const auto end = begun.wait();
  EXPECT_FALSE(end.error) << end.error->message();
  EXPECT_EQ(end.buckets, begun.worker->buckets());
  EXPECT_EQ(end.bytes, sample_.contents().total_bytes());
  EXPECT_EQ(used(), 0u);
}

TEST_F(DeviceSessionTest, BucketsComeAsTheirTilesVerify) {
  auto begun = begin();
  begun.worker->open();
  const auto contents = sample_.contents();
  std::thread teller([&] {
    const auto tiles = contents.tiles().tile_count();
    for (TileIndex tile = tiles; tile-- > 0;) {
      begun.session->tell({{tile, tile + 1}}, false);
      std::this_thread::sleep_for(1ms);
    }
  });
  begun.worker->take_all();
  teller.join();
  EXPECT_TRUE(begun.worker->finished());
  EXPECT_EQ(begun.worker->compare(sample_), "");
  // A late message changes nothing.
  begun.session->tell({}, true);
  begun.worker->close();
  EXPECT_FALSE(begun.wait().error);
}

TEST_F(DeviceSessionTest, AWorkerThatGoesMidwayFreesItsMemory) {
  auto begun = begin_complete();
  begun.worker->open();
  const auto filled = begun.worker->next();
  ASSERT_TRUE(filled);
  begun.worker->read(*filled);
  begun.worker->close();
  const auto end = begun.wait();
  ASSERT_TRUE(end.error);
  EXPECT_EQ(end.error->code(), ErrorCode::kPeerLost);
  EXPECT_FALSE(end.device_lost);
  EXPECT_EQ(used(), 0u);
}

TEST_F(DeviceSessionTest, OneThatNeverReleasesEndsByItsDeadlineAndAlone) {
  times_.release = 300ms;
  auto hung = begin_complete();
  times_.release = 30s;
  auto fine = begin_complete();
  hung.worker->open();
  ASSERT_TRUE(hung.worker->next());
  const auto end = hung.wait();
  ASSERT_TRUE(end.error);
  EXPECT_EQ(end.error->code(), ErrorCode::kTimeout);
  EXPECT_EQ(used(), 3 * kBucket) << "of the other";
  while (hung.worker->next()) {
  }
  EXPECT_TRUE(hung.worker->failed());
  fine.worker->open();
  fine.worker->take_all();
  EXPECT_EQ(fine.worker->compare(sample_), "");
  fine.worker->close();
  EXPECT_FALSE(fine.wait().error);
}

TEST_F(DeviceSessionTest, ABucketIsGivenBackOnce) {
  auto begun = begin_complete();
  begun.worker->open();
  const auto filled = begun.worker->next();
  ASSERT_TRUE(filled);
  begun.worker->read(*filled);
  begun.worker->release(*filled);
  begun.worker->release(*filled);
  while (begun.worker->next()) {
  }
  begun.worker->close();
  const auto end = begun.wait();
  ASSERT_TRUE(end.error);
  EXPECT_EQ(end.error->code(), ErrorCode::kInvalid) << end.error->message();
}

TEST_F(DeviceSessionTest, NonsenseEndsOnlyTheSession) {
  for (int kind = 0; kind < 3; ++kind) {
    auto begun = begin_complete();
    begun.worker->open();
    if (kind == 0) begun.worker->say(bucket::FinishedMessage{});
    if (kind == 1) begun.worker->say(bucket::ReleasedMessage{99, 0});
    if (kind == 2) begun.worker->say(bucket::OpenedMessage{});
    while (begun.worker->next()) {
    }
    begun.worker->close();
    const auto end = begun.wait();
    ASSERT_TRUE(end.error) << kind;
    EXPECT_EQ(end.error->code(), ErrorCode::kInvalid) << end.error->message();
  }
  EXPECT_EQ(used(), 0u);
}

TEST_F(DeviceSessionTest, AWorkersOwnFailureIsItsReason) {
  auto begun = begin_complete();
  begun.worker->open();
  begun.worker->say(bucket::FailedMessage{Error(ErrorCode::kUnavailable, "no IPC here")});
  begun.worker->close();
  const auto end = begun.wait();
  ASSERT_TRUE(end.error);
  EXPECT_NE(end.error->message().find("no IPC here"), std::string::npos);
}

TEST_F(DeviceSessionTest, WithLittleMemoryItTakesTurnsAndWithNoneItSaysSo) {
  const auto small = bucket::make_double_device("double:1", kBucket + kBucket / 2);
  auto begun = begin(*small);
  begun.session->tell({}, true);
  begun.worker->open();
  EXPECT_NE(begun.worker->buffers().warning, "");
  EXPECT_EQ(begun.worker->buffers().filled.size(), 1u);
  begun.worker->take_all();
  EXPECT_EQ(begun.worker->compare(sample_), "");
  begun.worker->close();
  EXPECT_FALSE(begun.wait().error);

  const auto tiny = bucket::make_double_device("double:2", 4 * kKiB);
  auto refused = begin(*tiny);
  refused.worker->open();
  ASSERT_TRUE(refused.worker->failed());
  EXPECT_EQ(refused.worker->failed()->code(), ErrorCode::kExhausted);
  EXPECT_EQ(refused.wait().error->code(), ErrorCode::kExhausted);
}

TEST_F(DeviceSessionTest, EndedFromOutsideItTellsTheWorker) {
  auto begun = begin();
  begun.worker->open();
  begun.session->end(Error(ErrorCode::kStale, "has detached"), true);
  while (begun.worker->next()) {
  }
  ASSERT_TRUE(begun.worker->failed());
  EXPECT_EQ(begun.worker->failed()->code(), ErrorCode::kStale);
  begun.worker->close();
  EXPECT_EQ(begun.wait().error->code(), ErrorCode::kStale);
  EXPECT_EQ(used(), 0u);
}

class VerifiedSessionTest : public DeviceSessionTest {
 protected:
  VerifiedSessionTest() {
    verify_upload_ = true;
    leaves_ = sample_.leaves();
  }
  // Runs a session in which the first `times` uploads of bucket 1 have a wrong bit.
  SessionEnd flip(int times, std::string* seen) {
    bucket::testing::FlippingDevice flipping(*device_,
                                             {{.bucket = 1, .offset = 3, .times = times}});
    auto begun = begin(flipping);
    begun.session->tell({}, true);
    begun.worker->open();
    begun.worker->take_all();
    *seen =
        begun.worker->failed() ? begun.worker->failed()->message() : begun.worker->compare(sample_);
    begun.worker->close();
    return begun.wait();
  }
};

TEST_F(VerifiedSessionTest, EveryByteArrivesAndTheMemoryIsFree) {
  auto begun = begin_complete();
  begun.worker->open();
  begun.worker->take_all();
  EXPECT_TRUE(begun.worker->finished());
  EXPECT_EQ(begun.worker->compare(sample_), "");
  begun.worker->close();
  const auto end = begun.wait();
  EXPECT_FALSE(end.error) << end.error->message();
  EXPECT_EQ(end.bytes, sample_.contents().total_bytes());
  EXPECT_EQ(end.refilled, 0u);
  EXPECT_GT(end.elapsed, Duration{0});
  EXPECT_EQ(used(), 0u);
}

TEST_F(VerifiedSessionTest, BucketsComeAsTheirTilesVerify) {
  auto begun = begin();
  begun.worker->open();
  const auto tiles = sample_.contents().tiles().tile_count();
  std::thread teller([&] {
    for (TileIndex tile = tiles; tile-- > 0;) {
      begun.session->tell({{tile, tile + 1}}, false);
      std::this_thread::sleep_for(1ms);
    }
  });
  begun.worker->take_all();
  teller.join();
  EXPECT_TRUE(begun.worker->finished());
  EXPECT_EQ(begun.worker->compare(sample_), "");
  begun.worker->close();
  EXPECT_FALSE(begun.wait().error);
}

TEST_F(VerifiedSessionTest, AFlippedBitNeverReachesTheWorker) {
  std::string seen;
  const auto end = flip(1, &seen);
  EXPECT_EQ(seen, "");
  EXPECT_FALSE(end.error) << end.error->message();
  EXPECT_EQ(end.refilled, 1u);
}

TEST_F(VerifiedSessionTest, WrongTwiceTheWorkerHearsOfDeviceAndTensor) {
  std::string seen;
  const auto end = flip(2, &seen);
  ASSERT_TRUE(end.error);
  EXPECT_EQ(end.error->code(), ErrorCode::kCorrupt);
  EXPECT_FALSE(end.device_lost);
  EXPECT_EQ(end.refilled, 1u);
  for (const std::string& said : {end.error->message(), seen}) {
    EXPECT_NE(said.find("double:0"), std::string::npos) << said;
    EXPECT_NE(said.find("tensor '"), std::string::npos) << said;
  }
  EXPECT_EQ(used(), 0u);
}

TEST_F(VerifiedSessionTest, WithoutVerificationAFlippedBitIsNotNoticed) {
  verify_upload_ = false;
  std::string seen;
  EXPECT_FALSE(flip(1, &seen).error);
  EXPECT_NE(seen, "") << "the flips of this test change nothing";
}

TEST_F(VerifiedSessionTest, WithoutTheDigestsOfTilesNothingIsHandedOver) {
  leaves_.clear();
  auto begun = begin_complete();
  begun.worker->open();
  begun.worker->take_all();
  EXPECT_EQ(begun.worker->buckets(), 0u);
  begun.worker->close();
  const auto end = begun.wait();
  ASSERT_TRUE(end.error);
  EXPECT_EQ(end.error->code(), ErrorCode::kDenied) << "the worker must not upload instead";
  EXPECT_EQ(used(), 0u);
}

TEST_F(VerifiedSessionTest, OneThatNeverReleasesEndsByItsDeadline) {
  times_.release = 300ms;
  auto hung = begin_complete();
  hung.worker->open();
  ASSERT_TRUE(hung.worker->next());
  const auto end = hung.wait();
  ASSERT_TRUE(end.error);
  EXPECT_EQ(end.error->code(), ErrorCode::kTimeout);
}

TEST_F(VerifiedSessionTest, AWorkerThatClosesInTheMiddleEndsIt) {
  auto begun = begin_complete();
  begun.worker->open();
  ASSERT_TRUE(begun.worker->next());
  begun.worker->close();
  const auto end = begun.wait();
  ASSERT_TRUE(end.error);
  EXPECT_EQ(end.error->code(), ErrorCode::kPeerLost);
  EXPECT_EQ(used(), 0u);
}

}  // namespace
}  // namespace rekindle::device
