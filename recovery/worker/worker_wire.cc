#include "recovery/worker/worker_wire.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "recovery/rpc/convert.h"
#include "recovery/rpc/update_phases.h"
#include "src/base/units.h"
#include "src/bucket/bucket_plan.h"

namespace rekindle::worker {

namespace {

constexpr std::size_t kMostDeviceBytes = 128;
constexpr int kMostBoxes = 1 << 20;
constexpr std::size_t kMostTextBytes = 4096;
constexpr std::size_t kMostSpecBytes = 1 << 20;
constexpr std::size_t kMostGroupBytes = 128;
constexpr std::chrono::milliseconds kLongestGather{600'000};

Result<void> check_text(std::string_view what, const std::string& text) {
  if (text.size() <= kMostTextBytes && text.find('\0') == std::string::npos) return {};
  return fail(ErrorCode::kInvalid, "attach: {} has {} bytes, {} are allowed", what, text.size(),
              kMostTextBytes);
}

Result<void> check_group(const std::string& group) {
  if (group.size() <= kMostGroupBytes && group.find('\0') == std::string::npos) return {};
  return fail(ErrorCode::kInvalid, "the name of a group has {} bytes, {} are allowed", group.size(),
              kMostGroupBytes);
}

Result<std::vector<pull::NamedBox>> boxes_from(const proto::AttachRequest& request) {
  if (request.boxes_size() > kMostBoxes) {
    return fail(ErrorCode::kInvalid, "attach: {} boxes, {} are allowed", request.boxes_size(),
                kMostBoxes);
  }
  std::vector<pull::NamedBox> boxes;
  for (const auto& box : request.boxes()) {
    if (box.offset_size() != box.extent_size()) {
      return fail(ErrorCode::kInvalid, "attach: a box of '{}' has {} offsets and {} extents",
                  box.tensor(), box.offset_size(), box.extent_size());
    }
    const std::vector<std::uint64_t> offset(box.offset().begin(), box.offset().end());
    const std::vector<std::uint64_t> extent(box.extent().begin(), box.extent().end());
    pull::NamedBox named;
    named.tensor = box.tensor();
    TRY(named.offset, Dims::from(offset));
    TRY(named.extent, Dims::from(extent));
    boxes.push_back(std::move(named));
  }
  return boxes;
}

std::uint64_t microseconds(Duration duration) {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(duration).count());
}

void append_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

template <typename Message>
void add_phases(Message& message, const std::array<Duration, kPhaseCount>& took) {
  for (std::size_t i = 0; i < kPhaseCount; ++i) {
    auto* phase = message.add_phases();
    phase->set_name(std::string(to_string(static_cast<Phase>(i))));
    phase->set_elapsed_us(microseconds(took[i]));
  }
}

}  // namespace

Result<AttachOrder> from_proto(const proto::AttachRequest& request) {
  AttachOrder order;
  TRY_VOID(check_model_name(request.model()));
  TRY_VOID(check_text("the shard", request.shard()));
  TRY_VOID(check_text("the fallback directory", request.fallback_dir()));
  TRY_VOID(check_text("the transport", request.transport()));
  TRY_VOID(check_text("the device", request.device()));
  if (request.device().size() > kMostDeviceBytes) {
    return fail(ErrorCode::kInvalid, "attach: the device's name has {} bytes, {} are allowed",
                request.device().size(), kMostDeviceBytes);
  }
  TRY_VOID(check_group(request.group()));
  if (request.spec_json().size() > kMostSpecBytes) {
    return fail(ErrorCode::kInvalid, "attach: the spec has {} bytes, {} are allowed",
                request.spec_json().size(), kMostSpecBytes);
  }
  if (!request.fallback_dir().empty() && request.fallback_dir().front() != '/') {
    return fail(ErrorCode::kInvalid, "attach: the fallback directory '{}' is not absolute",
                request.fallback_dir());
  }
  if (!request.instance().empty()) TRY_VOID(check_instance_name(request.instance()));
  order.instance = request.instance();
  order.rank = {request.rank(), std::max(1u, request.world()), request.generation(),
                request.model()};
  if (request.instance().empty() && order.rank.world > 1) {
    return fail(ErrorCode::kInvalid, "attach: {} ranks need the name of their instance",
                order.rank.world);
  }
  if (order.rank.rank >= order.rank.world) {
    return fail(ErrorCode::kInvalid, "attach: rank {} of {}: ranks are counted from 0",
                order.rank.rank, order.rank.world);
  }
  if (!request.latest()) order.version = request.version();
  order.wanted.id.model = request.model();
  order.wanted.shard = request.shard();
  order.wanted.spec_json = request.spec_json();
  TRY(order.wanted.boxes, boxes_from(request));
  order.wanted.fallback_dir = request.fallback_dir();
  order.wanted.transport = request.transport();
  order.device = request.device();
  order.group = request.group();
  order.staged = request.staged();
  order.resident_key = request.resident_key();
  order.resident_shared = request.resident_shared();
  order.trace = trace::Context::parse(request.traceparent()).value_or(order.trace);
  order.bucket_bytes = request.bucket_bytes();
  if (order.bucket_bytes > bucket::kLargestBucket) {
    return fail(ErrorCode::kInvalid, "buckets of {}: {} are the most",
                format_bytes(order.bucket_bytes), format_bytes(bucket::kLargestBucket));
  }
  return order;
}

Result<UpdateOrder> from_proto(const proto::UpdateRequest& request) {
  UpdateOrder order;
  TRY(order.id, rpc::from_proto(request.id()));
  TRY_VOID(check_group(request.group()));
  order.group = request.group();
  order.gather = std::chrono::milliseconds(request.gather_ms());
  order.members = request.members();
  if (order.gather > kLongestGather) {
    return fail(ErrorCode::kInvalid, "an update that waits {} ms for its workers: {} are the most",
                request.gather_ms(), kLongestGather.count());
  }
  return order;
}

namespace {

Result<Dims> dims_from(const google::protobuf::RepeatedField<std::uint64_t>& values) {
  return Dims::from({values.data(), static_cast<std::size_t>(values.size())});
}

Result<TensorInfo> tensor_from(const proto::PublishTensor& tensor) {
  TensorInfo info;
  info.name = tensor.name();
  TRY(info.dtype, parse_dtype(tensor.dtype()));
  TRY(info.shape, dims_from(tensor.shape()));
  return info;
}

}  // namespace

Result<TensorSet> tensors_from(const proto::PublishBegin& request) {
  std::vector<TensorInfo> tensors;
  for (const auto& tensor : request.tensors()) {
    TRY(TensorInfo info, tensor_from(tensor));
    tensors.push_back(std::move(info));
  }
  return TensorSet::create(std::move(tensors));
}

Result<Declaration> declaration_from(const proto::PublishBegin& request) {
  std::map<std::string, DeclaredTensor> tensors;
  for (const auto& tensor : request.tensors()) {
    TRY(TensorInfo info, tensor_from(tensor));
    TRY_VOID(TensorSet::create({info}));
    Box box = Box::whole(info.shape);
    if (tensor.extent_size() > 0 || tensor.offset_size() > 0) {
      TRY(box.offset, dims_from(tensor.offset()));
      TRY(box.extent, dims_from(tensor.extent()));
      if (auto fits = check_box(box, info.shape); !fits) {
        return fail(ErrorCode::kInvalid, "rank {}: a box of '{}': {}", request.rank(), info.name,
                    fits.error().message());
      }
    }
    const auto [declared, fresh] =
        tensors.try_emplace(info.name, DeclaredTensor{info, std::vector<Box>()});
    if (!fresh && declared->second.info != info) {
      return fail(ErrorCode::kInvalid, "rank {} declares '{}' with two dtypes or shapes",
                  request.rank(), info.name);
    }
    declared->second.boxes.push_back(std::move(box));
  }
  Declaration declaration{request.rank(), {}};
  for (auto& [name, tensor] : tensors) {
    std::ranges::sort(tensor.boxes);
    declaration.tensors.push_back(std::move(tensor));
  }
  return declaration;
}

std::string encode_portion(const Checkpoint& checkpoint, const Layout& layout,
                           std::span<const TensorBox> wanted) {
  proto::Attached attached;
  *attached.mutable_id() = rpc::to_proto(checkpoint.id);
  *attached.mutable_root() = rpc::to_proto(checkpoint.root);
  attached.set_layout(layout.serialize());
  attached.set_tensor_set(checkpoint.tensors.serialize());
  for (const auto& segment : layout.segments()) attached.add_segment_bytes(segment.size_bytes);
  for (const auto& [tensor, box] : wanted) {
    auto* part = attached.add_wanted();
    part->set_tensor(checkpoint.tensors[tensor].name);
    for (const auto offset : box.offset.span()) part->add_offset(offset);
    for (const auto extent : box.extent.span()) part->add_extent(extent);
  }
  return attached.SerializeAsString();
}

// The encodings of a message's parts, one after the other, encode the whole message.
std::string attached_frame(const AttachedTo& own, std::string_view encoded_portion) {
  // Of a field that is a message.
  constexpr std::uint64_t kTag = proto::AgentFrame::kAttachedFieldNumber << 3 | 2;
  proto::AgentFrame frame;
  frame.set_call(own.call);
  frame.set_session(own.session);
  frame.set_descriptors(static_cast<std::uint32_t>(own.descriptors));
  proto::Attached attached;
  attached.set_rung(std::string(to_string(own.rung)));
  attached.set_device_channel(own.device_channel);
  attached.set_no_device_channel(own.no_device_channel);
  const std::string rest = attached.SerializeAsString();
  std::string out = frame.SerializeAsString();
  out.reserve(out.size() + encoded_portion.size() + rest.size() + 16);
  append_varint(out, kTag);
  append_varint(out, encoded_portion.size() + rest.size());
  return out.append(encoded_portion).append(rest);
}

// Layout and tensor set are empty ones: the description names the tensors.
proto::AgentFrame resident_frame(std::uint64_t call, SessionId session,
                                 proto::ResidentRecord record) {
  const auto none = TensorSet::create({});
  const auto layout = Layout::create(*none, {}, {});
  proto::AgentFrame frame;
  frame.set_call(call);
  frame.set_session(session);
  frame.set_descriptors(static_cast<std::uint32_t>(record.block_bytes_size()));
  auto& attached = *frame.mutable_attached();
  *attached.mutable_id() = record.id();
  *attached.mutable_root() = record.root();
  attached.set_tensor_set(none->serialize());
  attached.set_layout(layout->serialize());
  attached.set_rung(std::string(to_string(Rung::kResident)));
  *attached.mutable_resident()->mutable_block_bytes() = record.block_bytes();
  attached.mutable_resident()->set_shared(record.shared());
  attached.mutable_resident()->set_description(std::move(*record.mutable_description()));
  return frame;
}

proto::AgentFrame error_frame(std::uint64_t call, SessionId session, const Error& error) {
  proto::AgentFrame frame;
  frame.set_call(call);
  frame.set_session(session);
  *frame.mutable_error() = rpc::to_status(error);
  return frame;
}

proto::AgentFrame pong_frame(std::uint64_t call) {
  proto::AgentFrame frame;
  frame.set_call(call);
  frame.mutable_pong();
  return frame;
}

proto::AgentFrame done_frame(std::uint64_t call, SessionId session) {
  proto::AgentFrame frame;
  frame.set_call(call);
  frame.set_session(session);
  frame.mutable_done();
  return frame;
}

proto::AgentFrame ready_frame(const WorkerSession& session, const TileRuns& runs) {
  proto::AgentFrame frame;
  frame.set_session(session.id());
  auto& ready = *frame.mutable_ready();
  *ready.mutable_ready() = rpc::to_proto(runs);
  ready.set_bytes_done(session.announced_bytes());
  ready.set_bytes_total(session.payload_bytes());
  ready.set_complete(session.is_complete());
  ready.set_rung(std::string(to_string(session.rung())));
  return frame;
}

proto::AgentFrame committed_frame(std::uint64_t call, const WorkerSession& session,
                                  std::uint64_t generation, TimePoint now) {
  proto::AgentFrame frame;
  frame.set_call(call);
  frame.set_session(session.id());
  auto& committed = *frame.mutable_committed();
  *committed.mutable_id() = rpc::to_proto(session.version());
  committed.set_generation(generation);
  add_phases(committed, session.phases().at(now));
  return frame;
}

proto::WorkerSession status_of(const WorkerSession& session, std::uint32_t rank, std::uint32_t pid,
                               TimePoint now) {
  proto::WorkerSession status;
  status.set_session(session.id());
  status.set_rank(rank);
  status.set_pid(pid);
  status.set_state(std::string(to_string(session.state())));
  if (session.state() != SessionState::kResolving) {
    status.set_rung(std::string(to_string(session.rung())));
    status.set_bytes_done(session.announced_bytes());
    status.set_bytes_total(session.payload_bytes());
  }
  add_phases(status, session.phases().at(now));
  return status;
}

proto::Updated updated_from(const proto::RoundStatus& round) {
  proto::Updated updated;
  updated.set_members(static_cast<std::uint32_t>(round.members_size()));
  updated.set_elapsed_ms(round.elapsed_ms());
  std::uint32_t ready = 0;
  std::uint32_t by_broadcast = 0;
  for (const auto& member : round.members()) {
    if (member.state() == "ready") {
      ++ready;
      if (member.bytes() > 0 && member.spread_bytes() >= member.bytes()) ++by_broadcast;
    } else if (updated.why().empty()) {
      updated.set_why(fmt::format("{}: {}", rpc::name_of(member),
                                  member.why().empty() ? member.state() : member.why()));
    }
  }
  updated.set_ready(ready);
  updated.set_by_broadcast(by_broadcast);
  for (auto& phase : rpc::summarize_phases(round)) *updated.add_phases() = std::move(phase);
  return updated;
}

namespace {

template <typename Message>
Message event_message(const Event& event) {
  Message message;
  message.set_number(event.number);
  message.set_unix_us(static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(event.at.time_since_epoch()).count()));
  message.set_kind(event.kind);
  message.set_instance(event.instance);
  if (event.rank) message.set_rank(*event.rank);
  if (event.version) *message.mutable_id() = rpc::to_proto(*event.version);
  message.set_rung(event.rung);
  message.set_why(event.why);
  if (event.phases) add_phases(message, *event.phases);
  return message;
}

}  // namespace

proto::AgentEvent to_proto(const Event& event) {
  auto message = event_message<proto::AgentEvent>(event);
  message.set_session(event.session);
  message.set_pid(event.pid);
  if (event.start) {
    auto* phase = message.add_phases();
    phase->set_name("start");
    phase->set_elapsed_us(microseconds(*event.start));
  }
  return message;
}

proto::FleetEvent to_fleet_event(const Event& event) {
  return event_message<proto::FleetEvent>(event);
}

}  // namespace rekindle::worker
