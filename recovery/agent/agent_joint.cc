#include "recovery/agent/agent_joint.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "recovery/rpc/methods.h"
#include "src/base/ids.h"

namespace rekindle::agent {

using async::Task;

namespace {

constexpr std::chrono::milliseconds kConnectWait{1000};
constexpr std::chrono::milliseconds kReportDeadline{10'000};
constexpr int kMostMissing = 16;

}  // namespace

Task<Result<proto::JointRoster>> AgentJoint::report_ranks(proto::JointReport report) {
  if (!parts_.link.configured()) co_return roster_of_this_host(report);
  CO_TRY(const auto client, co_await parts_.link.wait_connected(kConnectWait));
  report.set_node_id(parts_.identity.node_id);
  report.set_incarnation(parts_.identity.incarnation.to_bytes());
  co_return co_await rpc::call<proto::COORDINATOR_REPORT_JOINT>(client, std::move(report),
                                                                kReportDeadline);
}

proto::JointRoster AgentJoint::roster_of_this_host(const proto::JointReport& report) const {
  proto::JointRoster roster;
  for (std::uint32_t rank = 0; rank < report.world(); ++rank) {
    if (std::ranges::find(report.ranks(), rank) != report.ranks().end()) continue;
    if (roster.missing_size() < kMostMissing) roster.add_missing(rank);
    roster.set_missing_total(roster.missing_total() + 1);
  }
  if (roster.missing_total() > 0) return roster;
  std::uint64_t number = 0;
  // Any number will do, but an ended publication of the same version has another one.
  fill_random(&number, sizeof number);
  roster.set_number(number | 1);
  auto& host = *roster.add_hosts();
  *host.mutable_node() = self_();
  *host.mutable_ranks() = report.ranks();
  return roster;
}

Task<Result<void>> AgentJoint::claim(std::shared_ptr<const Checkpoint> checkpoint,
                                     std::vector<Digest> layouts) {
  co_return co_await publisher_.claim(std::move(checkpoint), std::nullopt, std::move(layouts));
}

Task<Result<void>> AgentJoint::serve(std::shared_ptr<const store::StoredVersion> stored) {
  co_return co_await sources_.commit(std::move(stored), "published");
}

Result<void> AgentJoint::check_not_retiring(const ModelVersion& id) const {
  return retirement_.check_not_retiring(id);
}

}  // namespace rekindle::agent
