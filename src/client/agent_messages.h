#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/bucket/contents.h"

// proto/worker.proto as plain structures. They are read and written without libprotobuf, because a
// worker is often a Python process that has another libprotobuf loaded. The field numbers are those
// of the .proto file; tests/client/agent_messages_test.cc compares with the generated code.
namespace rekindle::client {

using WantedBox = bucket::NamedBox;

// --- worker -> agent

struct HelloRequest {
  std::uint32_t protocol_min = 1;
  std::uint32_t protocol_max = 1;
  std::string software;
  std::uint32_t pid = 0;
  std::uint64_t pid_namespace = 0;  // 0: unknown
};
struct AttachRequest {
  std::string model;
  bool latest = false;
  // Set when not `latest`.
  std::uint64_t version = 0;
  std::string shard;
  std::string spec_json;
  std::vector<WantedBox> boxes;
  std::string instance;
  std::uint64_t generation = 0;
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
  std::string fallback_dir;
  // Id of the device on which buckets shall land; "": none.
  std::string device;
  // 0: the agent chooses.
  std::uint64_t bucket_bytes = 0;
  // The worker takes part in the rounds of this group; "": in none.
  std::string group;
  // It takes its rank of the instance with a BeginSwitchRequest.
  bool staged = false;
  // The W3C trace context that the attach belongs to; "": none.
  std::string traceparent;
  // The worker takes the resident copy with this key and nothing else; "": it takes none.
  std::string resident_key;
  // It only reads that copy, as other workers do at the same time.
  bool resident_shared = false;
};
// A phase of an update, and how long it took.
struct PhaseTime {
  std::string name;
  std::uint64_t elapsed_us = 0;
};
struct LoadedRequest {
  std::uint64_t bytes = 0;
};
struct DetachRequest {};
struct WatchRequest {
  ModelVersion have;
};
struct PingRequest {};
struct PublishTensor {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape;
  // Of a joint publication: the rank's box. Empty: the whole tensor.
  std::vector<std::uint64_t> offset;
  std::vector<std::uint64_t> extent;
};
struct PublishBeginRequest {
  ModelVersion id;
  std::vector<PublishTensor> tensors;
  // Above 0: a joint publication by so many ranks.
  std::uint32_t world = 0;
  std::uint32_t rank = 0;
};
struct PublishWrittenRequest {
  std::uint32_t segment = 0;
};
struct PublishCommitRequest {};
struct PublishAbandonRequest {};
struct UpdateRequest {
  ModelVersion id;
  // "": all groups.
  std::string group;
  std::uint32_t gather_ms = 0;
  std::uint32_t members = 0;
};

struct BeginSwitchRequest {};
struct PhasesReport {
  std::vector<PhaseTime> phases;
  std::vector<std::uint64_t> ago_us;  // of each phase, or none
};
// The blocks come as descriptors.
struct SealResidentRequest {
  std::string key;
  std::string description;
  std::vector<std::uint64_t> block_bytes;
  // The worker only reads the blocks from now on.
  bool shared = false;
};

struct WatchOrdersRequest {};
struct OrderResultRequest {
  std::uint64_t order = 0;
  // Unset: done.
  std::optional<Error> error;
  std::vector<PhaseTime> phases;
};

// In the order of the numbers of WorkerFrame.kind.
using Request =
    std::variant<HelloRequest, AttachRequest, LoadedRequest, DetachRequest, WatchRequest,
                 PingRequest, PublishBeginRequest, PublishCommitRequest, PublishAbandonRequest,
                 UpdateRequest, PublishWrittenRequest, BeginSwitchRequest, PhasesReport,
                 SealResidentRequest, WatchOrdersRequest, OrderResultRequest>;

struct RequestHeader {
  std::uint64_t call = 0;
  std::uint64_t session = 0;
  // 0: none.
  std::uint32_t deadline_ms = 0;
};
std::string encode(const RequestHeader& header, const Request& request);

// --- agent -> worker

struct HelloReply {
  std::uint32_t protocol = 0;
  std::uint64_t client = 0;
  std::uint32_t ping_interval_ms = 0;
  std::uint32_t silence_ms = 0;
  // The agent takes a SealResidentRequest.
  bool keeps_residents = false;
  // It takes a WatchOrdersRequest.
  bool gives_orders = false;
};
// The descriptors are the blocks.
struct ResidentReply {
  std::string description;
  std::vector<std::uint64_t> block_bytes;
  // Other workers read the blocks.
  bool shared = false;
};
struct AttachedReply {
  ModelVersion id;
  // Megabytes: both point into the frame.
  std::string_view layout;
  std::string_view tensor_set;
  std::vector<std::uint64_t> segment_bytes;
  TileRuns ready;
  std::string rung;
  std::vector<WantedBox> wanted;
  // The last descriptor is a socket that speaks src/bucket/bucket_messages.h.
  bool device_channel = false;
  std::string no_device_channel;
  // Without blocks: the session has no resident copy.
  ResidentReply resident;
};
struct TilesReady {
  TileRuns ready;
  bool complete = false;
  std::string rung;
};
struct CommittedReply {
  ModelVersion id;
};
struct NewVersion {
  ModelVersion id;
};
struct PongReply {};
struct PublishBegunReply {
  std::string layout;
  std::vector<std::uint64_t> segment_bytes;
  // Of the whole version; empty unless the publication is joint.
  std::string tensor_set;
};
struct PublishedReply {
  ModelVersion id;
};
struct DoneReply {};
struct PhaseSummary {
  std::string name;
  std::uint64_t median_us = 0;
  std::uint64_t p95_us = 0;
  std::uint64_t slowest_us = 0;
  std::string slowest;
};
struct UpdatedReply {
  std::uint32_t members = 0;
  std::uint32_t ready = 0;
  std::uint32_t by_broadcast = 0;
  std::uint64_t elapsed_ms = 0;
  // Names the first worker that is not ready, and the reason.
  std::string why;
  std::vector<PhaseSummary> phases;
};

struct DamagedResident {
  std::vector<std::string> tensors;
};
struct ServeVersion {
  std::string model;
  bool latest = false;
  std::uint64_t version = 0;
};
// At most one of the kinds. None: an agent of a later release wants something else.
struct OrderReply {
  std::uint64_t number = 0;
  std::optional<DamagedResident> damaged;
  std::optional<ServeVersion> serve;
};

// In the order of the numbers of AgentFrame.kind.
using Reply =
    std::variant<std::monostate, HelloReply, AttachedReply, TilesReady, CommittedReply, NewVersion,
                 PongReply, PublishBegunReply, PublishedReply, DoneReply, UpdatedReply, OrderReply>;

struct AgentMessage {
  // 0: an event of `session`.
  std::uint64_t call = 0;
  std::uint64_t session = 0;
  std::uint32_t descriptors = 0;
  // Either `error` or `reply` is set.
  std::optional<Error> error;
  Reply reply;
};
// An AttachedReply points into `frame`. kInvalid: the frame is malformed, or has neither an error
// nor a reply that this library knows.
Result<AgentMessage> decode(std::string_view frame);

}  // namespace rekindle::client
