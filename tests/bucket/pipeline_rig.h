#pragma once

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/clock.h"
#include "src/bucket/double_device.h"
#include "src/bucket/pipeline.h"
#include "src/bucket/segment_fetch.h"
#include "tests/bucket/sample.h"

// A double device with a pipeline and a consumer in the same process.
namespace rekindle::bucket::testing {

inline constexpr std::uint64_t kDeviceBytes = 64ull << 20;

// A consumer in the same process: copies a slot out on a stream of its own, behind the event of its
// filling, and gives it back when `willing`.
class Consumer final : public Deliver {
 public:
  Consumer(Device& device, Slots& slots, const Plan& plan)
      : slots_(slots), plan_(plan), device_(device), stream_(*device.make_stream()) {
    for (std::uint32_t i = 0; i < slots.count(); ++i) read_.push_back(*device.make_event());
    held_.resize(slots.count());
  }

  Result<void> hand_over(std::size_t bucket, std::uint32_t slot) override {
    EXPECT_FALSE(held_[slot]) << "a slot was filled that the consumer still has";
    held_[slot] = true;
    most_held =
        std::max(most_held, static_cast<std::size_t>(std::count(held_.begin(), held_.end(), true)));
    TRY_VOID(stream_->wait(*slots_.filled[slot]));
    std::vector<Download> copies;
    for (const Part& part : plan_.parts(bucket)) {
      std::string& piece = pieces[part.piece];
      if (piece.empty()) piece.resize(sizes.at(part.piece));
      copies.push_back({slots_.at(slot) + part.at,
                        reinterpret_cast<std::byte*>(piece.data()) + part.offset_bytes,
                        part.bytes});
    }
    TRY_VOID(stream_->download(copies));
    return stream_->record(*read_[slot]);
  }

  Result<bool> released(std::uint32_t slot) override {
    if (!willing) return false;
    TRY(const bool done, device_.is_done(*read_[slot]));
    if (done) held_[slot] = false;
    return done;
  }

  std::map<std::uint32_t, std::string> pieces;
  std::vector<std::uint64_t> sizes;  // of all pieces
  bool willing = true;
  std::size_t most_held = 0;

 private:
  Slots& slots_;
  const Plan& plan_;
  Device& device_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::unique_ptr<Event>> read_;
  std::vector<bool> held_;
};

struct Rig {
  Rig(const Sample& from, const std::vector<NamedBox>& wanted, SlotOptions options,
      Spread* spread = nullptr, PipelineOptions pipeline_options = {})
      : sample(from),
        device(make_double_device("double:0", kDeviceBytes)),
        contents(sample.contents(wanted)),
        slots(*allocate_slots(*device, options, contents.total_bytes())),
        plan(*Plan::create(contents, slots.bucket_bytes)),
        pinner(*device, 2),
        fetch(plan, pinner, segments(), contents.tiles().tile_count()),
        consumer(*device, slots, plan),
        pipeline(*device, plan, slots, fetch, spread, consumer, pipeline_options) {
    for (const Piece& piece : contents.pieces()) consumer.sizes.push_back(piece.bytes);
    EXPECT_TRUE(pipeline.start());
  }

  SegmentFetch::Segments segments() {
    SegmentFetch::Segments all;
    const auto files = sample.files();
    for (std::size_t i = 0; i < files.size(); ++i) {
      all.push_back(*pinner.add(files[i].get(), sample.segment_bytes[i]));
    }
    return all;
  }

  // Until it is in a state that only the test can end.
  Pipeline::State run(Pipeline::State until) {
    const TimePoint give_up = steady_now() + std::chrono::seconds(60);
    for (;;) {
      const auto state = pipeline.step(steady_now());
      if (!state) throw std::runtime_error(state.error().message());
      if (*state == until || *state == Pipeline::State::kDone) return *state;
      if (steady_now() > give_up) throw std::runtime_error("the pipeline stands still");
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  void expect_all_arrived() {
    ASSERT_TRUE(pipeline.drain(steady_now() + std::chrono::seconds(10)));
    for (std::uint32_t i = 0; i < contents.pieces().size(); ++i) {
      const Piece& piece = contents.pieces()[i];
      ASSERT_EQ(consumer.pieces[i], sample.bytes_of(contents, piece)) << piece.name();
    }
  }

  const Sample sample;
  std::unique_ptr<Device> device;
  Contents contents;
  Slots slots;
  Plan plan;
  Pinner pinner;
  SegmentFetch fetch;
  Consumer consumer;
  Pipeline pipeline;
};

}  // namespace rekindle::bucket::testing
