#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "src/bucket/bucket_messages.h"
#include "src/bucket/pipeline.h"
#include "src/ipc/channel.h"

namespace rekindle::device {

// The pipeline's last stage: a worker at the other end of a socket (src/bucket/bucket_messages.h).
// The worker is not trusted: if it breaks the protocol, hangs or dies, only its own session fails.
// The session's thread only.
class WorkerDeliver final : public bucket::Deliver {
 public:
  WorkerDeliver(ipc::Channel channel, bucket::Device& device);

  // Tells the worker where its buckets will be.
  Result<void> offer(bucket::Slots& slots);
  // Returns the parts of a bucket that is handed over from now on.
  using PartsOf = std::function<std::vector<bucket::Part>(std::size_t bucket)>;
  void bring(PartsOf parts_of) { parts_of_ = std::move(parts_of); }
  // Reads the worker's messages. kPeerLost: it has closed the channel. kInvalid: it broke the
  // protocol. A worker that has failed sends its own error.
  Result<void> receive(TimePoint now);
  Result<void> send(TimePoint now);
  // Sends the last message, once, as far as the worker takes it.
  void say(bucket::Message last);
  // Waits until the worker has closed its end. False: the deadline has passed, or `stop` is
  // readable.
  bool wait_closed(int stop, TimePoint deadline);

  Result<void> hand_over(std::size_t bucket, std::uint32_t slot) override;
  Result<bool> released(std::uint32_t slot) override;

  // The worker has released a slot, and the device has not finished the worker's reads.
  bool awaits_device() const { return awaited_ > 0; }
  TimePoint last_release() const { return last_release_; }
  // Handed over so far.
  std::uint64_t bytes() const { return bytes_; }
  const ipc::Channel& channel() const { return channel_; }
  bool closed() const { return closed_; }

 private:
  struct Slot {
    enum class State { kOurs, kWorkers, kReleased } state = State::kOurs;
    std::uint64_t sequence = 0;
    std::unique_ptr<bucket::Event> released;
  };
  Result<void> push(bucket::Message message);
  Result<void> on_message(bucket::Message message, TimePoint now);
  Result<void> on_opened(const bucket::OpenedMessage& opened);
  Result<void> on_released(const bucket::ReleasedMessage& released, TimePoint now);

  ipc::Channel channel_;
  bucket::Device& device_;
  PartsOf parts_of_;
  std::vector<Slot> slots_;
  bool opened_ = false;
  bool closed_ = false;
  bool said_last_ = false;
  std::uint64_t sequence_ = 0;
  std::uint32_t awaited_ = 0;
  std::uint64_t bytes_ = 0;
  TimePoint last_release_{};
};

}  // namespace rekindle::device
