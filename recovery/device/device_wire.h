#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "proto/device.pb.h"
#include "recovery/device/device_order.h"
#include "src/base/clock.h"
#include "src/bucket/contents.h"

// Converts between proto/device.proto and our own types. It checks what the other process sends.
namespace rekindle::device {

// The contents of a session, from its worker's Attached.
struct AttachedContents {
  // "model@41", for messages; "" when it is malformed.
  std::string version;
  std::string tensor_set;
  std::string layout;
  std::vector<bucket::NamedBox> wanted;
  std::vector<std::uint64_t> segment_bytes;
};
// `frame` is a serialized AgentFrame. kInvalid: it is malformed, or has no Attached.
Result<AttachedContents> parse_attached(std::string_view frame);

std::uint64_t microseconds(Duration duration);

// kInvalid: a rank or an owner out of range, an owner twice, a bucket too small for its shares, a
// name or id that is too long.
Result<SpreadOrder> from_proto(const proto::BeginSpread& order);
Result<DeviceJoined> from_proto(const proto::DeviceJoined& joined);
// kInvalid: runs that are empty or out of order.
Result<ShareWanted> from_proto(const proto::ShareWanted& wanted);
SpreadOver from_proto(const proto::SpreadOver& over);
DeviceOver from_proto(const proto::DeviceServed& served);
Result<std::string> from_proto(const proto::MeetingIdMade& made);

// kInvalid: no slots, or more bytes than slots may have; a slot or tiles out of all bounds.
Result<SlotsOffered> from_proto(const proto::SlotsOffered& offered, UniqueFd memory);
Result<BucketWanted> from_proto(const proto::BucketWanted& wanted);
ReadsEnded from_proto(const proto::ReadsEnded& ended);

proto::SlotsOffered to_proto(const SlotsOffered& offered);
proto::BucketWanted to_proto(const BucketWanted& wanted);
proto::ReadsEnded to_proto(const ReadsEnded& ended);
proto::BeginSpread to_proto(const SpreadOrder& order);
proto::DeviceJoined to_proto(const DeviceJoined& joined);
proto::ShareWanted to_proto(const ShareWanted& wanted);
proto::SpreadOver to_proto(const SpreadOver& over);
proto::MeetingIdMade to_proto(std::uint64_t number, const Result<std::string>& id);
proto::BlocksChecked to_proto(std::uint64_t number, const Result<std::vector<Digest>>& digests,
                              Duration elapsed);
// kInvalid: the digests are cut.
Result<std::vector<Digest>> from_proto(const proto::BlocksChecked& checked);
proto::BlockCopied to_copied(std::uint64_t number, Result<std::string> bytes);
Result<std::string> from_proto(proto::BlockCopied copied);

}  // namespace rekindle::device
