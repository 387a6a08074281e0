#include <algorithm>
#include <chrono>
#include <utility>

#include "recovery/coordinator/service.h"
#include "recovery/coordinator/wire_rounds.h"
#include "recovery/rpc/convert.h"

// Broadcast rounds: calls that wait for what the core decides.
namespace rekindle::coordinator {

namespace {

constexpr std::chrono::milliseconds kLongestWait{5000};
constexpr std::chrono::milliseconds kLongestGather{600'000};
constexpr Duration kGraceWait = std::chrono::milliseconds(2500);  // of callers that say nothing

TimePoint now() { return std::chrono::steady_clock::now(); }

Duration wait_of(std::uint32_t wait_ms) {
  return std::min<Duration>(std::chrono::milliseconds(wait_ms), kLongestWait);
}

}  // namespace

void Service::wake_waiters() {
  const std::uint64_t revision = core_.rounds().revision();
  if (std::exchange(told_revision_, revision) == revision) return;
  round_log_.look(core_.rounds());
  rounds_changed_.notify();
}

proto::RoundOrders Service::orders_of(const std::string& node_id) const {
  return to_proto(core_.rounds().orders_for(node_id));
}

async::Task<Result<std::string>> Service::report_round(rpc::Peer peer, std::string body) {
  CO_TRY(const auto request, rpc::parse_body<proto::RoundReport>(body));
  CO_TRY_VOID(check_speaker(peer, request.incarnation()));
  CO_TRY(RoundReport report, from_proto(request));
  report.wait = wait_of(request.wait_ms());
  const TimePoint until = now() + report.wait;
  const bool heard_all = core_.rounds().revision() == request.seen();
  const bool waits = request.wait_ms() > 0;
  const std::string told = waits ? orders_of(report.node_id).SerializeAsString() : std::string();
  CO_TRY_VOID(core_.report_round(report, now()));
  wake_waiters();
  proto::RoundOrders orders = orders_of(report.node_id);
  // What changes elsewhere is no reason to answer this node.
  while (waits && heard_all && now() < until && orders.SerializeAsString() == told) {
    co_await rounds_changed_.wait_until(until);
    orders = orders_of(report.node_id);
  }
  orders.set_revision(core_.rounds().revision());
  co_return orders.SerializeAsString();
}

// Not before the agents had the grace to report: members that are not known would be missed.
async::Task<Result<std::string>> Service::begin_update(std::string body) {
  CO_TRY(const auto request, rpc::parse_body<proto::BeginUpdateRequest>(body));
  CO_TRY(const ModelVersion id, rpc::from_proto(request.id()));
  CO_TRY_VOID(check_text("a group", request.group()));
  const std::chrono::milliseconds gather(request.gather_ms());
  if (gather > kLongestGather) {
    co_return fail(ErrorCode::kInvalid, "update {}: gathering for {} ms; at most {} ms are allowed",
                   id.to_string(), gather.count(), kLongestGather.count());
  }
  const Duration wait = request.wait_ms() == 0 ? kGraceWait : wait_of(request.wait_ms());
  const TimePoint until = now() + wait;
  while (core_.in_grace(now()) && now() < until) {
    co_await rounds_changed_.wait_until(std::min(until, core_.grace_until()));
  }
  CO_TRY(const RoundId round,
         core_.begin_update(id, request.group(),
                            gather.count() == 0 ? std::nullopt : std::optional<Duration>(gather),
                            now()));
  wake_waiters();
  proto::BeginUpdateResponse response;
  response.set_round(round);
  co_return response.SerializeAsString();
}

async::Task<Result<std::string>> Service::update_status(std::string body) {
  CO_TRY(const auto request, rpc::parse_body<proto::UpdateStatusRequest>(body));
  const TimePoint until = now() + wait_of(request.wait_ms());
  for (;;) {
    const Round* round = core_.rounds().find(request.round());
    if (round == nullptr) {
      co_return fail(ErrorCode::kNotFound,
                     "round {} is not known here: the coordinator has started since, or the round "
                     "was over long ago",
                     request.round());
    }
    const TimePoint at = now();
    if (round->over() || at >= until) co_return to_proto(*round, at).SerializeAsString();
    co_await rounds_changed_.wait_until(until);
  }
}

}  // namespace rekindle::coordinator
