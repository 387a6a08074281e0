#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "proto/device.pb.h"
#include "recovery/device/order.h"
#include "src/base/clock.h"
#include "src/bucket/contents.h"

// Between proto/device.proto and our own types. What comes from the other process is checked here.
namespace rekindle::device {

// What a worker was told of its session's bytes.
struct AttachedWords {
  std::string version;  // "model@41", for messages; "" when it is not named right
  std::string tensor_set;
  std::string layout;
  std::vector<bucket::NamedBox> wanted;
  std::vector<std::uint64_t> segment_bytes;
};
// Of a serialized AgentFrame. kInvalid: it is none, or has no Attached.
Result<AttachedWords> parse_attached(std::string_view frame);

std::uint64_t microseconds(Duration duration);

// kInvalid: a rank or an owner that is none, an owner twice, a bucket that no share fits in, a name
// or id that is too long.
Result<SpreadOrder> from_proto(const proto::BeginSpread& order);
Result<DeviceJoined> from_proto(const proto::DeviceJoined& joined);
SpreadOver from_proto(const proto::SpreadOver& over);
DeviceOver from_proto(const proto::DeviceServed& served);
Result<std::string> from_proto(const proto::MeetingIdMade& made);

proto::BeginSpread to_proto(const SpreadOrder& order);
proto::DeviceJoined to_proto(const DeviceJoined& joined);
proto::SpreadOver to_proto(const SpreadOver& over);
proto::MeetingIdMade to_proto(std::uint64_t number, const Result<std::string>& id);

}  // namespace rekindle::device
