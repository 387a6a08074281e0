#include "recovery/device/wire.h"

#include "proto/worker.pb.h"

namespace rekindle::device {

Result<AttachedWords> parse_attached(std::string_view frame) {
  proto::AgentFrame parsed;
  if (!parsed.ParseFromArray(frame.data(), static_cast<int>(frame.size())) ||
      !parsed.has_attached()) {
    return fail(ErrorCode::kInvalid, "what a worker is attached to is malformed ({} bytes)",
                frame.size());
  }
  const auto& attached = parsed.attached();
  AttachedWords words;
  words.tensor_set = attached.tensor_set();
  words.layout = attached.layout();
  words.segment_bytes.assign(attached.segment_bytes().begin(), attached.segment_bytes().end());
  for (const auto& box : attached.wanted()) {
    words.wanted.push_back({box.tensor(),
                            {box.offset().begin(), box.offset().end()},
                            {box.extent().begin(), box.extent().end()}});
  }
  return words;
}

}  // namespace rekindle::device
