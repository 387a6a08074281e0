#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <variant>

#include "recovery/device/communicators.h"
#include "recovery/device/mailbox.h"
#include "recovery/device/order.h"
#include "recovery/device/round_deliver.h"
#include "src/bucket/round.h"
#include "src/bucket/round_verify.h"
#include "src/bucket/segment_keep.h"
#include "src/bucket/upload_verify.h"

namespace rekindle::device {

struct SessionTimes {
  std::chrono::milliseconds release{600'000};  // of each bucket, by a worker that lives
  std::chrono::milliseconds drain{10'000};  // of a bucket, and of all that is queued, by the device
  std::chrono::milliseconds close{5'000};   // of what it has opened, by a worker that was told all
  // --- in a round
  std::chrono::milliseconds orders{600'000};  // then it goes on by itself
  std::chrono::milliseconds meet{10'000};
  std::chrono::milliseconds round_release{5'000};  // instead of `release`
  // Of a bucket, by the device and the other ranks. Longer than round_release: until then a rank
  // whose worker hangs queues nothing more.
  std::chrono::milliseconds round_fill{8'000};
  std::chrono::milliseconds abort{2'000};   // of a communicator; longer: it is left to itself
  std::chrono::milliseconds progress{200};  // between two words of it
  // Of what passes, by a device that is ordered to keep some; 0: nothing.
  std::uint64_t keep_bytes_per_second = 8'000'000'000;
};

struct SpreadProgress {
  std::uint64_t session = 0;
  std::uint64_t bytes = 0;  // delivered by the round
};
// What a session in a round says; of a SpreadOrder, SpreadOver once.
using RoundNews = std::variant<DeviceJoined, SpreadProgress, SpreadOver>;

// Tiles that a session was told of so far.
struct ToldTiles {
  bucket::TileRuns ready;
  bool complete = false;
};

// A session's part in a round (docs/rounds.md): it meets the other ranks, spreads, and brings what
// the round has left out from the segments. A worker that is lost does not end it. The session's
// thread only.
class Spreading {
 public:
  struct Means {  // of the session; all outlive this
    bucket::Device& device;
    const bucket::Pinner& pinner;
    const bucket::SegmentFetch::Segments& segments;
    const bucket::Contents& contents;
    bucket::Slots& slots;
    WorkerDeliver& worker;
    Mailbox& mailbox;
    Communicators& communicators;
    ToldTiles& told;
    const SessionTimes& times;
    // Of all tiles of the contents, in their order: what a round brings is compared with them.
    const std::vector<Digest>& leaves;
    bool verify_upload;          // buckets that are uploaded after the round are verified, too
    const std::string& version;  // for messages
    const std::function<void(RoundNews)>& say;
  };
  Spreading(Means means, SpreadOrder order);
  ~Spreading();
  Spreading(const Spreading&) = delete;
  Spreading& operator=(const Spreading&) = delete;

  // False: the ranks have not met, and nothing was handed over. An error: the worker's.
  Result<bool> begin();
  // Until the worker has every bucket and has released it. The worker's error: after the round.
  Result<void> deliver_all();

  bucket::Pipeline* pipeline() { return pipeline_.get(); }  // null before it has begun
  TimePoint met() const { return met_; }
  std::uint64_t refilled() const;  // buckets that did not match and were uploaded once more

 private:
  Result<void> plan();
  Result<std::unique_ptr<bucket::SegmentFetch>> fetch_of(std::uint32_t share) const;
  Result<void> meet();
  Result<void> start();
  Result<void> start_verifying();
  Result<bucket::RoundTail::Fetches> own_copy() const;
  Result<void> start_keeping();
  Result<void> end_keeping();
  Result<void> hear(TimePoint now);
  Result<bucket::Pipeline::State> advance(TimePoint now);
  Result<void> leave(Error why);
  Result<void> start_verifying_tail();
  void finish();
  void say_over(std::optional<Error> error);
  void tell_progress(TimePoint now);
  void wait(bucket::Pipeline::State state, TimePoint now) const;

  const Means means_;
  const SpreadOrder order_;
  RoundDeliver deliver_;
  bool spreading_ = true;  // SpreadOver was not said yet
  const TimePoint ordered_;
  TimePoint met_{};
  TimePoint told_at_{};
  std::uint64_t told_bytes_ = 0;
  std::optional<bucket::RoundPlan> plan_;
  bucket::RoundTail::Fetches fetches_;  // of the own share, if it has one; after the round: of all
  std::unique_ptr<bucket::Collective> collective_;  // null: kept, or none
  std::optional<bucket::RoundFetch> fetch_;
  std::optional<bucket::RoundSpread> spread_;
  std::optional<bucket::RoundTail> tail_;
  std::optional<bucket::SegmentKeep> keep_;
  std::unique_ptr<bucket::RoundSeal> seal_;  // of the own share, if it has one
  std::unique_ptr<bucket::RoundVerify> verify_;
  std::uint64_t refilled_in_round_ = 0;                // once verify_ is gone
  std::unique_ptr<bucket::UploadVerify> tail_verify_;  // of tail_; null: not wanted
  std::unique_ptr<bucket::Pipeline> pipeline_;
};

// Why a session that is to verify its uploads fails instead. kDenied: the worker must not replace
// it by uploads that nobody verifies.
Error cannot_verify(const bucket::Device& device, const Error& why);

// Whether nothing of these is still to be pinned.
bool all_settled(const bucket::Pinner& pinner, const bucket::SegmentFetch::Segments& segments);

}  // namespace rekindle::device
