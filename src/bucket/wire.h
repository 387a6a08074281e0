#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "src/bucket/device.h"
#include "src/bucket/plan.h"

// proto/bucket.proto as plain structures: what a worker and the process that fills its buckets say
// to each other, on frames of src/ipc. Read and written without libprotobuf, as src/client/wire.h.
namespace rekindle::bucket {

// --- producer -> worker
struct BuffersMessage {  // first and once: the buckets' memory, and per slot the event of its
                         // filling
  std::uint64_t bucket_bytes = 0;
  std::uint64_t memory_bytes = 0;  // of the allocation; slot i is at i * bucket_bytes
  Handle memory;
  std::vector<Handle> filled;
  std::string warning;
};
struct FilledMessage {
  std::uint32_t slot = 0;
  std::uint64_t sequence = 0;  // counts buckets from 0
  std::vector<Part> parts;
};
struct FinishedMessage {
};                      // all was delivered and released: close what was opened, then the socket
struct FailedMessage {  // either way: no more will come
  Error error;
};
// --- worker -> producer
struct OpenedMessage {  // per slot the event behind which the worker has read it
  std::vector<Handle> released;
};
struct ReleasedMessage {  // its reads are queued before the slot's event
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
// kInvalid: malformed, too few or too many descriptors, or a message that this build does not know.
Result<Message> decode(std::string_view body, std::vector<UniqueFd> descriptors);

}  // namespace rekindle::bucket
