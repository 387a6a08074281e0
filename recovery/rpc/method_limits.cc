#include "recovery/rpc/method_limits.h"

#include <limits>
#include <map>

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/message.h>
#include <google/protobuf/wire_format_lite.h>

#include "proto/coordinator.pb.h"
#include "src/base/units.h"

namespace rekindle::rpc {

namespace pb = google::protobuf;
using pb::FieldDescriptor;
using pb::internal::WireFormatLite;

namespace {

constexpr std::uint32_t kKiB32 = 1u << 10;
constexpr std::uint32_t kMiB32 = 1u << 20;
constexpr MethodLimits kDefault{64 * kKiB32};
// The deadline and the trace of a request.
constexpr std::uint32_t kBesideBodyBytes = 256;

// A body may take this much memory, whatever its size.
constexpr std::uint64_t kParsedAtLeast = 256 * kKiB;
// A packed number of one byte becomes eight bytes, a small message of a word and a number twelve
// times its size.
constexpr std::uint64_t kParsedPerByte = 16;
constexpr int kMaxDepth = 32;
// Of the allocator and of the pointer to the object.
constexpr std::uint64_t kObjectOverhead = 24;
constexpr std::uint64_t kStringBytes = sizeof(std::string) + kObjectOverhead;
constexpr std::uint64_t kUnknownFieldBytes = 16;

// How many parts a body may have: messages within it, repeated strings, and fields that this build
// does not know. Each costs the parser time, however small it is.
std::uint64_t most_parts(const pb::Descriptor& type) {
  // 4,096 members with three digests and a dozen phases each. The rest of a large report is
  // numbers.
  if (&type == proto::RoundReport::descriptor()) return 65'536;
  return std::numeric_limits<std::uint64_t>::max();
}

// Adds up the memory of a message that has yet to be parsed.
class ParsedSize {
 public:
  ParsedSize(std::uint64_t limit, std::uint64_t most_parts)
      : limit_(limit), most_parts_(most_parts) {}

  // False: malformed, or over the limit.
  bool add(const pb::Descriptor& type, std::string_view body, int depth);
  bool over() const { return bytes_ > limit_; }
  bool too_many_parts() const { return parts_ > most_parts_; }

 private:
  bool add_field(const pb::Descriptor& type, pb::io::CodedInputStream& in, std::string_view body,
                 std::uint32_t tag, int depth);
  bool count(std::uint64_t bytes) {
    bytes_ += bytes;
    return !over();
  }
  bool count_part() {
    ++parts_;
    return !too_many_parts();
  }
  std::uint64_t object_bytes(const pb::Descriptor& type) {
    std::uint64_t& bytes = object_bytes_[&type];
    if (bytes == 0) {
      const auto* empty = pb::MessageFactory::generated_factory()->GetPrototype(&type);
      bytes = empty->SpaceUsedLong() + kObjectOverhead;
    }
    return bytes;
  }

  const std::uint64_t limit_;
  const std::uint64_t most_parts_;
  std::uint64_t bytes_ = 0;
  std::uint64_t parts_ = 0;
  std::map<const pb::Descriptor*, std::uint64_t> object_bytes_;
};

bool ParsedSize::add(const pb::Descriptor& type, std::string_view body, int depth) {
  if (depth > kMaxDepth || !count(object_bytes(type))) return false;
  pb::io::CodedInputStream in(reinterpret_cast<const std::uint8_t*>(body.data()),
                              static_cast<int>(body.size()));
  while (const std::uint32_t tag = in.ReadTag()) {
    if (!add_field(type, in, body, tag, depth)) return false;
  }
  return static_cast<std::size_t>(in.CurrentPosition()) == body.size();
}

std::uint64_t number_bytes(const FieldDescriptor* field) {
  if (field == nullptr) return kUnknownFieldBytes;
  return field->is_repeated() ? 8 : 0;
}

bool ParsedSize::add_field(const pb::Descriptor& type, pb::io::CodedInputStream& in,
                           std::string_view body, std::uint32_t tag, int depth) {
  const FieldDescriptor* field = type.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
  if (field == nullptr && !count_part()) return false;
  std::uint64_t number = 0;
  std::uint32_t small = 0;
  switch (WireFormatLite::GetTagWireType(tag)) {
    case WireFormatLite::WIRETYPE_VARINT:
      return in.ReadVarint64(&number) && count(number_bytes(field));
    case WireFormatLite::WIRETYPE_FIXED64:
      return in.ReadLittleEndian64(&number) && count(number_bytes(field));
    case WireFormatLite::WIRETYPE_FIXED32:
      return in.ReadLittleEndian32(&small) && count(number_bytes(field));
    case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
      break;
    default:
      // Groups: no message here has any.
      return false;
  }
  if (!in.ReadVarint32(&small)) return false;
  const auto begin = static_cast<std::size_t>(in.CurrentPosition());
  if (small > body.size() - begin || !in.Skip(static_cast<int>(small))) return false;
  if (field == nullptr) return count(kUnknownFieldBytes + kStringBytes + small);
  const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
  const bool is_string = field->cpp_type() == FieldDescriptor::CPPTYPE_STRING;
  if ((is_message || (is_string && field->is_repeated())) && !count_part()) return false;
  if (is_message) {
    return add(*field->message_type(), body.substr(begin, small), depth + 1);
  }
  if (is_string) return count(kStringBytes + small);
  // Packed numbers: a varint has at least one byte.
  const bool fixed = field->type() == FieldDescriptor::TYPE_FIXED64 ||
                     field->type() == FieldDescriptor::TYPE_FIXED32;
  return count(fixed ? small : std::uint64_t{8} * small);
}

// The fields of a request before its body.
struct RequestHead {
  std::uint32_t method = 0;
  std::uint32_t body_bytes = 0;
  // Of the frame, without the body.
  std::uint32_t other_bytes = 0;
};

Result<RequestHead> read_head(std::string_view head, std::uint32_t frame_bytes) {
  constexpr std::uint32_t kRequestTag = proto::Frame::kRequestFieldNumber << 3 | 2;
  constexpr std::uint32_t kCallTag = proto::Request::kCallIdFieldNumber << 3;
  constexpr std::uint32_t kMethodTag = proto::Request::kMethodFieldNumber << 3;
  constexpr std::uint32_t kBodyTag = proto::Request::kBodyFieldNumber << 3 | 2;
  RequestHead found;
  pb::io::CodedInputStream in(reinterpret_cast<const std::uint8_t*>(head.data()),
                              static_cast<int>(head.size()));
  std::uint32_t size = 0;
  bool right = in.ReadTag() == kRequestTag && in.ReadVarint32(&size);
  while (right) {
    const std::uint32_t tag = in.ReadTag();
    std::uint64_t call_id = 0;
    if (tag == kCallTag) {
      right = in.ReadVarint64(&call_id);
    } else if (tag == kMethodTag) {
      right = in.ReadVarint32(&found.method);
    } else {
      right = tag == kBodyTag && in.ReadVarint32(&found.body_bytes);
      break;
    }
  }
  if (!right || found.method == 0 || found.body_bytes > frame_bytes) {
    return fail(ErrorCode::kInvalid,
                "a frame of {} bytes does not begin with the method and the body of a call; only "
                "such frames may have more than {} bytes",
                frame_bytes, kSmallFrameBytes);
  }
  found.other_bytes = frame_bytes - found.body_bytes;
  return found;
}

}  // namespace

MethodLimits limits_of(std::uint32_t method) {
  switch (method) {
    case proto::COORDINATOR_HEARTBEAT:
      return {1 * kMiB32};
    // All copies of a node, each with up to 16,384 runs of tiles.
    case proto::COORDINATOR_ANNOUNCE:
      return {4 * kMiB32};
    case proto::COORDINATOR_PUBLISH:
      return {512 * kKiB32};
    case proto::COORDINATOR_PULL_PROGRESS:
      return {512 * kKiB32};
    // The spans of the pull.
    case proto::COORDINATOR_CLOSE_PULL:
      return {1 * kMiB32};
    // 12 bytes for each piece of what its workers want: pieces of 2.7 TiB.
    case proto::COORDINATOR_ROUND:
      return {8 * kMiB32};
    case proto::COORDINATOR_REPORT_JOINT:
      return {512 * kKiB32};
    case proto::COORDINATOR_STATUS:
      return {64 * kKiB32, 50, 500};
    case proto::AGENT_OPEN_DIRECT:
      return {64 * kKiB32, 50, 1000};
    // A page has up to 1 MiB.
    case proto::AGENT_GET_PAGE:
      return {64 * kKiB32, 256, 4096};
    case proto::AGENT_PROVE_RANGES:
      return {512 * kKiB32};
    case proto::AGENT_STATUS:
      return {64 * kKiB32, 50, 500};
    case proto::AGENT_CONNECT_PATHS:
      return {256 * kKiB32};
    // Pieces of 4 MiB.
    case proto::AGENT_JOINT:
      return {6 * kMiB32};
    // The same user, on the unix socket.
    case proto::LOCAL_PUBLISH:
    case proto::LOCAL_PULL:
    case proto::LOCAL_PLAN:
      return {16 * kMiB32};
    default:
      return kDefault;
  }
}

Result<void> check_body_size(std::uint32_t method, std::size_t bytes) {
  const std::uint32_t most = limits_of(method).max_body_bytes;
  if (bytes <= most) return {};
  return fail(ErrorCode::kInvalid, "{} with a body of {} bytes; at most {} are allowed",
              proto::Method_Name(static_cast<proto::Method>(method)), bytes, most);
}

Result<void> check_large_frame(std::string_view head, std::uint32_t frame_bytes) {
  TRY(const RequestHead found, read_head(head, frame_bytes));
  TRY_VOID(check_body_size(found.method, found.body_bytes));
  if (found.other_bytes <= kFrameHeadBytes + kBesideBodyBytes) return {};
  return fail(ErrorCode::kInvalid, "a call with {} bytes beside its body of {}; {} are allowed",
              found.other_bytes, found.body_bytes, kFrameHeadBytes + kBesideBodyBytes);
}

Result<void> check_parsed_size(const pb::Descriptor& type, std::string_view body) {
  const std::uint64_t limit = kParsedAtLeast + kParsedPerByte * body.size();
  ParsedSize size(limit, most_parts(type));
  if (size.add(type, body, 0)) return {};
  if (size.too_many_parts()) {
    return fail(ErrorCode::kInvalid, "{} of {} bytes has more than {} parts", type.full_name(),
                body.size(), most_parts(type));
  }
  if (!size.over()) {
    return fail(ErrorCode::kInvalid, "malformed {} of {} bytes", type.full_name(), body.size());
  }
  return fail(ErrorCode::kInvalid,
              "{} of {} bytes would take more than {} of memory: it has too many small parts",
              type.full_name(), body.size(), format_bytes(limit));
}

}  // namespace rekindle::rpc
