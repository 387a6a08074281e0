#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "recovery/worker/worker_wire.h"
#include "src/client/agent_messages.h"
#include "src/ipc/frame.h"
#include "tests/fuzz/fuzz_check.h"

// Bytes of a worker to its agent, and the other way: the reader must give the same frames however
// they are cut, and stay failed; what parses goes through the agent's checks and through
// librekindle's own reader of the messages.
namespace {

using namespace rekindle;

constexpr TimePoint kNow{std::chrono::seconds(1)};

struct Outcome {
  std::string bodies;
  bool failed = false;
  bool operator==(const Outcome&) const = default;
};

void check_request(const proto::WorkerFrame& frame) {
  if (frame.has_attach()) {
    const auto order = worker::from_proto(frame.attach());
    if (order) FUZZ_CHECK(order->rank.rank < order->rank.world && order->group.size() <= 128);
  }
  if (frame.has_update()) {
    const auto order = worker::from_proto(frame.update());
    if (order) FUZZ_CHECK(!order->id.model.empty() && order->group.size() <= 128);
  }
  if (frame.has_publish_begin()) {
    const auto tensors = worker::tensors_from(frame.publish_begin());
    if (tensors) {
      FUZZ_CHECK(tensors->size() == static_cast<std::size_t>(frame.publish_begin().tensors_size()));
    }
  }
}

void check_body(const std::string& body) {
  proto::WorkerFrame request;
  if (request.ParseFromString(body)) check_request(request);
  const auto message = client::decode(body);
  if (!message) return;
  FUZZ_CHECK(message->error || message->reply.index() != 0);
  proto::AgentFrame frame;
  if (frame.ParseFromString(body)) FUZZ_CHECK(message->call == frame.call());
}

Outcome read(std::string_view bytes, std::size_t step) {
  ipc::FrameReader reader(0);
  Outcome outcome;
  while (!bytes.empty() && !outcome.failed) {
    reader.feed(bytes.substr(0, step), {}, kNow);
    bytes.remove_prefix(std::min(step, bytes.size()));
    for (;;) {
      const auto frame = reader.next();
      if (!frame) {
        outcome.failed = true;
        FUZZ_CHECK(!reader.next());  // for good
        break;
      }
      if (!*frame) break;
      FUZZ_CHECK(!(*frame)->body.empty() && (*frame)->descriptors.empty());
      check_body((*frame)->body);
      outcome.bodies += (*frame)->body + '|';
    }
  }
  return outcome;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  FUZZ_CHECK(read(bytes, size + 1) == read(bytes, 1 + size % 7));
  check_body(bytes);
  return 0;
}
