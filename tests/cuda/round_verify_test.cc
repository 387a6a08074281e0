// What a round brings to a GPU is verified there.
#include "src/bucket/round_verify.h"

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
using bucket::RoundPlan;
using bucket::Stream;
using bucket::testing::PieceConsumer;

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

class GpuRoundVerify : public GpuTest {
 protected:
  // A round of one rank; the host's copy is right, or there is none.
  void run(bool with_copy) {
    const auto device = must(open_device(driver_, 0));
    const auto contents = sample_.contents({{"a", {0, 0}, {2000, 1000}}, {"b", {}, {}}});
    const std::vector<std::uint32_t> share_of(contents.pieces().size(), 0);
    const auto plan = must(RoundPlan::create(contents, share_of, 1, 1 << 20, bucket::kSealRoom));
    ASSERT_GT(plan.size(), 3u);
    bucket::Pinner pinner(*device, 1);
    bucket::SegmentFetch::Segments segments;
    const auto files = sample_.files();
    for (std::size_t i = 0; i < files.size(); ++i) {
      segments.push_back(must(pinner.add(files[i].get(), sample_.segment_bytes[i])));
    }
    auto slots = must(bucket::allocate_slots(
        *device, {.bucket_bytes = plan.bucket_bytes(), .slots = 3}, 4 * plan.bucket_bytes()));
    const auto stream = must(device->make_stream());
    PieceConsumer consumer(plan, slots, contents, stream.get());
    Brings spread(plan, sample_, contents, 1);
    bucket::RoundFetch fetch(plan, std::nullopt);
    const auto leaves = sample_.leaves();
    const auto verify = must(bucket::RoundVerify::create(
        {*device, plan, contents, leaves}, slots.count(),
        [&]() -> Result<bucket::RoundTail::Fetches> {
          bucket::RoundTail::Fetches all;
          all.push_back(std::make_unique<bucket::SegmentFetch>(plan.plan_of(0), pinner, segments,
                                                               contents.tiles().tile_count()));
          if (with_copy) all.back()->mark_all_ready();
          return all;
        }));
    bucket::Pipeline pipeline(*device, plan.size(), slots, fetch, &spread, consumer, {60s, 60s});
    must(pipeline.verify_with(*verify));
    must(pipeline.start());
    while (must(pipeline.step(steady_now())) != bucket::Pipeline::State::kDone) {
      std::this_thread::sleep_for(50us);
    }
    EXPECT_EQ(verify->refilled(), with_copy ? 1u : 0u);
    ASSERT_EQ(consumer.spoiled.size(), with_copy ? 0u : 1u);
    if (!with_copy) {
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

TEST_F(GpuRoundVerify, B7AWrongByteComesAgainFromTheHost) { run(true); }
TEST_F(GpuRoundVerify, B7WithoutACopyTheErrorNamesGpuAndTensor) { run(false); }

}  // namespace
}  // namespace rekindle::cuda::testing
