#include "recovery/coordinator/joint_service.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "recovery/coordinator/coordinator_wire.h"
#include "recovery/trace/trace_wire.h"
#include "src/base/log.h"

namespace rekindle::coordinator {

namespace {

constexpr std::chrono::milliseconds kLongestRosterWait{5000};
// Of one publication. The spans of more agents are not asked for.
constexpr std::size_t kMostHostSpans = 256;

}  // namespace

JointService::JointService(boost::asio::any_io_executor executor, Core& core,
                           std::function<Result<void>()> may_answer, trace::Tracer* tracer)
    : core_(core), gate_(std::move(may_answer)), changed_(std::move(executor)), tracer_(tracer) {}

void JointService::attach(rpc::RpcServer& server) {
  gate_.serve(server, proto::COORDINATOR_REPORT_JOINT, [this](rpc::Peer peer, std::string body) {
    return report(std::move(peer), std::move(body));
  });
}

void JointService::record(const ModelVersion& id, const JointRoster& roster) const {
  if (tracer_ == nullptr || roster.hosts.empty()) return;
  const auto publication =
      trace::publication_context(id, roster.number, roster.hosts.front().node.incarnation);
  const TimePoint now = steady_now();
  const auto complete =
      tracer_->record("roster_complete", publication, now, now,
                      {{std::string(trace::kOperation), std::string("publish")},
                       {std::string(trace::kSubject), id.to_string()},
                       {"rekindle.hosts", static_cast<std::int64_t>(roster.hosts.size())}});
  for (std::size_t i = 0; i < std::min(roster.hosts.size(), kMostHostSpans); ++i) {
    tracer_->record("host", complete, now, now,
                    {{std::string(trace::kSource), roster.hosts[i].node.node_id}});
  }
}

void JointService::wake_waiters() {
  const std::uint64_t revision = core_.joint_rosters().revision();
  if (std::exchange(seen_revision_, revision) != revision) changed_.notify();
}

async::Task<Result<std::string>> JointService::report(rpc::Peer peer, std::string body) {
  CO_TRY(const auto request, rpc::parse_body<proto::JointReport>(body));
  CO_TRY_VOID(check_speaker(peer, request.incarnation()));
  CO_TRY(const JointReport report, from_proto(request));
  const TimePoint until =
      steady_now() +
      std::min<Duration>(std::chrono::milliseconds(request.wait_ms()), kLongestRosterWait);
  const bool was_complete = core_.joint_rosters().is_complete(report.id);
  CO_TRY_VOID(core_.report_joint(report, steady_now()));
  if (!was_complete && core_.joint_rosters().is_complete(report.id)) {
    log::info("joint.complete", "version", report.id.to_string(), "world", report.world, "roster",
              core_.joint_rosters().roster_of(report.id).number);
    record(report.id, core_.joint_rosters().roster_of(report.id));
  }
  wake_waiters();
  const JointRosters& rosters = core_.joint_rosters();
  while (rosters.stands(report) && !rosters.is_complete(report.id) && steady_now() < until) {
    co_await changed_.wait_until(until);
  }
  // The node has left, or its report was lost meanwhile and it must report again.
  if (!rosters.stands(report)) co_return proto::JointRoster().SerializeAsString();
  co_return to_proto(rosters.roster_of(report.id)).SerializeAsString();
}

}  // namespace rekindle::coordinator
