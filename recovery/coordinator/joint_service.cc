#include "recovery/coordinator/joint_service.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "recovery/coordinator/coordinator_wire.h"
#include "recovery/trace/trace_wire.h"
#include "src/base/log.h"

namespace rekindle::coordinator {

namespace {

constexpr std::chrono::milliseconds kLongestRosterWait{5000};
// Of one publication. The spans of agents that they have no room for are not asked for.
constexpr std::size_t kMostHostSpans = 32;

}  // namespace

JointService::JointService(boost::asio::any_io_executor executor, Core& core,
                           std::function<Result<void>()> may_answer, trace::Tracer* tracer)
    : core_(core), gate_(std::move(may_answer)), changed_(std::move(executor)), tracer_(tracer) {}

void JointService::attach(rpc::RpcServer& server) {
  gate_.serve(server, proto::COORDINATOR_REPORT_JOINT, [this](rpc::Peer peer, std::string body) {
    return report(std::move(peer), std::move(body));
  });
}

void record_roster(trace::Tracer& tracer, const ModelVersion& id, const JointRoster& roster) {
  if (roster.hosts.empty()) return;
  const auto publication =
      trace::publication_context(id, roster.number, roster.hosts.front().node.incarnation);
  const TimePoint now = steady_now();
  const auto complete =
      tracer.record("roster_complete", publication, now, now,
                    {{std::string(trace::kOperation), std::string("publish")},
                     {std::string(trace::kSubject), id.to_string()},
                     {"rekindle.hosts", static_cast<std::int64_t>(roster.hosts.size())}});
  // Few spans: each pushes out one of another operation.
  std::vector<std::string> lists(1);
  for (const auto& host : roster.hosts) {
    if (lists.back().size() + host.node.node_id.size() >= trace::kMostTextBytes)
      lists.push_back({});
    if (!lists.back().empty()) lists.back() += ' ';
    lists.back() += host.node.node_id;
  }
  lists.resize(std::min(lists.size(), kMostHostSpans));
  for (std::string& names : lists) {
    tracer.record("hosts", complete, now, now, {{std::string(trace::kSources), std::move(names)}});
  }
}

void JointService::wake_waiters() {
  const std::uint64_t revision = core_.joint_rosters().revision();
  if (std::exchange(seen_revision_, revision) != revision) changed_.notify();
}

async::Task<Result<std::string>> JointService::report(rpc::Peer peer, std::string body) {
  CO_TRY(const auto request, rpc::parse_body<proto::JointReport>(body));
  CO_TRY_VOID(check_speaker(peer, request.node_id(), request.incarnation()));
  CO_TRY(const JointReport report, from_proto(request));
  const TimePoint until =
      steady_now() +
      std::min<Duration>(std::chrono::milliseconds(request.wait_ms()), kLongestRosterWait);
  const bool was_complete = core_.joint_rosters().is_complete(report.id);
  CO_TRY_VOID(core_.report_joint(report, steady_now()));
  if (!was_complete && core_.joint_rosters().is_complete(report.id)) {
    log::info("joint.complete", "version", report.id.to_string(), "world", report.world, "roster",
              core_.joint_rosters().roster_of(report.id).number);
    if (tracer_ != nullptr) {
      record_roster(*tracer_, report.id, core_.joint_rosters().roster_of(report.id));
    }
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
