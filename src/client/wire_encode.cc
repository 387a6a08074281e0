#include <protozero/pbf_writer.hpp>

#include "src/client/wire.h"

namespace rekindle::client {

namespace {

using protozero::pbf_writer;

void add_list(pbf_writer& out, protozero::pbf_tag_type tag,
              const std::vector<std::uint64_t>& values) {
  out.add_packed_uint64(tag, values.begin(), values.end());
}

void add_version(pbf_writer& out, protozero::pbf_tag_type tag, const ModelVersion& id) {
  pbf_writer field(out, tag);
  field.add_string(1, id.model);
  field.add_uint64(2, id.version);
}

// One per kind of request: its fields, without its number in WorkerFrame.
void write(pbf_writer& out, const HelloRequest& hello) {
  out.add_uint32(1, hello.protocol_min);
  out.add_uint32(2, hello.protocol_max);
  out.add_string(3, hello.software);
  out.add_uint32(4, hello.pid);
}

void write(pbf_writer& out, const AttachRequest& attach) {
  out.add_string(1, attach.model);
  out.add_bool(2, !attach.version.has_value());
  out.add_uint64(3, attach.version.value_or(0));
  out.add_string(4, attach.shard);
  out.add_string(5, attach.spec_json);
  for (const WantedBox& box : attach.boxes) {
    pbf_writer field(out, 6);
    field.add_string(1, box.tensor);
    add_list(field, 2, box.offset);
    add_list(field, 3, box.extent);
  }
  out.add_string(7, attach.instance);
  out.add_uint64(8, attach.generation);
  out.add_uint32(9, attach.rank);
  out.add_uint32(10, attach.world);
  out.add_string(11, attach.fallback_dir);
  if (!attach.device.empty()) out.add_string(13, attach.device);
  if (attach.bucket_bytes > 0) out.add_uint64(14, attach.bucket_bytes);
  if (!attach.group.empty()) out.add_string(15, attach.group);
}

void write(pbf_writer& out, const LoadedRequest& loaded) { out.add_uint64(1, loaded.bytes); }
void write(pbf_writer& out, const WatchRequest& watch) { add_version(out, 1, watch.have); }

void write(pbf_writer& out, const PublishBeginRequest& begin) {
  add_version(out, 1, begin.id);
  for (const PublishTensor& tensor : begin.tensors) {
    pbf_writer field(out, 2);
    field.add_string(1, tensor.name);
    field.add_string(2, tensor.dtype);
    add_list(field, 3, tensor.shape);
  }
}

void write(pbf_writer&, const DetachRequest&) {}
void write(pbf_writer&, const PingRequest&) {}
void write(pbf_writer&, const PublishCommitRequest&) {}
void write(pbf_writer&, const PublishAbandonRequest&) {}

void write(pbf_writer& out, const UpdateRequest& update) {
  add_version(out, 1, update.id);
  out.add_string(2, update.group);
  out.add_uint32(3, update.gather_ms);
}

// In the order of Request: the numbers of WorkerFrame.kind.
constexpr protozero::pbf_tag_type kFirstKind = 10;

}  // namespace

std::string encode(const RequestHeader& header, const Request& request) {
  std::string bytes;
  pbf_writer out(bytes);
  out.add_uint64(1, header.call);
  out.add_uint64(2, header.session);
  out.add_uint32(3, header.deadline_ms);
  const auto kind = static_cast<protozero::pbf_tag_type>(request.index()) + kFirstKind;
  // Made apart: protozero takes a nested message that stays empty back, and kinds may be empty.
  std::string body;
  pbf_writer fields(body);
  std::visit([&fields](const auto& message) { write(fields, message); }, request);
  out.add_message(kind, body);
  return bytes;
}

}  // namespace rekindle::client
