#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "proto/agent.pb.h"
#include "proto/coordinator.pb.h"
#include "proto/worker.pb.h"
#include "recovery/worker/core/instance.h"
#include "recovery/worker/core/session.h"
#include "recovery/worker/event_log.h"
#include "recovery/worker/supply.h"
#include "src/tensor/layout.h"

// Between the worker's frames and our own types. What comes from a worker is checked here.
namespace rekindle::worker {

struct AttachOrder {
  std::string instance;  // "" = one of its own
  Instance::Rank rank;
  std::optional<std::uint64_t> version;  // nullopt: the newest
  Wanted wanted;                         // version 0 until it is chosen
  std::string device;                    // that buckets are wanted on; "" = none
  std::uint64_t bucket_bytes = 0;        // 0: the agent's choice
  std::string group;                     // whose rounds it takes part in; "" = none
};
struct UpdateOrder {
  ModelVersion id;
  std::string group;  // "" = all
  std::chrono::milliseconds gather{};
};
Result<AttachOrder> from_proto(const proto::AttachRequest& request);
Result<UpdateOrder> from_proto(const proto::UpdateRequest& request);
Result<TensorSet> tensors_from(const proto::PublishBegin& request);

proto::AgentFrame attached_frame(std::uint64_t call, SessionId session, const Supply::View& view);
proto::AgentFrame error_frame(std::uint64_t call, SessionId session, const Error& error);
proto::AgentFrame committed_frame(std::uint64_t call, const WorkerSession& session,
                                  std::uint64_t generation, TimePoint now);
proto::WorkerSession status_of(const WorkerSession& session, std::uint32_t rank, std::uint32_t pid,
                               TimePoint now);
proto::Updated updated_from(const proto::RoundStatus& round);
proto::AgentEvent to_proto(const Event& event);
std::uint64_t bytes_told(const WorkerSession& session);

}  // namespace rekindle::worker
