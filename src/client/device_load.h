#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/bucket/contents.h"
#include "src/client/bucket_feed.h"
#include "src/client/device_targets.h"
#include "src/client/ipc_feed.h"
#include "src/client/rekindle.h"
#include "src/client/upload_feed.h"

namespace rekindle::client {

// The device for a worker's weights, and the stream that reads the buckets.
struct WorkerDevice {
  std::unique_ptr<bucket::Device> device;
  std::unique_ptr<bucket::Stream> stream;
};

// `name` is as in rk_attach_options.device; "cuda" is the calling thread's current device.
// kInvalid: it does not name a device. kNotFound: this process sees no such GPU. kUnavailable: this
// is a build without CUDA.
Result<WorkerDevice> open_worker_device(const std::string& name, void* stream);

// The buckets of a session with a device. The device process fills them; where that is not
// possible, this process uploads from the segments. One thread at a time.
class DeviceLoad {
 public:
  struct Source {
    Segments segments;
    // To the device process. Empty: uploads, and `no_channel` says why.
    UniqueFd channel;
    std::string no_channel;
    std::uint64_t bucket_bytes = 0;
  };
  // Returns the session's tensors, which live longer than the load.
  using ReadContents = std::function<Result<const bucket::Contents*>()>;
  // Calls `read` when it first needs the tensors: prefetch() does not. kInternal: the agent's parts
  // do not fit together.
  static Result<std::unique_ptr<DeviceLoad>> create(WorkerDevice device, ReadContents read,
                                                    Source source);
  // Waits for the reads of the buckets. If they do not end, the memory is never freed.
  ~DeviceLoad();
  DeviceLoad(const DeviceLoad&) = delete;
  DeviceLoad& operator=(const DeviceLoad&) = delete;

  const std::string& id() const { return worker_.device->id(); }
  // As rk_session_info.device_path.
  const std::string& path() const { return path_; }

  // Tiles that have verified since the last call.
  Result<void> mark_ready(const VerifiedTiles& tiles);
  // Gives the last bucket back first. nullopt: none yet, or ended(). An error stays.
  Result<std::optional<FilledBucket>> take();
  // The caller has the last bucket of take().
  bool is_read() const { return holder_ != Holder::kNone; }
  // Every bucket was handed out and read, and their memory is free again.
  bool ended() const { return ended_; }
  std::size_t whole_pieces() const { return progress_ ? progress_->whole() : 0; }
  enum class Stashed { kOne, kNothingYet, kNoMore, kNoRoom };
  // Copies a bucket to memory of its own on the device; take() hands it out later. All such copies
  // have at most `limit` bytes, and at most a quarter of the memory that the device had free.
  Result<Stashed> prefetch(std::uint64_t limit);
  // The same without these limits: `reserve` bytes of the device stay free. kNoMore: every bucket
  // is there, and the producer has its memory back.
  Result<Stashed> stage(std::uint64_t reserve);
  // Of the device, now.
  Result<std::uint64_t> free_bytes() const;
  std::uint64_t staged_bytes() const { return stash_.bytes(); }
  // Both return when `wake` is readable, at the deadline, or when take() may return a bucket;
  // wait_for_feed() when prefetch() may.
  void wait(int wake, TimePoint deadline) const;
  void wait_for_feed(int wake, TimePoint deadline) const;

  // As DeviceTargets::aim().
  Result<void> aim(std::span<const rk_target> targets);
  // Queues the copies from the bucket to its targets.
  Result<void> move(const FilledBucket& bucket);
  // Waits for all copies and reads of buckets. False: the device does not finish them.
  bool wait_for_reads();

 private:
  DeviceLoad(WorkerDevice device, ReadContents read);
  Result<void> begin(Source source);
  Result<void> upload(std::string why);
  Result<void> begin_progress();
  void keep_feed();
  Result<std::optional<FilledBucket>> poll();
  Result<std::optional<FilledBucket>> poll_feed();
  Result<std::optional<FilledBucket>> next();
  // The most that all copies may have, of the bytes that the device has free without them.
  using Room = std::function<std::uint64_t(std::uint64_t)>;
  Result<Stashed> stash(const Room& room);
  Result<Stashed> stash_one(const Room& room);
  Result<void> give_back();

  WorkerDevice worker_;
  const ReadContents read_;
  std::string path_;
  std::unique_ptr<BucketFeed> feed_;
  // The feed, as long as uploads may replace it. They then need `source_` and all `tiles_` so far.
  const IpcFeed* ipc_ = nullptr;
  Source source_;
  VerifiedTiles tiles_;
  BucketStash stash_;
  // A bucket of the feed that did not fit the stash. It comes after the stash.
  std::optional<FilledBucket> kept_;
  // Who gets the bucket back that was handed out last.
  enum class Holder { kNone, kStash, kFeed };
  Holder holder_ = Holder::kNone;
  // Whether the stream has work that reads buckets.
  bool has_reads_ = false;
  bool ended_ = false;
  std::optional<Error> failed_;
  // Absent until a bucket or its targets are asked for.
  std::optional<PieceProgress> progress_;
  DeviceTargets targets_;
};

}  // namespace rekindle::client
