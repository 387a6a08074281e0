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
// It is trusted with nothing: one that breaks the rules, hangs or dies fails its own session. The
// session's thread only.
class WorkerDeliver final : public bucket::Deliver {
 public:
  WorkerDeliver(ipc::Channel channel, bucket::Device& device);

  // Tells the worker where its buckets will be.
  Result<void> offer(bucket::Slots& slots);
  // What is in the buckets that are handed over from now on.
  using PartsOf = std::function<std::vector<bucket::Part>(std::size_t bucket)>;
  void bring(PartsOf parts_of) { parts_of_ = std::move(parts_of); }
  // Reads what has come. kPeerLost: it has closed the channel; kInvalid: against the rules; its
  // own error when it has failed.
  Result<void> receive(TimePoint now);
  Result<void> send(TimePoint now);
  void say(bucket::Message last);  // and no more, once; as far as the worker takes it
  // Until it has closed its end; false: the deadline has passed, or `stop` can be read.
  bool wait_closed(int stop, TimePoint deadline);

  Result<void> hand_over(std::size_t bucket, std::uint32_t slot) override;
  Result<bool> released(std::uint32_t slot) override;

  // The worker has said that it is done with a slot, the device is not yet.
  bool awaits_device() const { return awaited_ > 0; }
  TimePoint last_release() const { return last_release_; }
  std::uint64_t bytes() const { return bytes_; }  // handed over
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
