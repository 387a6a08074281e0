#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "proto/agent.pb.h"
#include "proto/coordinator.pb.h"
#include "proto/resident.pb.h"
#include "proto/worker.pb.h"
#include "recovery/worker/core/instance.h"
#include "recovery/worker/core/worker_session.h"
#include "recovery/worker/event_log.h"
#include "recovery/worker/portion.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/joint_plan.h"
#include "src/tensor/layout.h"

// Conversions between the worker's frames and our own types. Input from a worker is validated here.
namespace rekindle::worker {

inline constexpr std::uint32_t kProtocol = 1;  // of WorkerHello; src/client has its own

struct AttachOrder {
  std::string instance;  // "": an instance of its own
  Instance::Rank rank;
  std::optional<std::uint64_t> version;  // nullopt: the newest
  Wanted wanted;                         // its version is 0 until it is chosen
  std::string device;                    // where it wants buckets; "": nowhere
  std::uint64_t bucket_bytes = 0;        // 0: the agent's choice
  std::string group;                     // whose rounds it takes part in; "": none
  // It takes its rank when it begins to switch.
  bool staged = false;
  // Of the resident copy that it takes. "": it takes none.
  std::string resident_key;
  // It shares that copy with other workers, which all only read it.
  bool resident_shared = false;
  // The parent of its recovery. Invalid: none.
  trace::Context trace;
};
struct UpdateOrder {
  ModelVersion id;
  std::string group;  // "": all
  std::chrono::milliseconds gather{};
  std::uint32_t members = 0;  // to wait for at least
};
Result<AttachOrder> from_proto(const proto::AttachRequest& request);
Result<UpdateOrder> from_proto(const proto::UpdateRequest& request);
Result<TensorSet> tensors_from(const proto::PublishBegin& request);
// Of a joint publication.
Result<Declaration> declaration_from(const proto::PublishBegin& request);

// Encodes the fields of Attached that are the same for every worker with this portion. The frame of
// one session adds its own fields.
std::string encode_portion(const Checkpoint& checkpoint, const Layout& layout,
                           std::span<const TensorBox> wanted);
struct AttachedTo {
  std::uint64_t call = 0;
  SessionId session = 0;
  Rung rung = Rung::kLocal;
  std::size_t descriptors = 0;
  bool device_channel = false;
  std::string no_device_channel;
};
std::string attached_frame(const AttachedTo& own, std::string_view encoded_portion);
proto::AgentFrame resident_frame(std::uint64_t call, SessionId session,
                                 proto::ResidentRecord record);
// `call` 0: an event, of a session that has ended.
proto::AgentFrame error_frame(std::uint64_t call, SessionId session, const Error& error);
proto::AgentFrame pong_frame(std::uint64_t call);
proto::AgentFrame done_frame(std::uint64_t call, SessionId session);
proto::AgentFrame ready_frame(const WorkerSession& session, const TileRuns& runs);
proto::AgentFrame committed_frame(std::uint64_t call, const WorkerSession& session,
                                  std::uint64_t generation, TimePoint now);
proto::WorkerSession status_of(const WorkerSession& session, std::uint32_t rank, std::uint32_t pid,
                               TimePoint now);
proto::Updated updated_from(const proto::RoundStatus& round);
proto::AgentEvent to_proto(const Event& event);
// For the coordinator.
proto::FleetEvent to_fleet_event(const Event& event);

}  // namespace rekindle::worker
