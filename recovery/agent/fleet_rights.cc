#include "recovery/agent/fleet_rights.h"

#include <utility>

#include <fmt/ranges.h>

#include "recovery/rpc/methods.h"
#include "src/base/log.h"

namespace rekindle::agent {

namespace {

constexpr std::chrono::milliseconds kAskDeadline{1000};
// A change of the rights file takes effect within this time.
constexpr std::chrono::seconds kFresh{5};
constexpr std::size_t kMostAnswers = 1024;

std::string who(const rpc::Peer& peer) {
  if (peer.principals.empty()) return fmt::format("{} without an identity", peer.address);
  return fmt::format("{}", fmt::join(peer.principals, " "));
}

}  // namespace

Result<void> FleetRights::judge(const rpc::Peer& peer, const std::string& model,
                                const proto::AuthorizeResponse& said) const {
  if (said.allowed()) return {};
  return fail(ErrorCode::kDenied, "{} may not read {}: {}", who(peer), model, said.why());
}

async::Task<Result<void>> FleetRights::may_read(rpc::Peer peer, std::string model) {
  if (!link_.configured()) co_return Result<void>();
  const Question question{fmt::format("{}", fmt::join(peer.principals, "\n")), model};
  const auto known = answers_.find(question);
  if (known != answers_.end() && steady_now() - known->second.at < kFresh) {
    co_return judge(peer, model, known->second.said);
  }
  proto::AuthorizeRequest request;
  for (const auto& principal : peer.principals) request.add_principals(principal);
  request.set_verb("read");
  request.set_model(model);
  Result<proto::AuthorizeResponse> said = fail(link_.problem());
  if (const auto client = link_.client(); client != nullptr) {
    auto asking = rpc::call<proto::AUTHORIZE>(client, std::move(request), kAskDeadline, peer.trace);
    said = co_await std::move(asking);
  }
  if (said) {
    if (answers_.size() >= kMostAnswers) answers_.clear();
    answers_[question] = {*said, steady_now()};
    unrestricted_ = said->unrestricted();
    co_return judge(peer, model, *said);
  }
  // A coordinator of an earlier release has no rights file.
  if (said.error().code() == ErrorCode::kInvalid) co_return Result<void>();
  // Others may have asked meanwhile.
  const auto last = answers_.find(question);
  if (last != answers_.end()) co_return judge(peer, model, last->second.said);
  if (unrestricted_) co_return Result<void>();
  co_return fail(
      ErrorCode::kUnavailable,
      "cannot ask the coordinator whether {} may read {} ({}): try again when it answers",
      who(peer), model, said.error().message());
}

}  // namespace rekindle::agent
