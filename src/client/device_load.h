#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/bucket/contents.h"
#include "src/client/bucket_feed.h"
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
  bool ended() const { return feed_->ended(); }
  std::size_t whole_pieces() const { return whole_; }
  // Until take() may bring something, `wake` is readable, or the deadline.
  void wait(int wake, TimePoint deadline) const;

  // Where pieces shall go from now on; others go nowhere. kInvalid, kNotFound: the line names it.
  Result<void> aim(std::span<const rk_target> targets);
  Result<void> move(const FilledBucket& bucket);  // queues

 private:
  DeviceLoad(WorkerDevice device, const bucket::Contents& contents);
  Result<void> begin(Source source);
  Result<void> upload(std::string why);
  void replace_nothing_more();
  Result<std::optional<FilledBucket>> poll();
  Result<void> account(const FilledBucket& bucket);
  bool reads_are_done();

  WorkerDevice worker_;
  const bucket::Contents& contents_;
  std::string path_;
  std::unique_ptr<BucketFeed> feed_;
  const IpcFeed* ipc_ = nullptr;  // feed_, while it may be replaced by uploads
  Source source_;                 // for that
  Tiles tiles_;                   // for that: all so far
  bool handed_out_ = false;       // any bucket
  bool holding_ = false;          // a bucket was handed out and not given back
  std::optional<Error> failed_;
  std::vector<std::uint64_t> missing_;  // per piece: bytes; 1 for one that has none
  std::size_t whole_ = 0;
  std::vector<bucket::DeviceAddress> targets_;  // per piece; 0: none
};

}  // namespace rekindle::client
