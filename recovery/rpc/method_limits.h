#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <google/protobuf/descriptor.h>

#include "proto/frame.pb.h"
#include "src/base/result.h"

// What one call may cost its server, as data beside the method (docs/reference/wire.md has the
// same table). A body is checked before it is buffered, and again before it is parsed.
namespace rekindle::rpc {

struct MethodLimits {
  std::uint32_t max_body_bytes;
  // A peer may make `burst` calls at once, and then so many a second. 0: any number.
  double calls_per_second = 0;
  double burst = 0;
};

MethodLimits limits_of(std::uint32_t method);

// Frames up to this size need no look at their first bytes: any method may have them.
inline constexpr std::uint32_t kSmallFrameBytes = 64u << 10;
// So many bytes of a frame show its method and the size of its body.
inline constexpr std::size_t kFrameHeadBytes = 64;

// Checks a frame that is larger than kSmallFrameBytes by its first kFrameHeadBytes. It must be a
// request that has hardly more than its body, of a size that its method allows. A sender of this
// protocol writes the method before the body.
Result<void> check_large_frame(std::string_view head, std::uint32_t frame_bytes);
// kInvalid: the body is larger than its method allows.
Result<void> check_body_size(std::uint32_t method, std::size_t bytes);

// Smaller bodies are parsed without a look at check_parsed_size().
inline constexpr std::size_t kCheckParsedBytes = 4096;
// An empty submessage has 2 bytes on the wire and may have 200 in memory. Adds up how much memory
// the message will take, without parsing it. kInvalid: too much for its size, more parts than the
// type may have, or malformed.
Result<void> check_parsed_size(const google::protobuf::Descriptor& type, std::string_view body);

}  // namespace rekindle::rpc
