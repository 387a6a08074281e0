#include "src/bucket/wire.h"

#include <limits>
#include <optional>
#include <utility>

#include <protozero/pbf_reader.hpp>
#include <protozero/pbf_writer.hpp>

#include "src/bucket/pbf.h"

namespace rekindle::bucket {

namespace {

using protozero::pbf_reader;
using protozero::pbf_tag_type;
using protozero::pbf_writer;
using protozero::tag_and_type;

using pbf::kBytes;
using pbf::kVarint;
using pbf::text;

// Numbers of BucketFrame.kind.
enum Kind : pbf_tag_type {
  kBuffers = 1,
  kFilled = 2,
  kFinished = 3,
  kFailed = 4,
  kOpened = 5,
  kReleased = 6,
};

constexpr std::size_t kMaxHandles = 1024;
constexpr std::size_t kNumbersOfPart = 4;

// What a frame says that protobuf would take: thrown with protozero's own, caught in decode().
class Refused : public protozero::exception {
 public:
  explicit Refused(const char* why) : why_(why) {}
  const char* what() const noexcept override { return why_; }

 private:
  const char* why_;
};

// --- writing

void add_handle(pbf_writer& out, pbf_tag_type tag, Handle handle,
                std::vector<UniqueFd>& descriptors) {
  // Made apart: protozero takes a nested message that stays empty back.
  std::string body;
  pbf_writer field(body);
  if (!handle.bytes.empty()) field.add_bytes(1, handle.bytes);
  if (handle.fd) {
    field.add_bool(2, true);
    descriptors.push_back(std::move(handle.fd));
  }
  out.add_message(tag, body);
}

// One per kind of message: its fields; returns its number.
Kind write(pbf_writer& out, BuffersMessage& buffers, std::vector<UniqueFd>& descriptors) {
  out.add_uint64(1, buffers.bucket_bytes);
  out.add_uint64(2, buffers.memory_bytes);
  add_handle(out, 3, std::move(buffers.memory), descriptors);
  for (Handle& event : buffers.filled) add_handle(out, 4, std::move(event), descriptors);
  out.add_string(5, buffers.warning);
  return kBuffers;
}

Kind write(pbf_writer& out, const FilledMessage& filled, std::vector<UniqueFd>&) {
  out.add_uint32(1, filled.slot);
  out.add_uint64(2, filled.sequence);
  std::vector<std::uint64_t> numbers;
  numbers.reserve(filled.parts.size() * kNumbersOfPart);
  for (const Part& part : filled.parts) {
    numbers.insert(numbers.end(), {part.piece, part.offset_bytes, part.bytes, part.at});
  }
  out.add_packed_uint64(3, numbers.begin(), numbers.end());
  return kFilled;
}

Kind write(pbf_writer&, const FinishedMessage&, std::vector<UniqueFd>&) { return kFinished; }

Kind write(pbf_writer& out, const FailedMessage& failed, std::vector<UniqueFd>&) {
  out.add_enum(1, static_cast<std::int32_t>(failed.error.code()) + 1);  // StatusCode
  out.add_string(2, failed.error.message());
  return kFailed;
}

Kind write(pbf_writer& out, OpenedMessage& opened, std::vector<UniqueFd>& descriptors) {
  for (Handle& event : opened.released) add_handle(out, 1, std::move(event), descriptors);
  return kOpened;
}

Kind write(pbf_writer& out, const ReleasedMessage& released, std::vector<UniqueFd>&) {
  out.add_uint32(1, released.slot);
  out.add_uint64(2, released.sequence);
  return kReleased;
}

// --- reading

// A handle as it is on the wire; its descriptor is found once all are known.
struct Opaque {
  std::string bytes;
  bool descriptor = false;
};

Opaque read_handle(pbf_reader in) {
  Opaque handle;
  while (in.next()) {
    switch (in.tag_and_type()) {
      case tag_and_type(1, kBytes):
        handle.bytes = text(in);
        break;
      case tag_and_type(2, kVarint):
        handle.descriptor = in.get_bool();
        break;
      default:
        in.skip();
    }
  }
  return handle;
}

// Descriptors in the order of the handles that have one.
class Descriptors {
 public:
  explicit Descriptors(std::vector<UniqueFd> all) : all_(std::move(all)) {}
  Handle join(Opaque handle) {
    Handle out{std::move(handle.bytes), UniqueFd()};
    if (!handle.descriptor) return out;
    if (taken_ == all_.size()) throw Refused("a descriptor is missing");
    out.fd = std::move(all_[taken_++]);
    return out;
  }
  std::vector<Handle> join(std::vector<Opaque> handles) {
    std::vector<Handle> out;
    out.reserve(handles.size());
    for (Opaque& handle : handles) out.push_back(join(std::move(handle)));
    return out;
  }
  void check_all_taken() const {
    if (taken_ != all_.size()) throw Refused("more descriptors than handles");
  }

 private:
  std::vector<UniqueFd> all_;
  std::size_t taken_ = 0;
};

void add_one(std::vector<Opaque>& handles, Opaque handle) {
  if (handles.size() == kMaxHandles) throw Refused("too many handles");
  handles.push_back(std::move(handle));
}

BuffersMessage read_buffers(pbf_reader in, Descriptors& descriptors) {
  BuffersMessage buffers;
  std::optional<Opaque> memory;
  std::vector<Opaque> filled;
  while (in.next()) {
    switch (in.tag_and_type()) {
      case tag_and_type(1, kVarint):
        buffers.bucket_bytes = in.get_uint64();
        break;
      case tag_and_type(2, kVarint):
        buffers.memory_bytes = in.get_uint64();
        break;
      case tag_and_type(3, kBytes):
        memory = read_handle(in.get_message());
        break;
      case tag_and_type(4, kBytes):
        add_one(filled, read_handle(in.get_message()));
        break;
      case tag_and_type(5, kBytes):
        buffers.warning = text(in);
        break;
      default:
        in.skip();
    }
  }
  if (!memory) throw Refused("buffers without memory");
  buffers.memory = descriptors.join(std::move(*memory));
  buffers.filled = descriptors.join(std::move(filled));
  return buffers;
}

void read_parts(pbf_reader& in, std::vector<Part>& parts) {
  const auto numbers = in.get_packed_uint64();
  const auto end = numbers.end();
  for (auto at = numbers.begin(); at != end;) {
    std::uint64_t part[kNumbersOfPart];
    for (std::uint64_t& number : part) {
      if (at == end) throw Refused("a part is cut off");
      number = *at++;
    }
    if (part[0] > std::numeric_limits<std::uint32_t>::max()) throw Refused("a part of no piece");
    parts.push_back({static_cast<std::uint32_t>(part[0]), part[1], part[2], part[3]});
  }
}

FilledMessage read_filled(pbf_reader in) {
  FilledMessage filled;
  while (in.next()) {
    switch (in.tag_and_type()) {
      case tag_and_type(1, kVarint):
        filled.slot = in.get_uint32();
        break;
      case tag_and_type(2, kVarint):
        filled.sequence = in.get_uint64();
        break;
      case tag_and_type(3, kBytes):
        read_parts(in, filled.parts);
        break;
      default:
        in.skip();
    }
  }
  return filled;
}

FailedMessage read_failed(pbf_reader in) {
  std::uint32_t code = 0;
  std::string message;
  while (in.next()) {
    switch (in.tag_and_type()) {
      case tag_and_type(1, kVarint):
        code = in.get_uint32();
        break;
      case tag_and_type(2, kBytes):
        message = text(in);
        break;
      default:
        in.skip();
    }
  }
  // StatusCode is ErrorCode + 1; none, or one of a newer build, is something that failed there.
  constexpr auto kLast = static_cast<std::uint32_t>(ErrorCode::kInternal) + 1;
  const bool known = code >= 1 && code <= kLast;
  return {
      Error(known ? static_cast<ErrorCode>(code - 1) : ErrorCode::kInternal, std::move(message))};
}

OpenedMessage read_opened(pbf_reader in, Descriptors& descriptors) {
  std::vector<Opaque> released;
  while (in.next()) {
    if (in.tag_and_type() == tag_and_type(1, kBytes)) {
      add_one(released, read_handle(in.get_message()));
    } else {
      in.skip();
    }
  }
  return {descriptors.join(std::move(released))};
}

ReleasedMessage read_released(pbf_reader in) {
  ReleasedMessage released;
  while (in.next()) {
    switch (in.tag_and_type()) {
      case tag_and_type(1, kVarint):
        released.slot = in.get_uint32();
        break;
      case tag_and_type(2, kVarint):
        released.sequence = in.get_uint64();
        break;
      default:
        in.skip();
    }
  }
  return released;
}

Message read_kind(Kind kind, pbf_reader in, Descriptors& descriptors) {
  switch (kind) {
    case kBuffers:
      return read_buffers(in, descriptors);
    case kFilled:
      return read_filled(in);
    case kFinished:
      while (in.next()) in.skip();
      return FinishedMessage{};
    case kFailed:
      return read_failed(in);
    case kOpened:
      return read_opened(in, descriptors);
    case kReleased:
      return read_released(in);
  }
  throw Refused("no known kind");
}

// Of several kinds the last counts, as in protobuf.
Message read_frame(pbf_reader in, Descriptors& descriptors) {
  std::optional<std::pair<Kind, pbf_reader>> last;
  while (in.next()) {
    if (in.wire_type() == kBytes && in.tag() >= kBuffers && in.tag() <= kReleased) {
      const auto kind = static_cast<Kind>(in.tag());
      last.emplace(kind, in.get_message());
    } else {
      in.skip();
    }
  }
  if (!last) throw Refused("no known kind");
  return read_kind(last->first, last->second, descriptors);
}

}  // namespace

Encoded encode(Message message) {
  Encoded out;
  std::string body;
  pbf_writer fields(body);
  const Kind kind =
      std::visit([&](auto& kept) { return write(fields, kept, out.descriptors); }, message);
  pbf_writer(out.body).add_message(kind, body);
  return out;
}

Result<Message> decode(std::string_view body, std::vector<UniqueFd> descriptors) {
  Descriptors fds(std::move(descriptors));
  try {
    Message message = read_frame(pbf_reader(body.data(), body.size()), fds);
    fds.check_all_taken();
    return message;
  } catch (const protozero::exception& error) {
    return fail(ErrorCode::kInvalid, "a malformed bucket frame of {} bytes: {}", body.size(),
                error.what());
  }
}

}  // namespace rekindle::bucket
