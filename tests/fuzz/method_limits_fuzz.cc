#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "proto/agent.pb.h"
#include "proto/coordinator.pb.h"
#include "recovery/rpc/frame_codec.h"
#include "recovery/rpc/method_limits.h"

// The looks at a frame and at a body before they are buffered and parsed. A body that passes must
// take no more memory than it may, and a frame that passes must be a request that its method
// allows.
namespace {

using namespace rekindle;

void require(bool condition) {
  if (!condition) __builtin_trap();
}

template <typename Message>
void check_body(std::string_view body) {
  const bool passes = rpc::check_parsed_size(*Message::descriptor(), body).has_value();
  Message message;
  const bool parses = message.ParseFromArray(body.data(), static_cast<int>(body.size()));
  // Vectors have up to twice the room that they need, and an allocator's least block.
  if (passes && parses) require(message.SpaceUsedLong() <= 2 * ((256u << 10) + 16 * body.size()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  check_body<proto::AnnounceRequest>(bytes);
  check_body<proto::RoundReport>(bytes);
  check_body<proto::ClusterStatusResponse>(bytes);
  check_body<proto::OpenSessionResponse>(bytes);
  if (size < rpc::kFrameHeadBytes) return 0;
  const auto frame_bytes = static_cast<std::uint32_t>(size);
  if (!rpc::check_large_frame(bytes.substr(0, rpc::kFrameHeadBytes), frame_bytes)) return 0;
  const auto frame = rpc::decode_frame(bytes);
  // Later fields may repeat the body.
  if (!frame || !frame->has_request()) return 0;
  require(frame->request().body().size() <= size);
  return 0;
}
