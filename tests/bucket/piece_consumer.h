#pragma once

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "src/bucket/pipeline.h"

namespace rekindle::bucket::testing {

// Takes the bytes of each piece when its bucket is handed over, and notes the spoiled buckets.
class PieceConsumer final : public Deliver {
 public:
  // `plan` is a Plan or a RoundPlan. `stream` copies from the device; null: the device is a double,
  // whose memory is the host's. All outlive the consumer.
  template <typename AnyPlan>
  PieceConsumer(const AnyPlan& plan, const Slots& slots, const Contents& contents,
                Stream* stream = nullptr)
      : slots_(slots), stream_(stream) {
    for (const Piece& piece : contents.pieces()) pieces.emplace_back(piece.bytes, '\0');
    parts_of_ = [&plan](std::size_t bucket) {
      const auto parts = plan.parts(bucket);
      return std::vector<Part>(parts.begin(), parts.end());
    };
  }
  Result<void> hand_over(std::size_t bucket, std::uint32_t slot) override {
    std::vector<Download> copies;
    for (const Part& part : parts_of_(bucket)) {
      char* const to = pieces[part.piece].data() + part.offset_bytes;
      const DeviceAddress from = slots_.at(slot) + part.at;
      if (stream_ == nullptr) {
        std::memcpy(to, reinterpret_cast<const char*>(from), part.bytes);
      } else {
        copies.push_back(
            {.from = from, .to = reinterpret_cast<std::byte*>(to), .bytes = part.bytes});
      }
    }
    if (stream_ == nullptr) return {};
    TRY_VOID(stream_->download(copies));
    return stream_->finish(SteadyClock().now() + std::chrono::seconds(20));
  }
  Result<bool> released(std::uint32_t) override { return true; }
  Result<void> spoil(std::size_t bucket, Error why) override {
    spoiled.emplace_back(bucket, std::move(why));
    return {};
  }

  std::vector<std::string> pieces;
  std::vector<std::pair<std::size_t, Error>> spoiled;  // with their buckets

 private:
  const Slots& slots_;
  Stream* const stream_;
  std::function<std::vector<Part>(std::size_t)> parts_of_;
};

}  // namespace rekindle::bucket::testing
