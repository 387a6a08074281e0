#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "src/bucket/bucket_messages.h"
#include "src/client/bucket_feed.h"
#include "src/ipc/channel.h"

namespace rekindle::client {

// Buckets that the host's device process fills: memory and events of another process, opened here,
// and the channel (src/bucket/bucket_messages.h) between the two.
class IpcFeed final : public BucketFeed {
 public:
  static Result<std::unique_ptr<IpcFeed>> create(bucket::Device& device, bucket::Stream& stream,
                                                 UniqueFd socket);

  // The agent tells the device process itself.
  Result<void> mark_ready(const VerifiedTiles&) override { return {}; }
  // kUnavailable: the device process is gone. Other errors come from the process.
  Result<std::optional<FilledBucket>> poll(TimePoint now) override;
  Result<void> give_back() override;
  bool ended() const override { return ended_; }
  int fd() const override { return ended_ ? -1 : channel_.fd(); }
  Duration patience() const override;

  // The worker has seen none of its buckets yet, so another feed may take its place.
  bool untouched() const { return handed_out_ == 0; }

 private:
  struct Slot {
    std::unique_ptr<bucket::Event> filled;
    std::unique_ptr<bucket::Event> released;
    // kFilling: being filled, or filled and not handed out. kHeld: handed out.
    enum class State { kTheirs, kFilling, kHeld } state = State::kTheirs;
  };
  IpcFeed(bucket::Device& device, bucket::Stream& stream, ipc::Channel channel)
      : device_(device), stream_(stream), channel_(std::move(channel)) {}
  Result<void> receive(TimePoint now);
  Result<void> apply(bucket::Message message);
  Result<void> open(bucket::BuffersMessage buffers);
  Result<bucket::OpenedMessage> open_slots(const bucket::BuffersMessage& buffers);
  Result<void> add(bucket::FilledMessage filled);
  Result<void> finish();
  void send(bucket::Message message);

  bucket::Device& device_;
  bucket::Stream& stream_;
  ipc::Channel channel_;
  std::optional<TimePoint> open_by_;
  std::uint64_t bucket_bytes_ = 0;
  // Null: not opened.
  std::unique_ptr<bucket::Memory> memory_;
  std::vector<Slot> slots_;
  // Not handed out yet, in order.
  std::deque<bucket::FilledMessage> filled_;
  // The bucket that was handed out last.
  bucket::ReleasedMessage current_;
  std::uint64_t received_ = 0;
  std::uint64_t handed_out_ = 0;
  bool ended_ = false;
};

}  // namespace rekindle::client
