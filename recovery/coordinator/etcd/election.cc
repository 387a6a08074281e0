#include "recovery/coordinator/etcd/election.h"

#include <utility>

namespace rekindle::coordinator::etcd {

using nlohmann::json;

namespace {

// The leader's key, which the failed branch of a campaign reads.
const json* holder_of(const json& answer) {
  const auto responses = answer.find("responses");
  if (responses == answer.end() || !responses->is_array() || responses->empty()) return nullptr;
  const auto range = responses->front().find("response_range");
  if (range == responses->front().end()) return nullptr;
  const auto pairs = range->find("kvs");
  if (pairs == range->end() || !pairs->is_array() || pairs->empty()) return nullptr;
  return &pairs->front();
}

}  // namespace

std::string leader_key(const EtcdOptions& options) { return options.prefix + "leader"; }

Election::Election(const EtcdOptions& options, std::vector<rpc::HostPort> endpoints,
                   std::string name)
    : key_(to_base64(leader_key(options))),
      name_(std::move(name)),
      ttl_(options.ttl),
      gateway_(std::move(endpoints)) {}

Result<Term> Election::campaign(std::chrono::milliseconds deadline) {
  TRY(const json granted, gateway_.call("/v3/lease/grant", {{"TTL", ttl_.count()}}, deadline));
  Term term;
  term.lease = number_in(granted, "ID");
  if (term.lease == 0) return fail(ErrorCode::kUnavailable, "etcd grants no lease");
  const json txn = {
      {"compare",
       {{{"key", key_}, {"target", "CREATE"}, {"result", "EQUAL"}, {"create_revision", "0"}}}},
      {"success",
       {{{"request_put",
          {{"key", key_}, {"value", to_base64(name_)}, {"lease", std::to_string(term.lease)}}}}}},
      {"failure", {{{"request_range", {{"key", key_}}}}}}};
  TRY(const json answer, gateway_.call("/v3/kv/txn", txn, deadline));
  if (answer.value("succeeded", false)) {
    const auto header = answer.find("header");
    if (header != answer.end()) term.revision = number_in(*header, "revision");
    if (term.revision != 0) return term;
    return fail(ErrorCode::kUnavailable, "etcd answers without a revision");
  }
  std::string leader = "another coordinator";
  if (const json* holder = holder_of(answer)) {
    TRY(leader, from_base64(holder->value("value", "")));
    // The key is ours: an earlier campaign succeeded, and its answer was lost.
    if (leader == name_) {
      return Term{number_in(*holder, "lease"), number_in(*holder, "create_revision")};
    }
  }
  (void)gateway_.call("/v3/lease/revoke", {{"ID", std::to_string(term.lease)}}, deadline);
  return fail(ErrorCode::kUnavailable, "{} leads", leader);
}

Result<bool> Election::keep(const Term& term, std::chrono::milliseconds deadline) {
  TRY(const json answer,
      gateway_.call("/v3/lease/keepalive", {{"ID", std::to_string(term.lease)}}, deadline));
  const auto result = answer.find("result");
  return result != answer.end() && number_in(*result, "TTL") > 0;
}

void Election::resign(const Term& term, std::chrono::milliseconds deadline) {
  (void)gateway_.call("/v3/lease/revoke", {{"ID", std::to_string(term.lease)}}, deadline);
}

}  // namespace rekindle::coordinator::etcd
