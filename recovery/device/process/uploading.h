#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "recovery/device/device_order.h"
#include "recovery/device/process/communicators.h"
#include "recovery/device/process/device_loans.h"
#include "recovery/device/process/session_mailbox.h"
#include "recovery/device/process/worker_deliver.h"
#include "src/bucket/bucket_verify.h"
#include "src/bucket/direct_stages.h"
#include "src/bucket/helped_upload.h"
#include "src/bucket/segment_fetch.h"
#include "src/bucket/slots.h"

namespace rekindle::device {

struct SessionTimes {
  // Of each bucket, by a worker that lives.
  std::chrono::milliseconds release{600'000};
  // Of a bucket, and of all queued work, by the device.
  std::chrono::milliseconds drain{10'000};
  // Of the opened handles, by a worker that was told that all is delivered.
  std::chrono::milliseconds close{5'000};

  // Of a bucket that NICs bring, and then of the end of their writes.
  std::chrono::milliseconds direct_read{30'000};
  std::chrono::milliseconds direct_end{60'000};

  // --- in a round

  // Without an order for so long, the session uploads by itself.
  std::chrono::milliseconds orders{600'000};
  std::chrono::milliseconds meet{10'000};
  // Replaces `release`.
  std::chrono::milliseconds round_release{5'000};
  // Of a bucket, by the device and the other ranks. Longer than round_release: until then a rank
  // whose worker hangs queues nothing more.
  std::chrono::milliseconds round_fill{8'000};
  // The same, where owners fetch their shares from other hosts meanwhile.
  std::chrono::milliseconds round_fetch{20'000};
  // A communicator whose abort takes longer is left to itself.
  std::chrono::milliseconds abort{2'000};
  // Between two reports of progress.
  std::chrono::milliseconds progress{200};
  // Rate at which a device keeps passing buckets, if it is ordered to; 0: it keeps nothing.
  std::uint64_t keep_bytes_per_second = 8'000'000'000;
  // It keeps nothing while kept and passing bytes together take more of its link to the host than
  // this. A link of PCIe 5 has about 50 GB/s each way. Close to that, a round would wait for what
  // is kept.
  std::uint64_t link_bytes_per_second = 32'000'000'000;
};

struct SpreadProgress {
  std::uint64_t session = 0;
  // Delivered by the round.
  std::uint64_t bytes = 0;
};
// Reports of a session. SpreadOver answers a SpreadOrder once.
using SessionNews = std::variant<DeviceJoined, ShareWanted, SpreadProgress, SpreadOver,
                                 SlotsOffered, BucketWanted, ReadsEnded>;
SpreadOver refused(const SpreadOrder& order, std::string_view why);

// The tiles that a session was told of so far.
struct ToldTiles {
  TileRuns ready;
  bool complete = false;
};

// What a session's work needs. The session owns all of it, and outlives the work.
struct SessionMeans {
  bucket::Device& device;
  const bucket::Pinner& pinner;
  const bucket::SegmentFetch::Segments& segments;
  const bucket::Contents& contents;
  bucket::Slots& slots;
  WorkerDeliver& worker;
  Mailbox& mailbox;
  // Null outside rounds.
  Communicators* communicators;
  ToldTiles& told;
  const SessionTimes& times;
  // Of all tiles of the contents, in their order. Spread and verified bytes are compared with them.
  const std::vector<Digest>& leaves;
  bool verify_upload;
  // For messages.
  const std::string& version;
  const std::function<void(SessionNews)>& say;
  std::uint64_t session;
  // NICs may write to the slots.
  bool direct;
  // Null: no device helps with the uploads. Outlives the work.
  DeviceLoans* loans;
  // Share of a device's free memory that may be taken.
  double free_fraction;
};

// Reads of a session's buckets by the NICs of this host. The agent has them do it. The session's
// thread only.
class NicReads final : public bucket::SlotReader {
 public:
  explicit NicReads(const SessionMeans& means) : means_(means) {}
  // Ends it, if end() did not.
  ~NicReads() override;
  NicReads(const NicReads&) = delete;
  NicReads& operator=(const NicReads&) = delete;

  // kUnavailable: the device exports no memory.
  Result<void> offer();
  // So many buckets have verified, of those that were read.
  void note_verified(std::size_t count) { verified_ = count; }
  Result<void> read(std::size_t bucket, std::uint32_t slot,
                    std::span<const TileIndex> wrong) override;
  void give_up() override { broken_ = true; }
  // A read has failed.
  bool broken() const { return broken_; }
  // Waits until no NIC writes any more. kUnavailable: they still may.
  Result<void> end(bool all, std::uint64_t buckets, std::string why);
  // The session has ended meanwhile. Then nobody may fill its slots, even if end() has returned.
  const std::optional<Error>& session_end() const { return session_end_; }

 private:
  Mailbox::News hear();

  const SessionMeans means_;
  std::size_t verified_ = 0;
  bool offered_ = false;
  bool broken_ = false;
  bool ended_ = false;
  std::optional<Error> session_end_;
};

// A session's buckets from this host: NICs bring those that can be verified on the device alone, if
// the session may be served directly; all others are uploads from the segments. When the host's
// copy is complete, the links of idle devices help. The session's thread only.
class Uploading {
 public:
  explicit Uploading(const SessionMeans& means) : means_(means) {}
  Uploading(const Uploading&) = delete;
  Uploading& operator=(const Uploading&) = delete;

  Result<void> begin();
  // Returns when the worker has released every bucket.
  Result<void> deliver_all();

  // Null before begin().
  bucket::Pipeline* pipeline() { return pipeline_.get(); }
  // When the first bucket was queued.
  std::optional<TimePoint> began() const { return began_; }
  // Buckets that did not match and came once more.
  std::uint64_t refilled() const;
  // Queued over the links of other devices.
  // Why the device of a helper can do nothing any more.
  const std::optional<Error>& helper_lost() const { return helper_lost_; }
  std::uint64_t helped_bytes() const { return helped_bytes_ + (helped_ ? helped_->bytes() : 0); }
  // Waits until the devices have done the queued work.
  Result<void> drain(TimePoint deadline);

 private:
  // A session's direct reads, from begin() on until they are over.
  struct Direct {
    Direct(const SessionMeans& means, std::vector<std::size_t> numbers)
        : buckets(numbers.size()),
          reads(means),
          fetch(means.device, means.slots, reads, std::move(numbers)) {}
    const std::size_t buckets;
    NicReads reads;
    bucket::DirectFetch fetch;
    // Set by start_direct().
    std::unique_ptr<bucket::DirectVerify> verify;
  };
  Result<void> start_direct();
  Result<void> leave_direct(std::string why);
  Result<void> borrow_links();
  Result<void> leave_helpers();
  Result<void> end_helpers();
  Result<bucket::Pipeline::State> step(TimePoint now);
  Result<void> start_verifying();
  Result<void> hear();
  std::vector<bucket::Part> parts_of(std::size_t index) const;
  void note_change(TimePoint now);
  bool all_pinned();
  void wait(bucket::Pipeline::State state, TimePoint now);

  const SessionMeans means_;
  std::optional<bucket::Plan> plan_;
  std::unique_ptr<bucket::SegmentFetch> fetch_;
  // Null: uploads are not verified.
  std::unique_ptr<bucket::UploadVerify> verify_;
  // Null: all buckets are uploads, from here on.
  std::unique_ptr<Direct> direct_;
  // By a Verify that is gone.
  std::uint64_t refilled_before_ = 0;
  // Buckets that the direct reads have handed over.
  std::size_t handed_over_directly_ = 0;
  // Every byte is in host memory.
  bool complete_ = false;
  bool has_asked_for_links_ = false;
  // Null: the own link alone. The pipeline goes first.
  std::unique_ptr<bucket::HelpedUpload> helped_;
  // By a HelpedUpload that is gone.
  std::uint64_t helped_bytes_ = 0;
  std::optional<Error> helper_lost_;
  std::unique_ptr<bucket::Pipeline> pipeline_;
  std::optional<TimePoint> began_;
  // Of the pipeline, at its last step.
  std::size_t handed_over_ = 0;
  bool awaited_hand_over_ = false;
  TimePoint last_change_{};
  bool pinned_ = false;
};

// Why a session that is to verify its uploads fails instead. kDenied: the worker must not replace
// its buckets by uploads that nobody verifies.
Error cannot_verify(const bucket::Device& device, const Error& why);

// Whether the pinning of these has ended.
bool all_settled(const bucket::Pinner& pinner, const bucket::SegmentFetch::Segments& segments);

}  // namespace rekindle::device
