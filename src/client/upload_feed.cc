#include "src/client/upload_feed.h"

#include <utility>

#include "src/base/worker_pool.h"

namespace rekindle::client {

namespace {

constexpr unsigned kPinThreads = 2;
// Nothing reports that memory was pinned, so poll() looks for it.
constexpr Duration kPinPatience = std::chrono::milliseconds(5);
// The consumer is this process itself, and may take as long as it likes.
constexpr std::chrono::hours kForEver{24 * 365};

}  // namespace

// Parents first: nothing is freed that the pipeline's streams may still use.
struct UploadFeed::Works {
  bucket::Slots slots;
  // Per slot: behind the consumer's reads.
  std::vector<std::unique_ptr<bucket::Event>> released;
  std::vector<bool> given_back;
  bucket::Plan plan;
  std::unique_ptr<bucket::Pinner> pinner;
  std::unique_ptr<bucket::SegmentFetch> fetch;
  std::unique_ptr<bucket::Pipeline> pipeline;
};

Result<std::unique_ptr<UploadFeed>> UploadFeed::create(bucket::Device& device,
                                                       bucket::Stream& stream,
                                                       const bucket::Contents& contents,
                                                       const Segments& segments,
                                                       std::uint64_t bucket_bytes) {
  std::unique_ptr<UploadFeed> feed(new UploadFeed(device, stream));
  const SignalsBlocked blocked;
  TRY_VOID(feed->begin(contents, segments, bucket_bytes));
  return feed;
}

UploadFeed::UploadFeed(bucket::Device& device, bucket::Stream& stream)
    : device_(device), stream_(stream) {}

UploadFeed::~UploadFeed() = default;

Result<void> UploadFeed::begin(const bucket::Contents& contents, const Segments& segments,
                               std::uint64_t bucket_bytes) {
  if (contents.pieces().empty()) return {};
  bucket::SlotOptions options;
  if (bucket_bytes > 0) options.bucket_bytes = bucket_bytes;
  auto works = std::make_unique<Works>();
  TRY(works->slots, bucket::allocate_slots(device_, options, contents.total_bytes()));
  TRY_VOID(bucket::make_events(device_, works->slots.count(), works->released));
  works->given_back.resize(works->slots.count());
  TRY(works->plan, bucket::Plan::create(contents, works->slots.bucket_bytes));
  works->pinner = std::make_unique<bucket::Pinner>(device_, kPinThreads);
  bucket::SegmentFetch::Segments pinned;
  for (std::size_t i = 0; i < segments.files.size(); ++i) {
    TRY(auto segment, works->pinner->add(segments.files[i].get(), segments.bytes[i]));
    pinned.push_back(std::move(segment));
  }
  works->fetch = std::make_unique<bucket::SegmentFetch>(
      works->plan, *works->pinner, std::move(pinned), contents.tiles().tile_count());
  bucket::Deliver& to_us = *this;
  works->pipeline = std::make_unique<bucket::Pipeline>(
      device_, works->plan, works->slots, *works->fetch, nullptr, to_us,
      bucket::PipelineOptions{.release_deadline = kForEver});
  TRY_VOID(works->pipeline->start());
  works_ = std::move(works);
  return {};
}

Result<void> UploadFeed::mark_ready(const VerifiedTiles& tiles) {
  if (works_ == nullptr) return {};
  if (tiles.all) works_->fetch->mark_all_ready();
  return works_->fetch->mark_ready(tiles.ready);
}

Result<std::optional<FilledBucket>> UploadFeed::poll(TimePoint now) {
  if (works_ == nullptr) return std::nullopt;
  TRY(const auto state, works_->pipeline->step(now));
  if (state == bucket::Pipeline::State::kDone) {
    works_.reset();
    return std::nullopt;
  }
  if (filling_.empty()) return std::nullopt;
  const auto [index, slot] = filling_.front();
  bucket::Event& filled = *works_->slots.filled[slot];
  TRY(const bool done, device_.is_done(filled));
  if (!done) return std::nullopt;
  TRY_VOID(stream_.wait(filled));
  filling_.pop_front();
  current_ = slot;
  const auto parts = works_->plan.parts(index);
  return FilledBucket{
      works_->slots.at(slot), works_->slots.bucket_bytes, {parts.begin(), parts.end()}};
}

Result<void> UploadFeed::give_back() {
  TRY_VOID(stream_.record(*works_->released[current_]));
  works_->given_back[current_] = true;
  return {};
}

Result<void> UploadFeed::hand_over(std::size_t bucket, std::uint32_t slot) {
  filling_.push_back({bucket, slot});
  ++unreleased_;
  return {};
}

Result<bool> UploadFeed::released(std::uint32_t slot) {
  if (!works_->given_back[slot]) return false;
  TRY(const bool done, device_.is_done(*works_->released[slot]));
  if (!done) return false;
  works_->given_back[slot] = false;
  --unreleased_;
  return true;
}

Duration UploadFeed::patience() const { return unreleased_ > 0 ? kEventPatience : kPinPatience; }

}  // namespace rekindle::client
