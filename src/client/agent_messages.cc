#include "src/client/agent_messages.h"

#include "src/bucket/proto_fields.h"

namespace rekindle {

constexpr auto fields_of(const ModelVersion*) {
  return pbf::fields(pbf::field(1, &ModelVersion::model), pbf::field(2, &ModelVersion::version));
}

namespace bucket {

constexpr auto fields_of(const NamedBox*) {
  return pbf::fields(pbf::field(1, &NamedBox::tensor), pbf::field(2, &NamedBox::offset),
                     pbf::field(3, &NamedBox::extent));
}

}  // namespace bucket

// IndexRanges has the begins in one list and the ends in another.
struct IndexRanges {
  std::vector<std::uint64_t> begin;
  std::vector<std::uint64_t> end;
};
constexpr auto fields_of(const IndexRanges*) {
  return pbf::fields(pbf::field(1, &IndexRanges::begin), pbf::field(2, &IndexRanges::end));
}

template <>
struct pbf::Codec<TileRuns> {
  static constexpr auto kWire = pbf_wire_type::length_delimited;
  static void add(pbf_writer& out, pbf_tag_type number, const TileRuns& runs) {
    IndexRanges ranges;
    for (const auto& [begin, end] : runs) {
      ranges.begin.push_back(begin);
      ranges.end.push_back(end);
    }
    Codec<IndexRanges>::add(out, number, ranges);
  }
  static void take(pbf_reader& in, TileRuns& runs) {
    IndexRanges ranges;
    Codec<IndexRanges>::take(in, ranges);
    if (ranges.begin.size() != ranges.end.size()) throw Refused("ranges of tiles without an end");
    for (std::size_t i = 0; i < ranges.begin.size(); ++i) {
      runs.emplace_back(static_cast<TileIndex>(ranges.begin[i]),
                        static_cast<TileIndex>(ranges.end[i]));
    }
  }
};

namespace client {

using pbf::field;
using pbf::fields;

constexpr pbf::pbf_tag_type kFirstKind = 10;

// --- worker -> agent

constexpr auto fields_of(const RequestHeader*) {
  return fields(field(1, &RequestHeader::call), field(2, &RequestHeader::session),
                field(3, &RequestHeader::deadline_ms));
}
constexpr auto fields_of(const HelloRequest*) {
  return fields(field(1, &HelloRequest::protocol_min), field(2, &HelloRequest::protocol_max),
                field(3, &HelloRequest::software), field(4, &HelloRequest::pid),
                field(5, &HelloRequest::pid_namespace));
}
constexpr auto fields_of(const AttachRequest*) {
  using Attach = AttachRequest;
  return fields(field(1, &Attach::model), field(2, &Attach::latest), field(3, &Attach::version),
                field(4, &Attach::shard), field(5, &Attach::spec_json), field(6, &Attach::boxes),
                field(7, &Attach::instance), field(8, &Attach::generation), field(9, &Attach::rank),
                field(10, &Attach::world), field(11, &Attach::fallback_dir),
                field(13, &Attach::device), field(14, &Attach::bucket_bytes),
                field(15, &Attach::group), field(16, &Attach::staged),
                field(17, &Attach::traceparent), field(18, &Attach::resident_key),
                field(19, &Attach::resident_shared));
}
constexpr auto fields_of(const PhaseTime*) {
  return fields(field(1, &PhaseTime::name), field(2, &PhaseTime::elapsed_us));
}
constexpr auto fields_of(const LoadedRequest*) { return fields(field(1, &LoadedRequest::bytes)); }
constexpr auto fields_of(const DetachRequest*) { return fields(); }
constexpr auto fields_of(const WatchRequest*) { return fields(field(1, &WatchRequest::have)); }
constexpr auto fields_of(const PingRequest*) { return fields(); }
constexpr auto fields_of(const PublishTensor*) {
  return fields(field(1, &PublishTensor::name), field(2, &PublishTensor::dtype),
                field(3, &PublishTensor::shape), field(4, &PublishTensor::offset),
                field(5, &PublishTensor::extent));
}
constexpr auto fields_of(const PublishBeginRequest*) {
  return fields(field(1, &PublishBeginRequest::id), field(2, &PublishBeginRequest::tensors),
                field(3, &PublishBeginRequest::world), field(4, &PublishBeginRequest::rank));
}
constexpr auto fields_of(const PublishWrittenRequest*) {
  return fields(field(1, &PublishWrittenRequest::segment));
}
constexpr auto fields_of(const PublishCommitRequest*) { return fields(); }
constexpr auto fields_of(const PublishAbandonRequest*) { return fields(); }
constexpr auto fields_of(const UpdateRequest*) {
  return fields(field(1, &UpdateRequest::id), field(2, &UpdateRequest::group),
                field(3, &UpdateRequest::gather_ms), field(4, &UpdateRequest::members));
}
constexpr auto fields_of(const BeginSwitchRequest*) { return fields(); }
constexpr auto fields_of(const PhasesReport*) {
  return fields(field(1, &PhasesReport::phases), field(2, &PhasesReport::ago_us));
}
constexpr auto fields_of(const SealResidentRequest*) {
  return fields(field(1, &SealResidentRequest::key), field(2, &SealResidentRequest::description),
                field(3, &SealResidentRequest::block_bytes),
                field(5, &SealResidentRequest::shared));
}
constexpr auto fields_of(const WatchOrdersRequest*) { return fields(); }
constexpr auto fields_of(const OrderResultRequest*) {
  return fields(field(1, &OrderResultRequest::order), field(2, &OrderResultRequest::error),
                field(3, &OrderResultRequest::phases));
}

// --- agent -> worker

constexpr auto fields_of(const HelloReply*) {
  return fields(field(1, &HelloReply::protocol), field(3, &HelloReply::client),
                field(4, &HelloReply::ping_interval_ms), field(5, &HelloReply::silence_ms),
                field(6, &HelloReply::keeps_residents), field(7, &HelloReply::gives_orders));
}
constexpr auto fields_of(const ResidentReply*) {
  return fields(field(1, &ResidentReply::description), field(2, &ResidentReply::block_bytes),
                field(3, &ResidentReply::shared));
}
constexpr auto fields_of(const AttachedReply*) {
  using Attached = AttachedReply;
  return fields(field(1, &Attached::id), field(3, &Attached::layout),
                field(4, &Attached::tensor_set), field(5, &Attached::segment_bytes),
                field(6, &Attached::ready), field(7, &Attached::rung), field(8, &Attached::wanted),
                field(9, &Attached::device_channel), field(10, &Attached::no_device_channel),
                field(11, &Attached::resident));
}
constexpr auto fields_of(const TilesReady*) {
  return fields(field(1, &TilesReady::ready), field(4, &TilesReady::complete),
                field(5, &TilesReady::rung));
}
constexpr auto fields_of(const CommittedReply*) { return fields(field(1, &CommittedReply::id)); }
constexpr auto fields_of(const NewVersion*) { return fields(field(1, &NewVersion::id)); }
constexpr auto fields_of(const PongReply*) { return fields(); }
constexpr auto fields_of(const PublishBegunReply*) {
  return fields(field(1, &PublishBegunReply::layout), field(2, &PublishBegunReply::segment_bytes),
                field(3, &PublishBegunReply::tensor_set));
}
constexpr auto fields_of(const PublishedReply*) { return fields(field(1, &PublishedReply::id)); }
constexpr auto fields_of(const DoneReply*) { return fields(); }
constexpr auto fields_of(const PhaseSummary*) {
  return fields(field(1, &PhaseSummary::name), field(2, &PhaseSummary::median_us),
                field(3, &PhaseSummary::p95_us), field(4, &PhaseSummary::slowest_us),
                field(5, &PhaseSummary::slowest));
}
constexpr auto fields_of(const UpdatedReply*) {
  using Updated = UpdatedReply;
  return fields(field(1, &Updated::members), field(2, &Updated::ready),
                field(3, &Updated::by_broadcast), field(4, &Updated::elapsed_ms),
                field(5, &Updated::why), field(6, &Updated::phases));
}
constexpr auto fields_of(const DamagedResident*) {
  return fields(field(1, &DamagedResident::tensors));
}
constexpr auto fields_of(const ServeVersion*) {
  return fields(field(1, &ServeVersion::model), field(2, &ServeVersion::latest),
                field(3, &ServeVersion::version));
}
constexpr auto fields_of(const OrderReply*) {
  return fields(field(1, &OrderReply::number), field(2, &OrderReply::damaged),
                field(3, &OrderReply::serve));
}
constexpr auto fields_of(const AgentMessage*) {
  return fields(field(1, &AgentMessage::call), field(2, &AgentMessage::session),
                field(3, &AgentMessage::descriptors), field(4, &AgentMessage::error),
                pbf::one_of(kFirstKind, &AgentMessage::reply));
}

std::string encode(const RequestHeader& header, const Request& request) {
  std::string bytes = pbf::serialize(header);
  protozero::pbf_writer out(bytes);
  pbf::add_kind(out, kFirstKind, request);
  return bytes;
}

Result<AgentMessage> decode(std::string_view frame) {
  TRY(AgentMessage message, pbf::parse<AgentMessage>(frame, "frame"));
  if (!message.error && message.reply.index() == 0) {
    return fail(ErrorCode::kInvalid, "a frame of {} bytes without a known kind", frame.size());
  }
  return message;
}

}  // namespace client

}  // namespace rekindle
