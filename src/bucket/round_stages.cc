#include "src/bucket/round_stages.h"

#include <algorithm>
#include <thread>

#include "src/base/clock.h"

namespace rekindle::bucket {

namespace {

constexpr std::chrono::microseconds kShortestNap{5};
constexpr std::chrono::microseconds kLongestNap{1'000};

}  // namespace

std::optional<std::size_t> RoundFetch::next() {
  if (next_ == plan_.size()) return std::nullopt;
  const bool uploads = own_ && next_ < plan_.plan_of(own_->share).size();
  if (uploads && !own_->fetch.take(next_)) return std::nullopt;
  return next_++;
}

Result<void> RoundFetch::enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) {
  if (!own_ || bucket >= plan_.plan_of(own_->share).size()) return {};
  const DeviceAddress share = to + own_->share * plan_.share_bytes();
  TRY_VOID(own_->fetch.enqueue(bucket, share, stream));
  if (own_->seal == nullptr) return {};
  return own_->seal->enqueue(bucket, share, stream);
}

RoundSpread::RoundSpread(Collective& collective, std::uint64_t share_bytes,
                         std::vector<std::uint32_t> owners, Patience patience)
    : collective_(collective),
      share_bytes_(share_bytes),
      owners_(std::move(owners)),
      patience_(std::move(patience)) {}

Result<void> RoundSpread::enqueue(std::size_t bucket, DeviceAddress at, Stream& stream) {
  TRY_VOID(collective_.spread(at, share_bytes_, owners_, stream));
  const TimePoint deadline = SteadyClock().now() + patience_.peers;
  for (std::chrono::microseconds nap = kShortestNap;; nap = std::min(2 * nap, kLongestNap)) {
    TRY(const bool settled, collective_.settled());
    if (settled) return {};
    if (patience_.stop && patience_.stop()) {
      return fail(ErrorCode::kStale, "bucket {} of a round was not spread: it is to stop", bucket);
    }
    if (SteadyClock().now() >= deadline) {
      return fail(ErrorCode::kTimeout,
                  "rank {} of {} waited {} ms for the others to spread bucket {} of a round",
                  collective_.rank(), collective_.ranks(), patience_.peers.count(), bucket);
    }
    std::this_thread::sleep_for(nap);
  }
}

Result<void> RoundSpread::check() {
  TRY(const bool settled, collective_.settled());
  if (settled) return {};
  return fail(ErrorCode::kInternal, "rank {} of {} spread a bucket that its peers know nothing of",
              collective_.rank(), collective_.ranks());
}

RoundTail::RoundTail(const RoundPlan& plan, Fetches& fetches, std::size_t first)
    : plan_(plan), fetches_(fetches) {
  for (std::uint32_t share = 0; share < plan.shares(); ++share) {
    fetches[share]->skip(first);
    size_ += plan.plan_of(share).size() - std::min(first, plan.plan_of(share).size());
  }
  if (plan.rest() != nullptr) size_ += plan.rest()->size();
}

std::optional<std::size_t> RoundTail::next() {
  for (std::uint32_t fetch = 0; fetch < fetches_.size(); ++fetch) {
    const auto bucket = fetches_[fetch]->next();
    if (!bucket) continue;
    given_.emplace_back(fetch, *bucket);
    return given_.size() - 1;
  }
  return std::nullopt;
}

Result<void> RoundTail::enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) {
  const auto& [fetch, of_fetch] = given_[bucket];
  return fetches_[fetch]->enqueue(of_fetch, to, stream);
}

std::vector<Part> RoundTail::parts(std::size_t index) const {
  const auto& [fetch, of_fetch] = given_[index];
  const auto parts = plan_of(fetch).parts(of_fetch);
  return {parts.begin(), parts.end()};
}

}  // namespace rekindle::bucket
