#include <limits>

#include <protozero/pbf_reader.hpp>

#include "src/bucket/pbf.h"
#include "src/client/wire.h"

namespace rekindle::client {

namespace {

using protozero::pbf_reader;
using protozero::tag_and_type;

using pbf::kBytes;
using pbf::kVarint;
using pbf::text;

template <typename Range, typename Out>
void append(const Range& range, Out& out) {
  for (const auto value : range) out.push_back(value);
}

ModelVersion read_version(pbf_reader in) {
  ModelVersion id;
  while (in.next()) {
    switch (in.tag_and_type()) {
      case tag_and_type(1, kBytes):
        id.model = text(in);
        break;
      case tag_and_type(2, kVarint):
        id.version = in.get_uint64();
        break;
      default:
        in.skip();
    }
  }
  return id;
}

// Throws what protozero throws for malformed input: decode() turns both into an Error.
TileRuns read_runs(pbf_reader in) {
  std::vector<std::uint32_t> begin;
  std::vector<std::uint32_t> end;
  while (in.next()) {
    switch (in.tag_and_type()) {
      case tag_and_type(1, kBytes):
        append(in.get_packed_uint32(), begin);
        break;
      case tag_and_type(2, kBytes):
        append(in.get_packed_uint32(), end);
        break;
      default:
        in.skip();
    }
  }
  if (begin.size() != end.size()) throw protozero::invalid_length_exception();
  TileRuns runs;
  runs.reserve(begin.size());
  for (std::size_t i = 0; i < begin.size(); ++i) runs.emplace_back(begin[i], end[i]);
  return runs;
}

WantedBox read_box(pbf_reader in) {
  WantedBox box;
  while (in.next()) {
    switch (in.tag_and_type()) {
      case tag_and_type(1, kBytes):
        box.tensor = text(in);
        break;
      case tag_and_type(2, kBytes):
        append(in.get_packed_uint64(), box.offset);
        break;
      case tag_and_type(3, kBytes):
        append(in.get_packed_uint64(), box.extent);
        break;
      default:
        in.skip();
    }
  }
  return box;
}

HelloReply read_hello(pbf_reader in) {
  HelloReply hello;
  while (in.next()) {
    switch (in.tag_and_type()) {
      case tag_and_type(1, kVarint):
        hello.protocol = in.get_uint32();
        break;
      case tag_and_type(3, kVarint):
        hello.client = in.get_uint64();
        break;
      case tag_and_type(4, kVarint):
        hello.ping_interval_ms = in.get_uint32();
        break;
      case tag_and_type(5, kVarint):
        hello.silence_ms = in.get_uint32();
        break;
      default:
        in.skip();
    }
  }
  return hello;
}

AttachedReply read_attached(pbf_reader in) {
  AttachedReply attached;
  while (in.next()) {
    switch (in.tag_and_type()) {
      case tag_and_type(1, kBytes):
        attached.id = read_version(in.get_message());
        break;
      case tag_and_type(3, kBytes):
        attached.layout = text(in);
        break;
      case tag_and_type(4, kBytes):
        attached.tensor_set = text(in);
        break;
      case tag_and_type(5, kBytes):
        append(in.get_packed_uint64(), attached.segment_bytes);
        break;
      case tag_and_type(6, kBytes):
        attached.ready = read_runs(in.get_message());
        break;
      case tag_and_type(7, kBytes):
        attached.rung = text(in);
        break;
      case tag_and_type(8, kBytes):
        attached.wanted.push_back(read_box(in.get_message()));
        break;
      case tag_and_type(9, kVarint):
        attached.device_channel = in.get_bool();
        break;
      case tag_and_type(10, kBytes):
        attached.no_device_channel = text(in);
        break;
      default:
        in.skip();
    }
  }
  return attached;
}

TilesReady read_ready(pbf_reader in) {
  TilesReady ready;
  while (in.next()) {
    switch (in.tag_and_type()) {
      case tag_and_type(1, kBytes):
        ready.ready = read_runs(in.get_message());
        break;
      case tag_and_type(4, kVarint):
        ready.complete = in.get_bool();
        break;
      case tag_and_type(5, kBytes):
        ready.rung = text(in);
        break;
      default:
        in.skip();
    }
  }
  return ready;
}

PublishBegunReply read_begun(pbf_reader in) {
  PublishBegunReply begun;
  while (in.next()) {
    switch (in.tag_and_type()) {
      case tag_and_type(1, kBytes):
        begun.layout = text(in);
        break;
      case tag_and_type(2, kBytes):
        append(in.get_packed_uint64(), begun.segment_bytes);
        break;
      default:
        in.skip();
    }
  }
  return begun;
}

UpdatedReply read_updated(pbf_reader in) {
  UpdatedReply updated;
  while (in.next()) {
    switch (in.tag_and_type()) {
      case tag_and_type(1, kVarint):
        updated.members = in.get_uint32();
        break;
      case tag_and_type(2, kVarint):
        updated.ready = in.get_uint32();
        break;
      case tag_and_type(3, kVarint):
        updated.by_broadcast = in.get_uint32();
        break;
      case tag_and_type(4, kVarint):
        updated.elapsed_ms = in.get_uint64();
        break;
      case tag_and_type(5, kBytes):
        updated.why = text(in);
        break;
      default:
        in.skip();
    }
  }
  return updated;
}

// Committed, NewVersion and Published begin with their ModelVersion.
ModelVersion read_first_version(pbf_reader in) {
  ModelVersion id;
  while (in.next()) {
    if (in.tag_and_type() == tag_and_type(1, kBytes)) {
      id = read_version(in.get_message());
    } else {
      in.skip();
    }
  }
  return id;
}

std::optional<Error> read_status(pbf_reader in) {
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
  if (code == 0) return std::nullopt;
  // StatusCode is ErrorCode + 1; what a newer agent may add is something that failed there.
  constexpr auto kLast = static_cast<std::uint32_t>(ErrorCode::kInternal) + 1;
  const auto known = code <= kLast ? static_cast<ErrorCode>(code - 1) : ErrorCode::kInternal;
  return Error(known, std::move(message));
}

Reply read_kind(pbf_reader& in) {
  switch (in.tag()) {
    case 10:
      return read_hello(in.get_message());
    case 11:
      return read_attached(in.get_message());
    case 12:
      return read_ready(in.get_message());
    case 13:
      return CommittedReply{read_first_version(in.get_message())};
    case 14:
      return NewVersion{read_first_version(in.get_message())};
    case 15:
      in.skip();
      return PongReply{};
    case 16:
      return read_begun(in.get_message());
    case 17:
      return PublishedReply{read_first_version(in.get_message())};
    case 18:
      in.skip();
      return DoneReply{};
    case 19:
      return read_updated(in.get_message());
    default:
      in.skip();
      return std::monostate{};
  }
}

AgentMessage read_frame(pbf_reader in) {
  AgentMessage message;
  while (in.next()) {
    switch (in.tag_and_type()) {
      case tag_and_type(1, kVarint):
        message.call = in.get_uint64();
        break;
      case tag_and_type(2, kVarint):
        message.session = in.get_uint64();
        break;
      case tag_and_type(3, kVarint):
        message.descriptors = in.get_uint32();
        break;
      case tag_and_type(4, kBytes):
        message.error = read_status(in.get_message());
        break;
      default:
        if (in.wire_type() == kBytes) {
          if (Reply reply = read_kind(in); reply.index() != 0) message.reply = std::move(reply);
        } else {
          in.skip();
        }
    }
  }
  return message;
}

}  // namespace

Result<AgentMessage> decode(std::string_view frame) {
  try {
    AgentMessage message = read_frame(pbf_reader(frame.data(), frame.size()));
    if (!message.error && message.reply.index() == 0) {
      return fail(ErrorCode::kInvalid, "a frame of {} bytes without a known kind", frame.size());
    }
    return message;
  } catch (const protozero::exception& error) {
    return fail(ErrorCode::kInvalid, "a malformed frame of {} bytes: {}", frame.size(),
                error.what());
  }
}

}  // namespace rekindle::client
