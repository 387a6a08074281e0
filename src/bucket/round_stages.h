#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "src/bucket/device.h"
#include "src/bucket/pipeline.h"
#include "src/bucket/round_plan.h"
#include "src/bucket/segment_fetch.h"

// The stages of the pipeline in a broadcast round: a rank uploads its share of each bucket, the
// owners spread the bucket, and a rank whose round ended early reads the rest from its segments.
namespace rekindle::bucket {

// The addition of an owner to each bucket of its share.
class ShareSeal {
 public:
  virtual ~ShareSeal() = default;
  // Adds to the share's bucket at `to`, beside its parts.
  virtual Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) = 0;
};

// One rank's uploads into its share of each bucket, in order; without a share, nothing.
class RoundFetch final : public Fetch {
 public:
  struct Own {
    std::uint32_t share = 0;
    // Of plan_of(share).
    SegmentFetch& fetch;
    // May be null.
    ShareSeal* seal = nullptr;
  };
  RoundFetch(const RoundPlan& plan, std::optional<Own> own) : plan_(plan), own_(own) {}

  std::optional<std::size_t> next() override;
  Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) override;

 private:
  const RoundPlan& plan_;
  const std::optional<Own> own_;
  std::size_t next_ = 0;
};

// Spreads each bucket's shares from their owners.
class RoundSpread final : public Spread {
 public:
  struct Patience {
    // For the peers to queue their part of a bucket; then kTimeout.
    std::chrono::milliseconds peers{5000};
    // Called while it waits. True: kStale.
    std::function<bool()> stop;
  };
  RoundSpread(Collective& collective, std::uint64_t share_bytes, std::vector<std::uint32_t> owners,
              Patience patience);

  Result<void> enqueue(std::size_t bucket, DeviceAddress at, Stream& stream) override;
  Result<void> check() override;

 private:
  Collective& collective_;
  const std::uint64_t share_bytes_;
  const std::vector<std::uint32_t> owners_;
  const Patience patience_;
};

// What a round has not brought, from the segments alone, in the order in which it arrives: the
// remaining buckets of each share, if the round has ended early, and the pieces without a share.
class RoundTail final : public Fetch {
 public:
  // Of each share's plan, then of RoundPlan::rest(), if there is one.
  using Fetches = std::vector<std::unique_ptr<SegmentFetch>>;
  // Buckets of the round before `first` were delivered. Both outlive this.
  RoundTail(const RoundPlan& plan, Fetches& fetches, std::size_t first);

  std::size_t size() const { return size_; }
  std::optional<std::size_t> next() override;
  Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) override;
  // Of a bucket that next() has returned.
  std::vector<Part> parts(std::size_t index) const;

 private:
  const Plan& plan_of(std::uint32_t fetch) const {
    return fetch < plan_.shares() ? plan_.plan_of(fetch) : *plan_.rest();
  }

  const RoundPlan& plan_;
  Fetches& fetches_;
  std::size_t size_ = 0;
  // The fetch and its bucket.
  std::vector<std::pair<std::uint32_t, std::size_t>> given_;
};

}  // namespace rekindle::bucket
