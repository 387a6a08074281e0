#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/bucket/bucket_plan.h"
#include "src/bucket/pipeline.h"
#include "src/bucket/segment_fetch.h"

// Fills one device's buckets over the links of other devices as well. A helper uploads its part of
// a bucket to a staging buffer in its own memory and copies it to the bucket from there, over the
// fast link between the two. docs/internals/devices.md has the reasons.
namespace rekindle::bucket {

// A device whose link is idle. The destructor gives it back.
class Loan {
 public:
  virtual ~Loan() = default;
  virtual Device& device() const = 0;
  // Its owner needs the link: no further work may be queued.
  virtual bool wanted_back() const = 0;
  // The device has failed as a helper, so nobody borrows it again.
  virtual void condemn() = 0;
};

// The bytes of a bucket in [begin, end), as uploads to addresses that count from `begin`. The
// addresses of `copies` count from the start of the bucket. Appends to `out`.
void cut_uploads(std::span<const Upload> copies, std::uint64_t begin, std::uint64_t end,
                 std::vector<Upload>& out);

// The part of one helper. One thread.
class Helper {
 public:
  // kExhausted: the helper has no room for its two staging buffers. kUnavailable: there is no fast
  // link to `target`.
  static Result<std::unique_ptr<Helper>> create(std::unique_ptr<Loan> loan, Device& target,
                                                std::uint64_t staging_bytes, double free_fraction);
  // Queues everything that brings `bytes` bytes to `to` in the target's memory. `uploads` have
  // addresses that count from there. Does not keep the span.
  Result<void> bring(std::span<const Upload> uploads, DeviceAddress to, std::uint64_t bytes);
  // Behind it, the bytes of the last bring() are there.
  Event& brought() const { return *last_->copied; }
  // Whether the queued work is done. An error: some of it may have gone wrong.
  Result<bool> is_idle();
  // kTimeout: the device may still write to the target.
  Result<void> finish(TimePoint deadline);
  Loan& loan() const { return *loan_; }

 private:
  struct Stage {
    DeviceAddress at = 0;
    std::unique_ptr<Event> uploaded;
    std::unique_ptr<Event> copied;
  };
  explicit Helper(std::unique_ptr<Loan> loan) : loan_(std::move(loan)) {}

  const std::unique_ptr<Loan> loan_;
  std::unique_ptr<Memory> staging_;
  // Two, so that an upload runs beside the copy of the one before.
  static constexpr std::size_t kStages = 2;
  Stage stages_[kStages];
  // The stage of the last bring().
  Stage* last_ = &stages_[1];
  std::vector<Upload> uploads_;
  // They go first: their destructors wait.
  std::unique_ptr<Stream> upload_stream_;
  std::unique_ptr<Stream> copy_stream_;
};

// One session's fetch and spread: the own link and the helpers carry each bucket together. The
// spread makes the pipeline hand over a bucket only after all parts have come and every helper has
// said that its work went well.
class HelpedUpload {
 public:
  // All outlive it. `bucket_bytes`: of the largest bucket.
  HelpedUpload(Device& target, const Plan& plan, SegmentFetch& fetch, std::uint64_t bucket_bytes);
  HelpedUpload(const HelpedUpload&) = delete;
  HelpedUpload& operator=(const HelpedUpload&) = delete;

  // As Helper::create(). The loan ends on an error.
  Result<void> add(std::unique_ptr<Loan> loan, double free_fraction);
  Fetch& fetch() { return fetch_stage_; }
  Spread& spread() { return spread_stage_; }
  std::size_t helpers() const { return helpers_.size(); }
  // Ends the loans that are wanted back and whose work is done.
  Result<void> give_back();
  // Waits for the helpers and ends the loans. Call it when nothing more will be queued. kTimeout: a
  // helper may still write.
  Result<void> end(TimePoint deadline);
  // The last error was one of a helper.
  bool broken() const { return broken_; }
  // Why the device of a helper can do nothing any more. nullopt: all devices work.
  const std::optional<Error>& lost() const { return lost_; }
  bool wanted_back() const;
  // Queued over helpers' links.
  std::uint64_t bytes() const { return bytes_; }

 private:
  struct FetchStage final : Fetch {
    explicit FetchStage(HelpedUpload& owner) : all(owner) {}
    std::optional<std::size_t> next() override { return all.fetch_.next(); }
    Result<void> enqueue(std::size_t bucket, DeviceAddress to, Stream& stream) override {
      return all.upload(bucket, to, stream);
    }
    HelpedUpload& all;
  };
  struct SpreadStage final : Spread {
    explicit SpreadStage(HelpedUpload& owner) : all(owner) {}
    Result<void> enqueue(std::size_t bucket, DeviceAddress at, Stream& stream) override;
    Result<void> check() override;
    bool has_peers() const override { return false; }
    HelpedUpload& all;
  };
  Result<void> upload(std::size_t bucket, DeviceAddress to, Stream& stream);
  Result<void> blame(Helper& helper, Error why);

  Device& target_;
  const Plan& plan_;
  SegmentFetch& fetch_;
  const std::uint64_t staging_bytes_;
  FetchStage fetch_stage_{*this};
  SpreadStage spread_stage_{*this};
  std::vector<std::unique_ptr<Helper>> helpers_;
  // Those that carry a part of the bucket that is being queued.
  std::vector<Helper*> carriers_;
  std::vector<Upload> part_;
  bool broken_ = false;
  std::optional<Error> lost_;
  std::uint64_t bytes_ = 0;
};

}  // namespace rekindle::bucket
