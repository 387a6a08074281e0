#pragma once

#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "src/base/unique_fd.h"
#include "src/bucket/contents.h"
#include "src/bucket/pipeline.h"
#include "src/bucket/segment_fetch.h"
#include "src/client/bucket_feed.h"

namespace rekindle::client {

struct Segments {
  std::vector<UniqueFd> files;
  std::vector<std::uint64_t> bytes;
};

// Uploads from the agent's segments by this process itself, with the device process' pipeline.
class UploadFeed final : public BucketFeed, private bucket::Deliver {
 public:
  // `bucket_bytes` 0: the default. kExhausted: the device has no room for a bucket.
  static Result<std::unique_ptr<UploadFeed>> create(bucket::Device& device, bucket::Stream& stream,
                                                    const bucket::Contents& contents,
                                                    const Segments& segments,
                                                    std::uint64_t bucket_bytes);
  ~UploadFeed() override;

  Result<void> mark_ready(const VerifiedTiles& tiles) override;
  Result<std::optional<FilledBucket>> poll(TimePoint now) override;
  Result<void> give_back() override;
  bool ended() const override { return works_ == nullptr; }
  int fd() const override { return -1; }
  Duration patience() const override;

 private:
  struct Works;
  struct Handed {
    std::size_t bucket = 0;
    std::uint32_t slot = 0;
  };
  UploadFeed(bucket::Device& device, bucket::Stream& stream);
  Result<void> begin(const bucket::Contents& contents, const Segments& segments,
                     std::uint64_t bucket_bytes);
  Result<void> hand_over(std::size_t bucket, std::uint32_t slot) override;
  Result<bool> released(std::uint32_t slot) override;

  bucket::Device& device_;
  bucket::Stream& stream_;
  // Being filled, in order.
  std::deque<Handed> filling_;
  // The slot of the bucket that poll() returned last.
  std::uint32_t current_ = 0;
  // Slots that were handed over and are not free again.
  std::size_t unreleased_ = 0;
  std::unique_ptr<Works> works_;
};

}  // namespace rekindle::client
