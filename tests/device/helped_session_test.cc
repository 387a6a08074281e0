// A session whose uploads use the links of other devices.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/device/process/device_loans.h"
#include "recovery/device/process/pinned_copies.h"
#include "src/base/failpoint.h"
#include "src/base/units.h"
#include "src/bucket/double_device.h"
#include "tests/bucket/flipping_device.h"
#include "tests/device/started_session.h"

namespace rekindle::device {
namespace {

using namespace std::chrono_literals;
using bucket::testing::FlippingDevice;
using testing::StartedSession;

constexpr std::uint64_t kBucketBytes = 64 * kKiB;
constexpr std::uint64_t kDoubleBytes = 64 * kMiB;

class WithoutPeers final : public bucket::testing::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  Result<void> reach_peer(bucket::Device& peer) override { return Device::reach_peer(peer); }
};

// A device whose context breaks, as every call says then.
class Breaking final : public bucket::testing::ForwardingDevice {
 public:
  Breaking(std::unique_ptr<bucket::Device> device, const std::atomic<bool>& broken)
      : ForwardingDevice(*device), owned_(std::move(device)), broken_(broken) {}
  Result<bucket::DeviceMemory> memory() const override {
    if (broken_) return fail(ErrorCode::kInternal, "an illegal address");
    return ForwardingDevice::memory();
  }

 private:
  const std::unique_ptr<bucket::Device> owned_;
  const std::atomic<bool>& broken_;
};

class HelpedSessionTest : public ::testing::Test {
 protected:
  explicit HelpedSessionTest(std::uint32_t most = 3) : loans_(devices_, most) {}
  ~HelpedSessionTest() override { (void)arm_failpoints(""); }

  void open_all() {
    for (const auto& one : devices_.all()) ASSERT_TRUE(devices_.open(one.id));
  }
  StartedSession begin(std::uint32_t device = 0) {
    const std::string id = fmt::format("double:{}", device);
    SessionOrder order;
    order.open = [this, id] { return devices_.open(id); };
    order.pinner = &pinner_;
    order.attached = *parse_attached(testing::attached_frame(sample_, wanted_));
    const auto files = sample_.files();
    for (std::size_t i = 0; i < files.size(); ++i) {
      order.segments.push_back(*cache_.get(files[i].get(), sample_.segment_bytes[i]));
    }
    order.slots.bucket_bytes = kBucketBytes;
    order.slots.free_fraction = 1;
    order.verify_upload = verify_upload_;
    if (verify_upload_) order.leaves = sample_.leaves();
    order.loans = &loans_;
    order.use = loans_.use(id);
    StartedSession begun;
    begun.start(std::move(order));
    begun.session->tell({}, true);
    begun.worker->open();
    return begun;
  }
  SessionEnd run_session() {
    auto begun = begin();
    begun.worker->take_all();
    EXPECT_TRUE(begun.worker->finished());
    EXPECT_EQ(begun.worker->compare(sample_, wanted_), "");
    begun.worker->close();
    auto end = begun.wait();
    EXPECT_FALSE(end.error) << end.error->message();
    return end;
  }
  std::uint64_t used(std::size_t device) const {
    const auto memory = *doubles_[device]->memory();
    return memory.total_bytes - memory.free_bytes;
  }
  bool eventually_free(std::size_t device) const {
    for (int i = 0; i < 1000 && used(device) > 0; ++i) std::this_thread::sleep_for(10ms);
    return used(device) == 0;
  }
  std::vector<std::string> lent() {
    std::vector<std::string> ids;
    for (const auto& loan : loans_.borrow("nobody", [] {})) ids.push_back(loan->device().id());
    return ids;
  }

  const bucket::testing::Sample sample_ =
      bucket::testing::sample_of({{"a", DType::kBF16, Shape{1024, 1024}},
                                  {"b", DType::kF32, Shape{33, 77}},
                                  {"none", DType::kF32, Shape{0, 4}},
                                  {"scalar", DType::kI64, Shape{}},
                                  {"c", DType::kU8, Shape{3, 70'001}}},
                                 11, kMiB);
  std::vector<bucket::NamedBox> wanted_;
  bool verify_upload_ = false;
  const std::vector<std::shared_ptr<bucket::Device>> doubles_{
      bucket::make_double_device("double:0", kDoubleBytes),
      bucket::make_double_device("double:1", kDoubleBytes),
      bucket::make_double_device("double:2", kDoubleBytes)};
  bool reaches_peers_ = true;
  std::atomic<bool> helpers_broken_ = false;
  // Of device 1.
  std::vector<bucket::testing::UploadFlip> flips_;
  const std::vector<Devices::One> all_{{"double:0", "double:0", kDoubleBytes},
                                       {"double:1", "double:1", kDoubleBytes},
                                       {"double:2", "double:2", kDoubleBytes}};
  Devices devices_{
      all_, [this](const Devices::One& one) -> Result<std::unique_ptr<bucket::Device>> {
        const auto index = static_cast<std::size_t>(one.id.back() - '0');
        if (!reaches_peers_) return std::make_unique<WithoutPeers>(*doubles_[index]);
        auto device = std::make_unique<FlippingDevice>(
            *doubles_[index], index == 1 ? flips_ : std::vector<bucket::testing::UploadFlip>());
        if (index == 0) return device;
        return std::make_unique<Breaking>(std::move(device), helpers_broken_);
      }};
  DeviceLoans loans_;
  bucket::Pinner pinner_{*doubles_[0], 2};
  SegmentCache cache_{pinner_};
};

TEST_F(HelpedSessionTest, ThreeLinksCarryEqualPartsOfEveryBucket) {
  open_all();
  const auto end = run_session();
  const std::uint64_t total = sample_.contents().total_bytes();
  EXPECT_EQ(end.bytes, total);
  EXPECT_GT(end.helped_bytes, total * 6 / 10);
  EXPECT_LE(end.helped_bytes, total * 7 / 10);
  for (const std::size_t device : {0u, 1u, 2u}) EXPECT_EQ(used(device), 0u) << device;
  EXPECT_EQ(lent(), (std::vector<std::string>{"double:0", "double:1", "double:2"}));
}

TEST_F(HelpedSessionTest, RowsAndColumnsOfAShardComeRight) {
  open_all();
  wanted_ = {{"a", {3, 500}, {1000, 511}}, {"c", {1, 7}, {2, 69'000}}};
  EXPECT_GT(run_session().helped_bytes, 0u);
}

TEST_F(HelpedSessionTest, DevicesThatAreNotOpenOrHaveASessionDoNotHelp) {
  ASSERT_TRUE(devices_.open("double:1"));
  const auto use = loans_.use("double:1");
  EXPECT_EQ(run_session().helped_bytes, 0u);
}

TEST_F(HelpedSessionTest, ADeviceWithoutRoomDoesNotHelp) {
  open_all();
  std::vector<std::unique_ptr<bucket::Memory>> full;
  for (const std::size_t device : {1u, 2u}) {
    full.push_back(*doubles_[device]->allocate(kDoubleBytes - kKiB));
  }
  EXPECT_EQ(run_session().helped_bytes, 0u);
}

class OneHelperTest : public HelpedSessionTest {
 protected:
  OneHelperTest() : HelpedSessionTest(1) {}
};

TEST_F(OneHelperTest, ADeviceWithoutRoomTakesNoPlaceOfAnother) {
  open_all();
  const auto full = *doubles_[1]->allocate(kDoubleBytes - kKiB);
  EXPECT_GT(run_session().helped_bytes, 0u);
}

TEST_F(HelpedSessionTest, ADeviceWithoutAFastLinkDoesNotHelp) {
  reaches_peers_ = false;
  open_all();
  EXPECT_EQ(run_session().helped_bytes, 0u);
}

TEST_F(HelpedSessionTest, AHelperWhoseOwnSessionBeginsStopsAndIsFree) {
  open_all();
  auto begun = begin();
  const auto first = begun.worker->next();
  ASSERT_TRUE(first);
  begun.worker->read(*first);
  EXPECT_GT(used(1), 0u);
  // The worker holds every slot up: nothing but the use wakes the session.
  const auto use = loans_.use("double:1");
  EXPECT_TRUE(eventually_free(1));
  EXPECT_GT(used(2), 0u) << "the other one helps on";
  begun.worker->release(*first);
  begun.worker->take_all();
  EXPECT_EQ(begun.worker->compare(sample_), "");
  begun.worker->close();
  const auto end = begun.wait();
  EXPECT_FALSE(end.error) << end.error->message();
  EXPECT_LT(end.helped_bytes, sample_.contents().total_bytes() * 6 / 10);
}

TEST_F(HelpedSessionTest, TwoSessionsThatBeginOnEachOthersDevicesGoOnAlone) {
  open_all();
  auto first = begin(0);
  auto second = begin(1);
  first.take_all();
  second.take_all();
  for (auto* const one : {&first, &second}) {
    const auto end = one->wait();
    EXPECT_FALSE(end.error) << end.error->message();
    one->taken.get();
    EXPECT_EQ(one->worker->compare(sample_), "");
  }
}

// By a call that queues work, and by the question whether the work went well.
class FailingHelperTest : public HelpedSessionTest,
                          public ::testing::WithParamInterface<const char*> {};

TEST_P(FailingHelperTest, EndsOnlyItsHelp) {
  open_all();
  ASSERT_TRUE(arm_failpoints(GetParam()));
  const auto end = run_session();
  EXPECT_EQ(end.bytes, sample_.contents().total_bytes());
  EXPECT_LT(end.helped_bytes, sample_.contents().total_bytes() * 6 / 10);
  for (const std::size_t device : {0u, 1u, 2u}) EXPECT_EQ(used(device), 0u) << device;
  EXPECT_FALSE(end.helper_lost) << "its device works";
  EXPECT_EQ(lent().size(), 2u) << "a helper that failed is not borrowed again";
}
INSTANTIATE_TEST_SUITE_P(Points, FailingHelperTest,
                         ::testing::Values("device.help=error:EIO@1", "device.help=error:EIO@20",
                                           "device.helped=error:EIO@1",
                                           "device.helped=error:EIO@20"));

TEST_F(HelpedSessionTest, AHelperWhoseContextBreaksIsTold) {
  open_all();
  auto begun = begin();
  const auto first = begun.worker->next();
  ASSERT_TRUE(first);
  begun.worker->read(*first);
  helpers_broken_ = true;
  ASSERT_TRUE(arm_failpoints("device.help=error:EIO@1"));
  begun.worker->release(*first);
  begun.worker->take_all();
  EXPECT_TRUE(begun.worker->finished());
  begun.worker->close();
  const auto end = begun.wait();
  EXPECT_FALSE(end.error);
  ASSERT_TRUE(end.helper_lost);
  EXPECT_THAT(end.helper_lost->message(), ::testing::HasSubstr("illegal address"));
}

TEST_F(HelpedSessionTest, AFailingHelperOfAVerifiedSessionEndsOnlyItsHelp) {
  open_all();
  verify_upload_ = true;
  ASSERT_TRUE(arm_failpoints("device.help=error:EIO@20"));
  const auto end = run_session();
  EXPECT_GT(end.helped_bytes, 0u);
}

TEST_F(HelpedSessionTest, BytesThatAHelperSpoilsAreVerifiedAndComeByTheOwnLink) {
  verify_upload_ = true;
  flips_ = {{.bucket = 2, .offset = 5, .times = 1}};
  open_all();
  const auto end = run_session();
  EXPECT_EQ(end.refilled, 1u);
  EXPECT_GT(end.helped_bytes, 0u);
}

TEST_F(HelpedSessionTest, AWorkerThatGoesMidwayFreesAllDevices) {
  open_all();
  auto begun = begin();
  ASSERT_TRUE(begun.worker->next());
  begun.worker->close();
  const auto end = begun.wait();
  ASSERT_TRUE(end.error);
  EXPECT_EQ(end.error->code(), ErrorCode::kPeerLost);
  EXPECT_FALSE(end.device_lost);
  for (const std::size_t device : {0u, 1u, 2u}) EXPECT_EQ(used(device), 0u) << device;
  EXPECT_EQ(lent().size(), 3u);
}

TEST(DeviceLoans, LendsEachIdleDeviceOnce) {
  Devices devices({{"double:0", "", kMiB}, {"double:1", "", kMiB}, {"double:2", "", kMiB}},
                  [](const Devices::One& one) -> Result<std::unique_ptr<bucket::Device>> {
                    return bucket::make_double_device(one.id, one.total_bytes);
                  });
  for (const auto& one : devices.all()) ASSERT_TRUE(devices.open(one.id));
  DeviceLoans loans(devices, 1);
  int wanted = 0;
  auto lent = loans.borrow("double:0", [&] { ++wanted; });
  ASSERT_EQ(lent.size(), 2u);
  EXPECT_EQ(lent[0]->device().id(), "double:1");
  EXPECT_EQ(lent[1]->device().id(), "double:2");
  EXPECT_TRUE(loans.borrow("double:0", [] {}).empty());
  auto use = loans.use("double:1");
  EXPECT_EQ(wanted, 1);
  EXPECT_TRUE(lent[0]->wanted_back());
  EXPECT_FALSE(lent[1]->wanted_back());
  lent.erase(lent.begin());
  EXPECT_TRUE(loans.borrow("double:0", [] {}).empty()) << "its session goes on";
  use.reset();
  auto again = loans.borrow("double:0", [] {});
  ASSERT_EQ(again.size(), 1u);
  again[0]->condemn();
  again.clear();
  EXPECT_TRUE(loans.borrow("double:0", [] {}).empty());
  EXPECT_TRUE(DeviceLoans(devices, 0).borrow("double:0", [] {}).empty());
}

TEST(GpuOptions, HelpersAreAutoNoneOrACount) {
  EXPECT_EQ(*parse_helpers("auto"), GpuOptions::kAutoHelpers);
  EXPECT_EQ(*parse_helpers("none"), 0u);
  EXPECT_EQ(*parse_helpers("7"), 7u);
  for (const char* wrong : {"", "all", "-1", "16", "3x"})
    EXPECT_FALSE(parse_helpers(wrong)) << wrong;
}

}  // namespace
}  // namespace rekindle::device
