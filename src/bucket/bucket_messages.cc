#include "src/bucket/bucket_messages.h"

#include <limits>
#include <optional>
#include <utility>

#include "src/bucket/proto_fields.h"

namespace rekindle {

namespace bucket {

namespace {

using pbf::field;
using pbf::fields;

constexpr std::size_t kMaxHandles = 1024;
constexpr std::size_t kNumbersOfPart = 4;

// A handle as the wire has it: its descriptor travels beside the frame.
struct HandleOnWire {
  std::string bytes;
  bool with_descriptor = false;
};
constexpr auto fields_of(const HandleOnWire*) {
  return fields(field(1, &HandleOnWire::bytes), field(2, &HandleOnWire::with_descriptor));
}

struct BuffersOnWire {
  std::uint64_t bucket_bytes = 0;
  std::uint64_t memory_bytes = 0;
  std::optional<HandleOnWire> memory;
  std::vector<HandleOnWire> filled;
  std::string warning;
};
constexpr auto fields_of(const BuffersOnWire*) {
  return fields(field(1, &BuffersOnWire::bucket_bytes), field(2, &BuffersOnWire::memory_bytes),
                field(3, &BuffersOnWire::memory), field(4, &BuffersOnWire::filled),
                field(5, &BuffersOnWire::warning));
}

struct OpenedOnWire {
  std::vector<HandleOnWire> released;
};
constexpr auto fields_of(const OpenedOnWire*) { return fields(field(1, &OpenedOnWire::released)); }

}  // namespace

constexpr auto fields_of(const FilledMessage*) {
  return fields(field(1, &FilledMessage::slot), field(2, &FilledMessage::sequence),
                field(3, &FilledMessage::parts));
}
constexpr auto fields_of(const FinishedMessage*) { return fields(); }
constexpr auto fields_of(const ReleasedMessage*) {
  return fields(field(1, &ReleasedMessage::slot), field(2, &ReleasedMessage::sequence));
}

}  // namespace bucket

// A worker is not trusted: the length of its list is bounded before memory is taken for it.
template <>
struct pbf::Codec<std::vector<bucket::HandleOnWire>> {
  using Handle = bucket::HandleOnWire;
  static constexpr auto kWire = pbf_wire_type::length_delimited;
  static void add(pbf_writer& out, pbf_tag_type number, const std::vector<Handle>& handles) {
    for (const Handle& handle : handles) Codec<Handle>::add(out, number, handle);
  }
  static void take(pbf_reader& in, std::vector<Handle>& handles) {
    if (handles.size() == bucket::kMaxHandles) throw Refused("too many handles");
    Codec<Handle>::take(in, handles.emplace_back());
  }
};

// Four numbers for each part, packed.
template <>
struct pbf::Codec<std::vector<bucket::Part>> {
  static constexpr auto kWire = pbf_wire_type::length_delimited;
  static void add(pbf_writer& out, pbf_tag_type number, const std::vector<bucket::Part>& parts) {
    std::vector<std::uint64_t> numbers;
    numbers.reserve(parts.size() * bucket::kNumbersOfPart);
    for (const bucket::Part& part : parts) {
      numbers.insert(numbers.end(), {part.piece, part.offset_bytes, part.bytes, part.at});
    }
    out.add_packed_uint64(number, numbers.begin(), numbers.end());
  }
  static void take(pbf_reader& in, std::vector<bucket::Part>& parts) {
    const auto numbers = in.get_packed_uint64();
    const auto end = numbers.end();
    for (auto at = numbers.begin(); at != end;) {
      std::uint64_t part[bucket::kNumbersOfPart];
      for (std::uint64_t& number : part) {
        if (at == end) throw Refused("a part is cut off");
        number = *at++;
      }
      if (part[0] > std::numeric_limits<std::uint32_t>::max()) throw Refused("a part of no piece");
      parts.push_back({static_cast<std::uint32_t>(part[0]), part[1], part[2], part[3]});
    }
  }
};

namespace bucket {

namespace {

struct BucketFrame {
  std::variant<std::monostate, BuffersOnWire, FilledMessage, FinishedMessage, pbf::Status,
               OpenedOnWire, ReleasedMessage>
      kind;
};
constexpr auto fields_of(const BucketFrame*) { return fields(pbf::one_of(1, &BucketFrame::kind)); }

// Moves the descriptors out of the handles, in the order of the handles.
class HandleSplitter {
 public:
  explicit HandleSplitter(std::vector<UniqueFd>& descriptors) : descriptors_(descriptors) {}

  BuffersOnWire operator()(BuffersMessage& buffers) {
    BuffersOnWire wire{buffers.bucket_bytes,
                       buffers.memory_bytes,
                       split(buffers.memory),
                       {},
                       std::move(buffers.warning)};
    wire.filled = split(buffers.filled);
    return wire;
  }
  OpenedOnWire operator()(OpenedMessage& opened) { return {split(opened.released)}; }
  pbf::Status operator()(FailedMessage& failed) { return pbf::status_of(failed.error); }
  template <typename T>
  T operator()(T& message) {
    return std::move(message);
  }

 private:
  HandleOnWire split(Handle& handle) {
    const bool with_descriptor = static_cast<bool>(handle.fd);
    if (with_descriptor) descriptors_.push_back(std::move(handle.fd));
    return {std::move(handle.bytes), with_descriptor};
  }
  std::vector<HandleOnWire> split(std::vector<Handle>& handles) {
    std::vector<HandleOnWire> wire;
    for (Handle& handle : handles) wire.push_back(split(handle));
    return wire;
  }

  std::vector<UniqueFd>& descriptors_;
};

// Gives each handle its descriptor back.
class HandleJoiner {
 public:
  explicit HandleJoiner(std::vector<UniqueFd> descriptors) : descriptors_(std::move(descriptors)) {}

  Result<Message> operator()(std::monostate) { return refuse("no known kind"); }
  Result<Message> operator()(BuffersOnWire& wire) {
    if (!wire.memory) return refuse("buffers without memory");
    BuffersMessage buffers{wire.bucket_bytes, wire.memory_bytes, {}, {}, std::move(wire.warning)};
    TRY(buffers.memory, join(*wire.memory));
    TRY(buffers.filled, join(wire.filled));
    return done(std::move(buffers));
  }
  Result<Message> operator()(OpenedOnWire& wire) {
    OpenedMessage opened;
    TRY(opened.released, join(wire.released));
    return done(std::move(opened));
  }
  // No code is a failure without a name.
  Result<Message> operator()(pbf::Status& wire) {
    Error unnamed(ErrorCode::kInternal, wire.message);
    return done(FailedMessage{pbf::error_of(std::move(wire)).value_or(std::move(unnamed))});
  }
  template <typename T>
  Result<Message> operator()(T& message) {
    return done(std::move(message));
  }

 private:
  static Failure refuse(std::string_view why) {
    return fail(ErrorCode::kInvalid, "a malformed bucket frame: {}", why);
  }
  Result<Message> done(Message message) const {
    if (taken_ != descriptors_.size()) return refuse("more descriptors than handles");
    return message;
  }
  Result<Handle> join(HandleOnWire& wire) {
    Handle handle{std::move(wire.bytes), UniqueFd()};
    if (!wire.with_descriptor) return handle;
    if (taken_ == descriptors_.size()) return refuse("a descriptor is missing");
    handle.fd = std::move(descriptors_[taken_++]);
    return handle;
  }
  Result<std::vector<Handle>> join(std::vector<HandleOnWire>& wire) {
    std::vector<Handle> handles;
    for (HandleOnWire& each : wire) {
      TRY(Handle handle, join(each));
      handles.push_back(std::move(handle));
    }
    return handles;
  }

  std::vector<UniqueFd> descriptors_;
  std::size_t taken_ = 0;
};

}  // namespace

Encoded encode(Message message) {
  Encoded out;
  HandleSplitter split(out.descriptors);
  BucketFrame frame;
  std::visit([&](auto& kind) { frame.kind = split(kind); }, message);
  out.body = pbf::serialize(frame);
  return out;
}

Result<Message> decode(std::string_view body, std::vector<UniqueFd> descriptors) {
  TRY(auto frame, pbf::parse<BucketFrame>(body, "bucket frame"));
  return std::visit(HandleJoiner(std::move(descriptors)), frame.kind);
}

}  // namespace bucket

}  // namespace rekindle
