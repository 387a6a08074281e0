#include "src/client/ipc_feed.h"

#include <string>
#include <utility>

#include <sys/socket.h>

#include "src/base/worker_pool.h"

namespace rekindle::client {

namespace {

constexpr std::size_t kMostSlots = 256;
constexpr Duration kSendPatience = std::chrono::milliseconds(1);
constexpr Duration kReceivePatience = std::chrono::seconds(1);
// From the first poll().
constexpr std::chrono::seconds kBuffersDeadline{10};

Failure gone(std::string_view why) {
  return fail(ErrorCode::kUnavailable,
              "the device process that fills this session's buckets is gone ({}): detach and "
              "attach again",
              why);
}

Failure broken(std::string_view why) {
  return fail(ErrorCode::kInternal, "the device process broke the protocol: {}", why);
}

// A new device process may not have the fault of this one. Other errors concern the caller.
Failure refused(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kTimeout:
    case ErrorCode::kPeerLost:
    case ErrorCode::kInternal:
      return fail(ErrorCode::kUnavailable, "the device process: {}; detach and attach again",
                  error.message());
    default:
      return fail(error.with_context("the device process"));
  }
}

Result<void> check(const bucket::BuffersMessage& buffers) {
  const std::uint64_t slots = buffers.filled.size();
  if (slots == 0 || slots > kMostSlots || buffers.bucket_bytes == 0 ||
      buffers.bucket_bytes % bucket::kPartAlignment != 0 ||
      buffers.bucket_bytes > buffers.memory_bytes / slots) {
    return broken(fmt::format("{} buckets of {} bytes in {}", slots, buffers.bucket_bytes,
                              buffers.memory_bytes));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<IpcFeed>> IpcFeed::create(bucket::Device& device, bucket::Stream& stream,
                                                 UniqueFd socket) {
  TRY(ipc::Channel channel, ipc::Channel::adopt(std::move(socket), kMostSlots + 1));
  return std::unique_ptr<IpcFeed>(new IpcFeed(device, stream, std::move(channel)));
}

Result<std::optional<FilledBucket>> IpcFeed::poll(TimePoint now) {
  if (ended_) return std::nullopt;
  if (auto received = receive(now); !received) {
    if (received.error().code() != ErrorCode::kPeerLost) return fail(std::move(received).error());
    return gone(received.error().message());
  }
  if (ended_) return std::nullopt;
  if (memory_ == nullptr) {
    if (!open_by_) open_by_ = now + kBuffersDeadline;
    if (now < *open_by_) return std::nullopt;
    return gone(fmt::format("no buffers came within {} s", kBuffersDeadline.count()));
  }
  if (filled_.empty()) return std::nullopt;
  bucket::FilledMessage& next = filled_.front();
  Slot& slot = slots_[next.slot];
  TRY(const bool done, device_.is_done(*slot.filled));
  if (!done) return std::nullopt;
  TRY_VOID(stream_.wait(*slot.filled));
  slot.state = Slot::State::kHeld;
  current_ = {next.slot, next.sequence};
  ++handed_out_;
  FilledBucket bucket{memory_->address() + next.slot * bucket_bytes_, bucket_bytes_,
                      std::move(next.parts)};
  filled_.pop_front();
  return bucket;
}

Result<void> IpcFeed::receive(TimePoint now) {
  auto received = channel_.receive_frames(now, [this](ipc::Frame frame) -> Result<void> {
    if (ended_) return {};
    auto message = bucket::decode(frame.body, std::move(frame.descriptors));
    if (!message) return broken(message.error().message());
    return apply(std::move(*message));
  });
  if (ended_) return {};
  // The frames themselves are malformed.
  if (!received && received.error().code() == ErrorCode::kInvalid) {
    return broken(received.error().message());
  }
  if (!received) return fail(std::move(received).error());
  if (*received == ipc::Received::kEnd) return fail(ErrorCode::kPeerLost, "it has ended");
  // If the process is gone, receiving will show it.
  if (channel_.wants_to_send()) (void)channel_.send_some(now);
  return channel_.check_deadline(now);
}

Result<void> IpcFeed::apply(bucket::Message message) {
  if (auto* const buffers = std::get_if<bucket::BuffersMessage>(&message)) {
    return open(std::move(*buffers));
  }
  if (auto* const filled = std::get_if<bucket::FilledMessage>(&message)) {
    return add(std::move(*filled));
  }
  if (std::holds_alternative<bucket::FinishedMessage>(message)) return finish();
  if (const auto* const failed = std::get_if<bucket::FailedMessage>(&message)) {
    return refused(failed->error);
  }
  return broken("it sent what only a worker sends");
}

Result<void> IpcFeed::open(bucket::BuffersMessage buffers) {
  if (memory_ != nullptr) return broken("it sent its buffers twice");
  TRY_VOID(check(buffers));
  const SignalsBlocked blocked;
  auto opened = open_slots(buffers);
  if (!opened) {
    send(bucket::FailedMessage{opened.error()});
    return fail(std::move(opened).error());
  }
  bucket_bytes_ = buffers.bucket_bytes;
  send(std::move(*opened));
  return {};
}

Result<bucket::OpenedMessage> IpcFeed::open_slots(const bucket::BuffersMessage& buffers) {
  TRY(auto memory, device_.open_memory(buffers.memory, buffers.memory_bytes));
  bucket::OpenedMessage opened;
  std::vector<Slot> slots;
  for (const bucket::Handle& handle : buffers.filled) {
    Slot slot;
    TRY(slot.filled, device_.open_event(handle));
    TRY(slot.released, device_.make_event());
    TRY(bucket::Handle released, device_.share(*slot.released));
    opened.released.push_back(std::move(released));
    slots.push_back(std::move(slot));
  }
  memory_ = std::move(memory);
  slots_ = std::move(slots);
  return opened;
}

Result<void> IpcFeed::add(bucket::FilledMessage filled) {
  if (filled.slot >= slots_.size() || slots_[filled.slot].state != Slot::State::kTheirs) {
    return broken(fmt::format("it filled slot {}, which is not its own", filled.slot));
  }
  if (filled.sequence != received_ || filled.parts.empty()) {
    return broken(fmt::format("bucket {} with {} parts came instead of bucket {}", filled.sequence,
                              filled.parts.size(), received_));
  }
  ++received_;
  slots_[filled.slot].state = Slot::State::kFilling;
  filled_.push_back(std::move(filled));
  return {};
}

Result<void> IpcFeed::finish() {
  if (!filled_.empty()) return broken("it finished before its buckets were taken");
  for (const Slot& slot : slots_) {
    if (slot.state == Slot::State::kHeld) {
      return broken("it finished before its buckets were given back");
    }
  }
  // The device process has seen our last event, so nothing reads the memory any more.
  ended_ = true;
  slots_.clear();
  memory_.reset();
  // The device process then frees its side.
  (void)::shutdown(channel_.fd(), SHUT_RDWR);
  return {};
}

Result<void> IpcFeed::give_back() {
  Slot& slot = slots_[current_.slot];
  TRY_VOID(stream_.record(*slot.released));
  slot.state = Slot::State::kTheirs;
  send(current_);
  return {};
}

void IpcFeed::send(bucket::Message message) {
  bucket::Encoded frame = bucket::encode(std::move(message));
  if (channel_.push(std::move(frame.body), std::move(frame.descriptors))) {
    (void)channel_.send_some(steady_now());
  }
}

Duration IpcFeed::patience() const {
  if (!filled_.empty()) return kEventPatience;
  return channel_.wants_to_send() ? kSendPatience : kReceivePatience;
}

}  // namespace rekindle::client
