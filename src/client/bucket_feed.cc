#include "src/client/bucket_feed.h"

#include <algorithm>
#include <span>
#include <utility>

namespace rekindle::client {

namespace {

std::uint64_t used_bytes(const FilledBucket& bucket) {
  std::uint64_t end = 0;
  for (const bucket::Part& part : bucket.parts) end = std::max(end, part.at + part.bytes);
  return std::min(end, bucket.bytes);
}

}  // namespace

Result<bool> BucketStash::put(const FilledBucket& bucket) {
  FilledBucket kept = bucket;
  kept.bytes = std::max<std::uint64_t>(used_bytes(bucket), 1);
  auto memory = device_.allocate(kept.bytes);
  if (!memory && memory.error().code() == ErrorCode::kExhausted) return false;
  if (!memory) return fail(std::move(memory).error());
  kept.at = (*memory)->address();
  TRY(auto moved, device_.make_event());
  // Reserved before the device writes, so that the memory is never lost.
  memory_.reserve(memory_.size() + 1);
  const bucket::Move move{bucket.at, kept.at, used_bytes(bucket)};
  if (move.bytes > 0) TRY_VOID(stream_.move({&move, 1}));
  memory_.push_back(std::move(*memory));
  TRY_VOID(stream_.record(*moved));
  bytes_ += kept.bytes;
  waiting_.push_back({std::move(kept), std::move(moved)});
  return true;
}

Result<std::optional<FilledBucket>> BucketStash::take() {
  TRY(const bool moved, device_.is_done(*waiting_.front().moved));
  if (!moved) return std::nullopt;
  FilledBucket oldest = std::move(waiting_.front().bucket);
  waiting_.pop_front();
  return oldest;
}

Result<void> BucketStash::give_back() {
  if (!waiting_.empty()) return {};
  TRY(read_, device_.make_event());
  return stream_.record(*read_);
}

Result<bool> BucketStash::let_go() {
  if (memory_.empty()) return true;
  if (!waiting_.empty() || read_ == nullptr) return false;
  TRY(const bool done, device_.is_done(*read_));
  if (!done) return false;
  memory_.clear();
  read_.reset();
  bytes_ = 0;
  return true;
}

void BucketStash::leak() {
  for (auto& memory : memory_) (void)memory.release();
  (void)read_.release();
}

}  // namespace rekindle::client
