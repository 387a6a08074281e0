// What a GPU gets from host memory is verified there.
#include "src/bucket/upload_verify.h"

#include <stdexcept>
#include <thread>

#include "src/base/clock.h"
#include "tests/bucket/piece_consumer.h"
#include "tests/bucket/sample.h"
#include "tests/cuda/gpu_test.h"
#include "tests/support/must.h"

namespace rekindle::cuda::testing {
namespace {

using namespace std::chrono_literals;
using bucket::DeviceAddress;
using bucket::Plan;
using bucket::Stream;
using bucket::testing::PieceConsumer;

// Uploads, and then overwrites the 78th byte of one bucket, as often as it is told.
class Spoils final : public bucket::Fetch {
 public:
  Spoils(bucket::SegmentFetch& inner, const Plan& plan, const bucket::testing::Sample& sample,
         std::size_t bucket, int times)
      : inner_(inner), bucket_(bucket), times_(times) {
    const bucket::SegmentCopy copy = plan.copies(bucket).front();
    wrong_ = std::byte(sample.segments[copy.segment][copy.from + kByte]) ^ std::byte{1};
    at_ = copy.at + kByte;
  }
  std::optional<std::size_t> next() override { return inner_.next(); }
  Result<void> enqueue(std::size_t index, DeviceAddress to, Stream& stream) override {
    TRY_VOID(inner_.enqueue(index, to, stream));
    if (index != bucket_ || times_-- <= 0) return {};
    const bucket::Upload one{.from = &wrong_, .to = to + at_, .run_bytes = 1};
    return stream.upload({&one, 1});
  }

 private:
  static constexpr std::uint64_t kByte = 77;
  bucket::SegmentFetch& inner_;
  const std::size_t bucket_;
  int times_;
  std::byte wrong_{};
  std::uint64_t at_ = 0;
};

class GpuUploadVerify : public GpuTest {
 protected:
  // One bucket's upload is wrong so many times. 'a' is cut through its tiles, 'b' is not.
  void run(int times) {
    const auto device = must(open_device(driver_, 0));
    const auto contents = sample_.contents({{"a", {0, 0}, {2000, 1000}}, {"b", {}, {}}});
    const auto plan = must(Plan::create(contents, 1 << 20));
    ASSERT_GT(plan.size(), 3u);
    bucket::Pinner pinner(*device, 1);
    bucket::SegmentFetch::Segments segments;
    const auto files = sample_.files();
    for (std::size_t i = 0; i < files.size(); ++i) {
      segments.push_back(must(pinner.add(files[i].get(), sample_.segment_bytes[i])));
    }
    auto slots =
        must(bucket::allocate_slots(*device, {.bucket_bytes = 1 << 20, .slots = 3}, 4ull << 20));
    const auto stream = must(device->make_stream());
    PieceConsumer consumer(plan, slots, contents, stream.get());
    bucket::SegmentFetch uploads(plan, pinner, segments, contents.tiles().tile_count());
    uploads.mark_all_ready();
    Spoils fetch(uploads, plan, sample_, 1, times);
    const auto leaves = sample_.leaves();
    const auto verify = must(
        bucket::UploadVerify::create({*device, fetch, contents, leaves, segments}, slots.count(),
                                     plan.most_tiles(), [&plan](std::size_t index) {
                                       const auto parts = plan.parts(index);
                                       return std::vector<bucket::Part>(parts.begin(), parts.end());
                                     }));
    bucket::Pipeline pipeline(*device, plan, slots, fetch, nullptr, consumer, {60s, 60s});
    must(pipeline.verify_with(*verify));
    must(pipeline.start());
    while (must(pipeline.step(steady_now())) != bucket::Pipeline::State::kDone) {
      std::this_thread::sleep_for(50us);
    }
    EXPECT_EQ(verify->refilled(), times > 0 ? 1u : 0u);
    ASSERT_EQ(consumer.spoiled.size(), times > 1 ? 1u : 0u);
    if (times > 1) {
      const std::string text = consumer.spoiled.front().second.message();
      EXPECT_NE(text.find(device->id()), std::string::npos) << text;
      EXPECT_NE(text.find("tensor '"), std::string::npos) << text;
      return;
    }
    for (std::size_t i = 0; i < contents.pieces().size(); ++i) {
      EXPECT_EQ(consumer.pieces[i], sample_.bytes_of(contents, contents.pieces()[i]));
    }
  }

  const bucket::testing::Sample sample_ = bucket::testing::sample_of(
      {{"a", DType::kBF16, Shape{2000, 1024}}, {"b", DType::kF32, Shape{333, 77}}}, 7);
};

TEST_F(GpuUploadVerify, RightBytesPass) { run(0); }
TEST_F(GpuUploadVerify, AWrongByteIsUploadedAgain) { run(1); }
TEST_F(GpuUploadVerify, WrongTwiceTheErrorNamesGpuAndTensor) { run(2); }

}  // namespace
}  // namespace rekindle::cuda::testing
