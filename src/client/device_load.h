#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/bucket/contents.h"
#include "src/client/bucket_feed.h"
#include "src/client/bucket_stash.h"
#include "src/client/ipc_feed.h"
#include "src/client/rekindle.h"
#include "src/client/upload_feed.h"
#include "src/client/worker_device.h"

namespace rekindle::client {

// What a session with a device does beside the others: its buckets, of the device process or, when
// that is not possible, by uploads from the segments; which pieces are whole; where they shall go.
// One thread at a time.
class DeviceLoad {
 public:
  struct Source {
    Segments segments;
    UniqueFd channel;        // to the device process; none: uploads
    std::string no_channel;  // why
    std::uint64_t bucket_bytes = 0;
  };
  // `contents` lives longer. kInternal: what the agent sent does not fit together.
  static Result<std::unique_ptr<DeviceLoad>> create(WorkerDevice device,
                                                    const bucket::Contents& contents,
                                                    Source source);
  // Waits for what reads the buckets; where that does not end, their memory stays.
  ~DeviceLoad();
  DeviceLoad(const DeviceLoad&) = delete;
  DeviceLoad& operator=(const DeviceLoad&) = delete;

  const std::string& id() const { return worker_.device->id(); }
  const std::string& path() const { return path_; }  // as rk_session_info.device_path

  struct Tiles {
    bucket::TileRuns ready;
    bool all = false;
  };
  // Tiles that have verified since the last call.
  Result<void> mark_ready(const Tiles& tiles);
  // Gives the bucket before it back. nullopt: none yet, or ended(). An error stays.
  Result<std::optional<FilledBucket>> take();
  // Every bucket was handed out and read; what they lay in has been let go.
  bool ended() const { return ended_; }
  std::size_t whole_pieces() const { return whole_; }
  enum class Prefetched { kOne, kNothingYet, kNoMore };
  // Takes a bucket that take() will hand out later, from memory of its own on the device: as long
  // as that is `limit` bytes at most, and a quarter of what the device had free without it.
  Result<Prefetched> prefetch(std::uint64_t limit);
  // Until take() may bring something, `wake` is readable, or the deadline; until prefetch() may.
  void wait(int wake, TimePoint deadline) const;
  void wait_for_feed(int wake, TimePoint deadline) const;

  // Where pieces shall go from now on; others go nowhere. kInvalid, kNotFound: the line names it.
  Result<void> aim(std::span<const rk_target> targets);
  Result<void> move(const FilledBucket& bucket);  // queues
  // Until the device has done what this has queued; false: it does not come to that.
  bool wait_for_reads();

 private:
  DeviceLoad(WorkerDevice device, const bucket::Contents& contents);
  Result<void> begin(Source source);
  Result<void> upload(std::string why);
  void replace_nothing_more();
  Result<std::optional<FilledBucket>> poll();
  Result<std::optional<FilledBucket>> poll_feed();
  Result<std::optional<FilledBucket>> next();
  Result<Prefetched> stash_one(std::uint64_t limit);
  Result<void> give_back();
  Result<void> account(const FilledBucket& bucket);

  WorkerDevice worker_;
  const bucket::Contents& contents_;
  std::string path_;
  std::unique_ptr<BucketFeed> feed_;
  const IpcFeed* ipc_ = nullptr;  // feed_, while it may be replaced by uploads
  Source source_;                 // for that
  Tiles tiles_;                   // for that: all so far
  BucketStash stash_;
  std::optional<FilledBucket> kept_;  // of the feed's, that did not fit the stash: comes after it
  enum class Holder { kNone, kStash, kFeed };
  Holder holder_ = Holder::kNone;  // of the bucket that was handed out and not given back
  bool has_reads_ = false;         // work on the stream that reads buckets
  bool ended_ = false;
  std::optional<Error> failed_;
  std::vector<std::uint64_t> missing_;  // per piece: bytes; 1 for one that has none
  std::size_t whole_ = 0;
  std::vector<bucket::DeviceAddress> targets_;  // per piece; 0: none
};

}  // namespace rekindle::client
