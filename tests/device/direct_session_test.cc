// Sessions into whose slots NICs write. The test is the agent and its NICs: it maps the memory that
// a session offers, and fills the slots from the sample. What the worker got is compared with the
// sample by the worker's end, not by the code under test.
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <sys/mman.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/device/process/pinned_copies.h"
#include "src/base/units.h"
#include "src/bucket/direct_stages.h"
#include "src/bucket/double_device.h"
#include "tests/bucket/forwarding_device.h"
#include "tests/device/started_session.h"

namespace rekindle::device {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::uint64_t kSlot = 256 * kKiB;

// Plays the agent: answers what a session says, on the session's thread.
class Nics {
 public:
  explicit Nics(const bucket::testing::Sample& sample) : sample_(sample) {}
  ~Nics() {
    if (memory_ != nullptr) ::munmap(memory_, bytes_);
  }
  Nics(const Nics&) = delete;
  Nics& operator=(const Nics&) = delete;

  // Of each direct bucket, counted in their order, how many reads bring a wrong byte.
  std::map<std::size_t, int> flips;
  // So many direct buckets land; then every source is lost.
  std::size_t lost_from = ~std::size_t{0};
  // Bytes stop coming, and the end of the writes is not confirmed.
  bool hangs = false;

  void serve(Session& session) {
    const std::lock_guard lock(mutex_);
    session_ = &session;
    changed_.notify_all();
  }
  void say(SessionNews news) {
    std::unique_lock lock(mutex_);
    // The session's first words may come before the test knows it.
    ASSERT_TRUE(
        changed_.wait_for(lock, std::chrono::seconds(20), [&] { return session_ != nullptr; }));
    if (auto* const offered = std::get_if<SlotsOffered>(&news)) map(*offered);
    if (const auto* const wanted = std::get_if<BucketWanted>(&news)) read(*wanted);
    if (const auto* const ended = std::get_if<ReadsEnded>(&news)) {
      ended_ = *ended;
      if (!hangs) session_->reads_over("no more is wanted");
    }
  }

  // False: the session wants no bucket for 20 s.
  bool await_wish() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] { return !wanted_.empty(); });
  }

  // For the test, when the session is over.
  const std::optional<ReadsEnded>& ended() const { return ended_; }
  const std::vector<BucketWanted>& wanted() const { return wanted_; }
  const std::vector<std::size_t>& direct() const { return direct_; }

 private:
  void map(const SlotsOffered& offered) {
    slot_bytes_ = offered.bucket_bytes;
    bytes_ = offered.bucket_bytes * offered.slots;
    void* const mapped =
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, offered.memory.get(), 0);
    ASSERT_NE(mapped, MAP_FAILED);
    memory_ = static_cast<std::byte*>(mapped);
    const auto contents = sample_.contents();
    EXPECT_EQ(offered.contents, bucket::digest_of(contents));
    plan_ = *bucket::Plan::create(contents, slot_bytes_);
    for (const auto& direct : bucket::direct_buckets(contents, *plan_)) {
      direct_.push_back(direct.bucket);
    }
  }
  void read(const BucketWanted& wanted) {
    wanted_.push_back(wanted);
    changed_.notify_all();
    if (hangs) return;
    const auto place =
        static_cast<std::size_t>(std::ranges::find(direct_, wanted.bucket) - direct_.begin());
    ASSERT_LT(place, direct_.size());
    if (place >= lost_from) return session_->reads_over("no source is left");
    const auto contents = sample_.contents();
    std::byte* const slot = memory_ + wanted.slot * slot_bytes_;
    for (const bucket::Part& part : plan_->parts(wanted.bucket)) {
      const auto& piece = contents.pieces()[part.piece];
      const std::string bytes = sample_.bytes_of(contents, piece);
      std::memcpy(slot + part.at, bytes.data() + part.offset_bytes, part.bytes);
    }
    if (flips[place]-- > 0) {
      const bucket::Part& last = plan_->parts(wanted.bucket).back();
      slot[last.at + last.bytes / 2] ^= std::byte{4};
    }
    session_->landed(wanted.bucket);
  }

  const bucket::testing::Sample& sample_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Session* session_ = nullptr;
  std::byte* memory_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint64_t slot_bytes_ = 0;
  std::optional<bucket::Plan> plan_;
  std::vector<std::size_t> direct_;
  std::vector<BucketWanted> wanted_;
  std::optional<ReadsEnded> ended_;
};

// Exports no memory to NICs, like a driver without dmabuf.
class UnexportedDevice final : public bucket::testing::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
};

// Its driver cannot tell when writes of NICs are visible.
class UnorderedDevice final : public bucket::testing::ForwardingDevice {
 public:
  explicit UnorderedDevice(bucket::Device& device) : ForwardingDevice(device), device_(device) {}
  Result<UniqueFd> export_memory(bucket::Memory& memory) override {
    return device_.export_memory(memory);
  }
  Result<void> see_nic_writes() override {
    return fail(ErrorCode::kUnavailable, "cannot wait for writes of NICs");
  }

 private:
  bucket::Device& device_;
};

class DirectSessionTest : public ::testing::Test {
 protected:
  using Begun = testing::StartedSession;

  Begun begin(bucket::Device& device) {
    SessionOrder order;
    order.open = [&device]() -> Result<bucket::Device*> { return &device; };
    order.pinner = &pinner_;
    order.attached = *parse_attached(testing::attached_frame(sample_));
    const auto files = sample_.files();
    for (std::size_t i = 0; i < files.size(); ++i) {
      order.segments.push_back(*cache_.get(files[i].get(), sample_.segment_bytes[i]));
    }
    order.slots.bucket_bytes = kSlot;
    order.slots.free_fraction = 1;
    order.times = times_;
    order.direct = true;
    order.leaves = sample_.leaves();
    order.say = [this](SessionNews news) { nics_.say(std::move(news)); };
    Begun begun;
    begun.start(std::move(order));
    nics_.serve(*begun.session);
    return begun;
  }
  Begun begin() { return begin(*device_); }
  // Lets the worker take everything, and returns what differs from the sample.
  SessionEnd finish(Begun& begun) {
    begun.worker->open();
    begun.worker->take_all();
    EXPECT_TRUE(begun.worker->finished());
    EXPECT_EQ(begun.worker->compare(sample_), "");
    begun.worker->close();
    return begun.wait();
  }
  std::uint64_t used() const {
    const auto memory = device_->memory();
    return memory->total_bytes - memory->free_bytes;
  }

  // The buckets of "cut" have parts of its tiles, those of the others have whole ones.
  static bucket::testing::Sample sample() {
    std::vector<TensorInfo> tensors{{"cut", DType::kBF16, Shape{1024, 1024}},
                                    {"none", DType::kF32, Shape{0, 4}},
                                    {"scalar", DType::kI64, Shape{}}};
    for (int i = 0; i < 10; ++i) {
      tensors.push_back({fmt::format("t{}", i), DType::kF32, Shape{100, 300}});
    }
    return bucket::testing::sample_of(std::move(tensors), 7, kMiB);
  }
  const bucket::testing::Sample sample_ = sample();
  SessionTimes times_;
  std::unique_ptr<bucket::Device> device_ = bucket::make_double_device("double:0", 64 * kMiB);
  bucket::Pinner pinner_{*device_, 2};
  SegmentCache cache_{pinner_};
  Nics nics_{sample_};
};

TEST_F(DirectSessionTest, DirectBucketsArriveWithoutThisHostsCopyAndTheRestFollowsFromIt) {
  auto begun = begin();
  begun.worker->open();
  const auto contents = sample_.contents();
  // The direct buckets come first, while no tile is here.
  const auto plan = *bucket::Plan::create(contents, begun.worker->buffers().bucket_bytes);
  const auto direct = bucket::direct_buckets(contents, plan);
  ASSERT_GE(direct.size(), 4u);
  ASSERT_LT(direct.size(), plan.size());
  for (std::size_t i = 0; i < direct.size(); ++i) {
    const auto filled = begun.worker->next();
    ASSERT_TRUE(filled);
    begun.worker->read(*filled);
    begun.worker->release(*filled);
  }
  begun.session->tell({}, true);
  begun.worker->take_all();
  EXPECT_TRUE(begun.worker->finished());
  EXPECT_EQ(begun.worker->compare(sample_), "");
  begun.worker->close();
  const auto end = begun.wait();
  EXPECT_FALSE(end.error) << end.error->message();
  EXPECT_EQ(end.buckets, plan.size());
  EXPECT_EQ(end.bytes, contents.total_bytes());
  ASSERT_EQ(nics_.wanted().size(), direct.size());
  for (std::size_t i = 0; i < direct.size(); ++i) {
    EXPECT_EQ(nics_.wanted()[i].bucket, direct[i].bucket);
    EXPECT_THAT(nics_.wanted()[i].wrong, IsEmpty());
    EXPECT_LE(nics_.wanted()[i].verified, i);
  }
  ASSERT_TRUE(nics_.ended());
  EXPECT_EQ(nics_.ended()->buckets, direct.size());
  EXPECT_EQ(nics_.ended()->all, direct.size() == plan.size());
  EXPECT_EQ(used(), 0u);
}

TEST_F(DirectSessionTest, AFlippedByteIsFoundAndReadAgainWithItsTileNamed) {
  nics_.flips[0] = 1;
  auto begun = begin();
  begun.session->tell({}, true);
  const auto end = finish(begun);
  EXPECT_FALSE(end.error) << end.error->message();
  EXPECT_EQ(end.refilled, 1u);
  const auto again =
      std::ranges::find_if(nics_.wanted(), [](const auto& one) { return !one.wrong.empty(); });
  ASSERT_NE(again, nics_.wanted().end());
  EXPECT_EQ(again->bucket, nics_.direct().front());
  EXPECT_EQ(again->wrong.size(), 1u);
  EXPECT_EQ(again->verified, 0u);
}

TEST_F(DirectSessionTest, ABucketThatIsWrongTwiceComesFromThisHostsCopyLikeTheOnesAfterIt) {
  nics_.flips[1] = 2;
  auto begun = begin();
  begun.session->tell({}, true);
  const auto end = finish(begun);
  EXPECT_FALSE(end.error) << end.error->message();
  ASSERT_TRUE(nics_.ended());
  EXPECT_FALSE(nics_.ended()->all);
  EXPECT_EQ(nics_.ended()->buckets, 1u);
  EXPECT_THAT(nics_.ended()->why, HasSubstr("do not match their digest"));
}

TEST_F(DirectSessionTest, WhenTheSourcesAreLostTheOtherBucketsComeFromThisHostsCopy) {
  nics_.lost_from = 2;
  auto begun = begin();
  begun.session->tell({}, true);
  const auto end = finish(begun);
  EXPECT_FALSE(end.error) << end.error->message();
  ASSERT_TRUE(nics_.ended());
  // Buckets that had landed but not verified do not count.
  EXPECT_LE(nics_.ended()->buckets, 2u);
  EXPECT_FALSE(nics_.ended()->all);
  EXPECT_THAT(nics_.ended()->why, HasSubstr("no source is left"));
  EXPECT_EQ(used(), 0u);
}

TEST_F(DirectSessionTest, ADeviceThatExportsNothingUploadsAsAlways) {
  UnexportedDevice unexported(*device_);
  auto begun = begin(unexported);
  begun.session->tell({}, true);
  const auto end = finish(begun);
  EXPECT_FALSE(end.error) << end.error->message();
  EXPECT_THAT(nics_.wanted(), IsEmpty());
  ASSERT_TRUE(nics_.ended());
  EXPECT_THAT(nics_.ended()->why, HasSubstr("exports no memory"));
}

TEST_F(DirectSessionTest, ADeviceThatCannotSeeWritesOfNicsUploadsAsAlways) {
  UnorderedDevice unordered(*device_);
  auto begun = begin(unordered);
  begun.session->tell({}, true);
  const auto end = finish(begun);
  EXPECT_FALSE(end.error) << end.error->message();
  EXPECT_THAT(nics_.wanted(), IsEmpty());
  ASSERT_TRUE(nics_.ended());
  EXPECT_THAT(nics_.ended()->why, HasSubstr("cannot wait for writes"));
}

// The agent may live, and the NIC may write to the slot of the first bucket.
TEST_F(DirectSessionTest, ASessionThatEndsWhileANicWritesUploadsNothingAnyMore) {
  nics_.hangs = true;
  auto begun = begin();
  begun.session->tell({}, true);
  begun.worker->open();
  ASSERT_TRUE(nics_.await_wish());
  begun.session->end(Error(ErrorCode::kPeerLost, "the agent is gone"), true);
  begun.session->reads_over("the agent is gone");
  begun.worker->take_all();
  EXPECT_FALSE(begun.worker->finished());
  EXPECT_EQ(begun.worker->buckets(), 0u);
  begun.worker->close();
  const auto end = begun.wait();
  ASSERT_TRUE(end.error);
  EXPECT_EQ(end.buckets, 0u);
}

TEST_F(DirectSessionTest, SlotsThatNicsMayStillWriteToAreNotUsedForUploads) {
  times_.direct_read = 50ms;
  times_.direct_end = 50ms;
  nics_.hangs = true;
  auto begun = begin();
  begun.session->tell({}, true);
  begun.worker->open();
  begun.worker->take_all();
  EXPECT_FALSE(begun.worker->finished());
  EXPECT_EQ(begun.worker->buckets(), 0u);
  begun.worker->close();
  const auto end = begun.wait();
  ASSERT_TRUE(end.error);
  EXPECT_EQ(end.error->code(), ErrorCode::kUnavailable) << "the worker does not hang";
  EXPECT_THAT(end.error->message(), HasSubstr("NICs leave the memory"));
}

TEST_F(DirectSessionTest, AWorkerThatGoesMidwayLeavesNothingBehind) {
  auto begun = begin();
  begun.worker->open();
  const auto filled = begun.worker->next();
  ASSERT_TRUE(filled);
  begun.worker->close();
  const auto end = begun.wait();
  ASSERT_TRUE(end.error);
  EXPECT_EQ(end.error->code(), ErrorCode::kPeerLost);
  EXPECT_TRUE(nics_.ended()) << "the agent was told before the slots were freed";
  EXPECT_EQ(used(), 0u);
}

}  // namespace
}  // namespace rekindle::device
