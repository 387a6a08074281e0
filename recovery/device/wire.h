#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "src/bucket/contents.h"

// Between proto/device.proto and our own types.
namespace rekindle::device {

// What a worker was told of its session's bytes.
struct AttachedWords {
  std::string tensor_set;
  std::string layout;
  std::vector<bucket::NamedBox> wanted;
  std::vector<std::uint64_t> segment_bytes;
};
// Of a serialized AgentFrame. kInvalid: it is none, or has no Attached.
Result<AttachedWords> parse_attached(std::string_view frame);

}  // namespace rekindle::device
