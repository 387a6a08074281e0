#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "proto/agent.pb.h"
#include "proto/coordinator.pb.h"
#include "proto/worker.pb.h"
#include "recovery/worker/core/instance.h"
#include "recovery/worker/core/session.h"
#include "recovery/worker/event_log.h"
#include "recovery/worker/portion.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/layout.h"

// Between the worker's frames and our own types. What comes from a worker is checked here.
namespace rekindle::worker {

inline constexpr std::uint32_t kProtocol = 1;  // of WorkerHello; src/client has its own

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

// Of Attached what is the same for all who get it, encoded; and a session's AgentFrame around it.
std::string attached_words(const Checkpoint& checkpoint, const Layout& layout,
                           std::span<const TensorBox> wanted);
struct AttachedTo {
  std::uint64_t call = 0;
  SessionId session = 0;
  Rung rung = Rung::kLocal;
  std::size_t descriptors = 0;
  bool device_channel = false;
  std::string no_device_channel;
};
std::string attached_frame(const AttachedTo& own, std::string_view words);
proto::AgentFrame error_frame(std::uint64_t call, SessionId session, const Error& error);
proto::AgentFrame committed_frame(std::uint64_t call, const WorkerSession& session,
                                  std::uint64_t generation, TimePoint now);
proto::WorkerSession status_of(const WorkerSession& session, std::uint32_t rank, std::uint32_t pid,
                               TimePoint now);
proto::Updated updated_from(const proto::RoundStatus& round);
proto::AgentEvent to_proto(const Event& event);
std::uint64_t bytes_told(const WorkerSession& session);

}  // namespace rekindle::worker
