#include <algorithm>
#include <utility>

#include "recovery/coordinator/wire.h"
#include "recovery/rpc/convert.h"

// Heartbeats, ranks, draining.
namespace rekindle::coordinator {

namespace {

constexpr int kMaxListed = 4096;  // versions in one heartbeat
constexpr std::size_t kMaxWhyBytes = 512;

Result<RankState> from_proto(proto::RankState state) {
  switch (state) {
    case proto::RANK_ATTACHED:
      return RankState::kAttached;
    case proto::RANK_LOADED:
      return RankState::kLoaded;
    case proto::RANK_FAILED:
      return RankState::kFailed;
    case proto::RANK_GONE:
      return RankState::kGone;
    default:
      return fail(ErrorCode::kInvalid, "rank state {} is not known", static_cast<int>(state));
  }
}

proto::InstanceState to_proto(InstanceState state) {
  switch (state) {
    case InstanceState::kLoading:
      return proto::INSTANCE_LOADING;
    case InstanceState::kCommitted:
      return proto::INSTANCE_COMMITTED;
    case InstanceState::kUnfit:
      return proto::INSTANCE_UNFIT;
  }
  return proto::INSTANCE_UNFIT;
}

}  // namespace

Result<Heartbeat> from_proto(const proto::HeartbeatRequest& message) {
  if (message.readers_size() > kMaxListed || message.failed_fetches_size() > kMaxListed ||
      message.fetching_size() > kMaxListed) {
    return fail(ErrorCode::kInvalid, "a heartbeat with more than {} versions", kMaxListed);
  }
  Heartbeat heartbeat;
  heartbeat.epoch = message.epoch();
  heartbeat.progress = message.progress();
  heartbeat.store_free_bytes = message.store_free_bytes();
  for (const auto& entry : message.readers()) {
    TRY(ModelVersion id, rpc::from_proto(entry.id()));
    heartbeat.readers[std::move(id)] = entry.readers();
  }
  for (const auto& failed : message.failed_fetches()) {
    TRY(ModelVersion id, rpc::from_proto(failed));
    heartbeat.failed_fetches.push_back(std::move(id));
  }
  for (const auto& running : message.fetching()) {
    TRY(ModelVersion id, rpc::from_proto(running));
    heartbeat.fetching.push_back(std::move(id));
  }
  return heartbeat;
}

proto::HeartbeatResponse to_proto(const HeartbeatAnswer& answer) {
  proto::HeartbeatResponse response;
  response.set_epoch(answer.epoch);
  response.set_coordinator_time_ms(answer.coordinator_time_ms);
  for (const auto& id : answer.retire) *response.add_retire() = rpc::to_proto(id);
  for (const auto& id : answer.retiring) *response.add_retiring() = rpc::to_proto(id);
  for (const auto& fetch : answer.fetch) {
    auto& message = *response.add_fetch();
    *message.mutable_id() = rpc::to_proto(fetch.id);
    *message.mutable_root() = rpc::to_proto(fetch.root);
    message.set_max_bytes_per_second(fetch.max_bytes_per_second);
  }
  response.set_drained(answer.drained);
  return response;
}

Result<RankReport> from_proto(const proto::RankReport& message) {
  TRY_VOID(check_text("a node id", message.node_id()));
  TRY_VOID(check_text("an instance's name", message.instance()));
  TRY_VOID(check_model_name(message.model()));
  RankReport report;
  report.node_id = message.node_id();
  TRY(report.incarnation, Incarnation::from_bytes(message.incarnation()));
  report.instance = message.instance();
  report.generation = message.generation();
  report.rank = message.rank();
  report.world = message.world();
  report.model = message.model();
  if (!message.latest()) report.version = message.version();
  if (message.has_has()) {
    TRY(report.has, rpc::from_proto(message.has()));
  }
  TRY(report.state, from_proto(message.state()));
  report.sequence = message.sequence();
  report.why = message.why().substr(0, kMaxWhyBytes);
  return report;
}

proto::RankResponse to_proto(const InstanceAnswer& answer) {
  proto::RankResponse response;
  *response.mutable_id() = rpc::to_proto(answer.id);
  response.set_state(to_proto(answer.state));
  response.set_loaded(answer.loaded);
  response.set_world(answer.world);
  response.set_why(answer.why);
  return response;
}

proto::DrainResponse to_proto(const Draining& draining) {
  proto::DrainResponse response;
  response.set_pullers(static_cast<std::uint32_t>(draining.readers));
  for (const auto& id : draining.sole_copies) *response.add_sole_copies() = rpc::to_proto(id);
  return response;
}

}  // namespace rekindle::coordinator
