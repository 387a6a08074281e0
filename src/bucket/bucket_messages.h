#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "src/bucket/bucket_plan.h"
#include "src/bucket/device.h"

// proto/bucket.proto as plain structures: the messages between a worker and the process that fills
// its buckets, in frames of src/ipc. Neither end needs libprotobuf to read or write them.
namespace rekindle::bucket {

// --- producer -> worker

// Comes first, once.
struct BuffersMessage {
  std::uint64_t bucket_bytes = 0;
  // Size of the allocation. Slot i begins at i * bucket_bytes.
  std::uint64_t memory_bytes = 0;
  Handle memory;
  // Per slot, the event behind which the slot is filled.
  std::vector<Handle> filled;
  std::string warning;
};
struct FilledMessage {
  std::uint32_t slot = 0;
  // Counts buckets from 0.
  std::uint64_t sequence = 0;
  std::vector<Part> parts;
};
// Every bucket was delivered and released: the worker closes the handles, then the socket.
struct FinishedMessage {};
// Either end sends it. No more messages follow.
struct FailedMessage {
  Error error;
};

// --- worker -> producer

struct OpenedMessage {
  // Per slot, the event behind which the worker has read the slot.
  std::vector<Handle> released;
};
// The worker's reads are queued before the slot's event.
struct ReleasedMessage {
  std::uint32_t slot = 0;
  std::uint64_t sequence = 0;
};

using Message = std::variant<BuffersMessage, FilledMessage, FinishedMessage, FailedMessage,
                             OpenedMessage, ReleasedMessage>;

struct Encoded {
  std::string body;
  std::vector<UniqueFd> descriptors;
};
Encoded encode(Message message);
// kInvalid: a malformed message, an unknown one, too few or too many descriptors.
Result<Message> decode(std::string_view body, std::vector<UniqueFd> descriptors);

}  // namespace rekindle::bucket
