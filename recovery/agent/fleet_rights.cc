#include "recovery/agent/fleet_rights.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <fmt/ranges.h>

#include "recovery/rpc/methods.h"
#include "recovery/rpc/rights.h"
#include "src/base/log.h"

namespace rekindle::agent {

namespace {

constexpr std::chrono::milliseconds kAskDeadline{1000};
// A change of the rights file takes effect within this time.
constexpr std::chrono::seconds kFresh{5};
constexpr std::size_t kMostAnswers = 1024;

std::string who(const rpc::Peer& peer) {
  return fmt::format("{} at {}", fmt::join(rpc::principals_of(peer), " "), peer.address);
}

std::string what(rpc::Verb verb, const std::string& model) {
  return fmt::format("{} {}", rpc::verb_name(verb), model.empty() ? "all models" : model);
}

Result<void> judge(const rpc::Peer& peer, rpc::Verb verb, const std::string& model,
                   const proto::AuthorizeResponse& said) {
  if (said.allowed()) return {};
  return fail(ErrorCode::kDenied, "{} may not {}: {}", who(peer), what(verb, model), said.why());
}

}  // namespace

async::Task<Result<void>> FleetRights::may(rpc::Peer peer, rpc::Verb verb, std::string model) {
  if (!link_.configured()) co_return Result<void>();
  const std::vector<std::string> principals = rpc::principals_of(peer);
  const Question question{fmt::format("{}", fmt::join(principals, "\n")), verb, model};
  const auto known = answers_.find(question);
  if (known != answers_.end() && steady_now() - known->second.at < kFresh) {
    co_return judge(peer, verb, model, known->second.said);
  }
  proto::AuthorizeRequest request;
  for (const auto& principal : principals) request.add_principals(principal);
  request.set_verb(std::string(rpc::verb_name(verb)));
  request.set_model(model);
  Result<proto::AuthorizeResponse> said = fail(link_.problem());
  if (const auto client = link_.client(); client != nullptr) {
    // A coordinator of protocol 2 knows no rights.
    if (client->peer().public_key.empty()) co_return Result<void>();
    auto asking = rpc::call<proto::AUTHORIZE>(client, std::move(request), kAskDeadline, peer.trace);
    said = co_await std::move(asking);
  }
  if (said) {
    if (answers_.size() >= kMostAnswers) answers_.clear();
    answers_[question] = {*said, steady_now()};
    co_return judge(peer, verb, model, *said);
  }
  // Others may have asked meanwhile.
  const auto last = answers_.find(question);
  if (last != answers_.end()) co_return judge(peer, verb, model, last->second.said);
  if (link_.has_rights() == false) co_return Result<void>();
  co_return fail(ErrorCode::kUnavailable,
                 "cannot ask the coordinator whether {} may {} ({}): try again when it answers",
                 who(peer), what(verb, model), said.error().message());
}

async::Task<proto::AgentStatusResponse> FleetRights::readable(rpc::Peer peer,
                                                              proto::AgentStatusResponse status) {
  if (peer.local_user || !link_.configured() || link_.has_rights() == false) co_return status;
  std::map<std::string, bool> models;
  const auto for_each_list = [](proto::AgentStatusResponse& of, const auto& visit) {
    visit(*of.mutable_holdings());
    visit(*of.mutable_instances());
    visit(*of.mutable_copies());
    visit(*of.mutable_residents());
    if (of.has_events()) visit(*of.mutable_events()->mutable_events());
  };
  for_each_list(status, [&](const auto& list) {
    for (const auto& entry : list) models.emplace(entry.id().model(), entry.id().model().empty());
  });
  for (auto& [model, is_readable] : models) {
    if (is_readable) continue;
    auto asking = may_read(peer, model);
    const auto answer = co_await std::move(asking);
    is_readable = answer.has_value();
    // The next question would have to wait, too.
    if (!answer && answer.error().code() == ErrorCode::kUnavailable) break;
  }
  for_each_list(status, [&](auto& list) {
    const auto hidden = [&](const auto& entry) { return !models.at(entry.id().model()); };
    list.erase(std::remove_if(list.begin(), list.end(), hidden), list.end());
  });
  co_return status;
}

}  // namespace rekindle::agent
