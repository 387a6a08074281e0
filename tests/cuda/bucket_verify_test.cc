// What a GPU gets, from host memory or by a round, is verified there.
#include "src/bucket/bucket_verify.h"

#include <optional>
#include <stdexcept>
#include <thread>

#include "src/base/blake3.h"
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
using bucket::RoundPlan;
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

// Brings what an owner of everything would send, and one wrong byte.
class Brings final : public bucket::Spread {
 public:
  Brings(const RoundPlan& plan, const bucket::testing::Sample& sample,
         const bucket::Contents& contents, std::size_t wrong_bucket)
      : wrong_bucket_(wrong_bucket) {
    std::vector<const std::byte*> segments;
    for (const auto& segment : sample.segments) {
      segments.push_back(reinterpret_cast<const std::byte*>(segment.data()));
    }
    for (std::size_t index = 0; index < plan.size(); ++index) {
      std::string bytes(plan.bucket_bytes(), '!');
      for (const bucket::Part& part : plan.parts(index)) {
        bytes.replace(part.at, part.bytes, sample.bytes_of(contents, contents.pieces()[part.piece]),
                      part.offset_bytes, part.bytes);
      }
      const auto checks = bucket::checks_of(contents, plan.plan_of(0).parts(index));
      std::string rests;
      for (const auto& rest : checks.rests) {
        rests += bucket::digest_of_rest(contents, rest, segments).to_bytes();
      }
      bytes.replace(plan.seal_at(), sizeof(Digest), blake3(as_bytes(rests)).to_bytes());
      if (index == wrong_bucket_) bytes[77] = static_cast<char>(bytes[77] ^ 1);
      buckets_.push_back(std::move(bytes));
    }
  }
  Result<void> enqueue(std::size_t index, DeviceAddress at, Stream& stream) override {
    const std::string& bytes = buckets_[index];
    const bucket::Upload upload{.from = reinterpret_cast<const std::byte*>(bytes.data()),
                                .to = at,
                                .run_bytes = bytes.size()};
    return stream.upload({&upload, 1});
  }
  Result<void> check() override { return {}; }

 private:
  const std::size_t wrong_bucket_;
  std::vector<std::string> buckets_;
};

// A pipeline of one GPU, which verifies. 'a' is cut through its tiles, 'b' is not.
class GpuVerify : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    device_ = must(open_device(driver_, 0));
    pinner_.emplace(*device_, 1);
    const auto files = sample_.files();
    for (std::size_t i = 0; i < files.size(); ++i) {
      segments_.push_back(must(pinner_->add(files[i].get(), sample_.segment_bytes[i])));
    }
    slots_ =
        must(bucket::allocate_slots(*device_, {.bucket_bytes = 1 << 20, .slots = 3}, 4ull << 20));
    stream_ = must(device_->make_stream());
  }

  // The error names GPU and tensor when bytes are wrong for good.
  template <typename Plans>
  void run(const Plans& plan, bucket::Fetch& fetch, bucket::Spread* spread,
           bucket::SlotVerify& verify, std::uint64_t refilled, bool spoiled) {
    PieceConsumer consumer(plan, slots_, contents_, stream_.get());
    bucket::Pipeline pipeline(*device_, plan.size(), slots_, fetch, spread, consumer, {60s, 60s});
    must(pipeline.verify_with(verify));
    must(pipeline.start());
    while (must(pipeline.step(steady_now())) != bucket::Pipeline::State::kDone) {
      std::this_thread::sleep_for(50us);
    }
    EXPECT_EQ(verify.refilled(), refilled);
    ASSERT_EQ(consumer.spoiled.size(), spoiled ? 1u : 0u);
    if (spoiled) {
      const std::string text = consumer.spoiled.front().second.message();
      EXPECT_NE(text.find(device_->id()), std::string::npos) << text;
      EXPECT_NE(text.find("tensor '"), std::string::npos) << text;
      return;
    }
    for (std::size_t i = 0; i < contents_.pieces().size(); ++i) {
      EXPECT_EQ(consumer.pieces[i], sample_.bytes_of(contents_, contents_.pieces()[i]));
    }
  }

  // One bucket's upload is wrong so many times.
  void run_upload(int times) {
    const auto plan = must(Plan::create(contents_, 1 << 20));
    ASSERT_GT(plan.size(), 3u);
    bucket::SegmentFetch uploads(plan, *pinner_, segments_, contents_.tiles().tile_count());
    uploads.mark_all_ready();
    Spoils fetch(uploads, plan, sample_, 1, times);
    const auto verify = must(
        bucket::UploadVerify::create({*device_, fetch, contents_, leaves_, segments_},
                                     slots_.count(), plan.most_tiles(), [&plan](std::size_t index) {
                                       const auto parts = plan.parts(index);
                                       return std::vector<bucket::Part>(parts.begin(), parts.end());
                                     }));
    run(plan, fetch, nullptr, *verify, times > 0 ? 1 : 0, times > 1);
  }

  // A round of one rank; the host's copy is right, or there is none.
  void run_round(bool with_copy) {
    const std::vector<std::uint32_t> share_of(contents_.pieces().size(), 0);
    const auto plan = must(RoundPlan::create(contents_, share_of, 1, 1 << 20, bucket::kSealRoom));
    ASSERT_GT(plan.size(), 3u);
    Brings spread(plan, sample_, contents_, 1);
    bucket::RoundFetch fetch(plan, std::nullopt);
    const auto verify = must(bucket::RoundVerify::create(
        {*device_, plan, contents_, leaves_}, slots_.count(),
        [&]() -> Result<bucket::RoundTail::Fetches> {
          bucket::RoundTail::Fetches all;
          all.push_back(std::make_unique<bucket::SegmentFetch>(plan.plan_of(0), *pinner_, segments_,
                                                               contents_.tiles().tile_count()));
          if (with_copy) all.back()->mark_all_ready();
          return all;
        }));
    run(plan, fetch, &spread, *verify, with_copy ? 1 : 0, !with_copy);
  }

  const bucket::testing::Sample sample_ = bucket::testing::sample_of(
      {{"a", DType::kBF16, Shape{2000, 1024}}, {"b", DType::kF32, Shape{333, 77}}}, 7);
  const bucket::Contents contents_ = sample_.contents({{"a", {0, 0}, {2000, 1000}}, {"b", {}, {}}});
  const std::vector<Digest> leaves_ = sample_.leaves();
  std::unique_ptr<bucket::Device> device_;
  std::optional<bucket::Pinner> pinner_;
  bucket::SegmentFetch::Segments segments_;
  bucket::Slots slots_;
  std::unique_ptr<Stream> stream_;
};

TEST_F(GpuVerify, RightBytesOfAnUploadPass) { run_upload(0); }
TEST_F(GpuVerify, AWrongByteIsUploadedAgain) { run_upload(1); }
TEST_F(GpuVerify, WrongTwiceTheErrorNamesGpuAndTensor) { run_upload(2); }
TEST_F(GpuVerify, B7AWrongByteOfARoundComesAgainFromTheHost) { run_round(true); }
TEST_F(GpuVerify, B7WithoutACopyTheErrorNamesGpuAndTensor) { run_round(false); }

}  // namespace
}  // namespace rekindle::cuda::testing
