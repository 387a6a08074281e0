#include "recovery/coordinator/etcd/etcd_state.h"

#include <algorithm>
#include <utility>

#include "recovery/coordinator/state_directory.h"

namespace rekindle::coordinator::etcd {

using nlohmann::json;

namespace {

constexpr std::chrono::milliseconds kDeadline{1000};
constexpr std::chrono::milliseconds kAway{1000};
constexpr std::chrono::milliseconds kLeastDeadline{10};

}  // namespace

EtcdState::EtcdState(const EtcdOptions& options, std::vector<rpc::HostPort> endpoints,
                     const Reign& reign)
    : reign_(reign),
      leader_key_(to_base64(leader_key(options))),
      state_name_(options.prefix + "state"),
      state_key_(to_base64(state_name_)),
      gateway_(std::move(endpoints)) {}

json EtcdState::is_leader() const {
  return {{"key", leader_key_},
          {"target", "CREATE"},
          {"result", "EQUAL"},
          {"create_revision", std::to_string(reign_.revision)}};
}

// When a comparison fails it reads the leader's key, to tell a reign that is over, and the state's.
Result<EtcdState::Answer> EtcdState::transact(json compare, json success,
                                              Clock::time_point give_up) {
  const auto now = Clock::now();
  if (now < away_until_) return fail(Error(away_));
  const json leader = {{"request_range", {{"key", leader_key_}, {"keys_only", true}}}};
  const json state = {{"request_range", {{"key", state_key_}, {"keys_only", true}}}};
  const json txn = {{"compare", std::move(compare)},
                    {"success", json::array({std::move(success)})},
                    {"failure", json::array({leader, state})}};
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(give_up - now);
  auto answer = gateway_.call("/v3/kv/txn", txn, std::max(left, kLeastDeadline));
  if (!answer) {
    if (answer.error().code() == ErrorCode::kUnavailable) {
      away_ = answer.error();
      away_until_ = Clock::now() + kAway;
    }
    return fail(std::move(answer).error());
  }
  if (answer->value("succeeded", false)) return Answer{true, std::move(*answer)};
  const json leaders = answer->value("/responses/0/response_range/kvs"_json_pointer, json::array());
  if (leaders.empty() || number_in(leaders.front(), "create_revision") != reign_.revision) {
    return fail(ErrorCode::kStale, "another coordinator leads now (by etcd)");
  }
  return Answer{false, std::move(*answer)};
}

void EtcdState::note_revision(const json& pairs) {
  revision_ = pairs.empty() ? 0 : number_in(pairs.front(), "mod_revision");
}

Result<DurableState> EtcdState::load() {
  TRY(const Answer answer,
      transact(json::array({is_leader()}), {{"request_range", {{"key", state_key_}}}},
               Clock::now() + kDeadline));
  if (!answer.done) return fail(ErrorCode::kUnavailable, "etcd contradicts itself");
  const json pairs =
      answer.json.value("/responses/0/response_range/kvs"_json_pointer, json::array());
  note_revision(pairs);
  if (pairs.empty()) return DurableState{};
  TRY(const std::string bytes, from_base64(pairs.front().value("value", "")));
  auto state = decode_state(bytes);
  if (state) return state;
  return fail(ErrorCode::kCorrupt,
              "the coordinator's state in etcd is damaged: {}; restore it, or delete the key to "
              "begin anew (agents report what they hold)",
              state.error().message());
}

Result<void> EtcdState::save(const DurableState& state) {
  const json put = {
      {"request_put", {{"key", state_key_}, {"value", to_base64(encode_state(state))}}}};
  const auto give_up = Clock::now() + kDeadline;
  for (int attempt = 0; attempt < 2; ++attempt) {
    const json unchanged = {{"key", state_key_},
                            {"target", "MOD"},
                            {"result", "EQUAL"},
                            {"mod_revision", std::to_string(revision_)}};
    auto answer = transact(json::array({is_leader(), unchanged}), put, give_up);
    if (!answer)
      return fail(std::move(answer).error().with_context("save the coordinator's state"));
    if (answer->done) {
      revision_ = number_in(answer->json.value("header", json::object()), "revision");
      return {};
    }
    // A write of this reign whose answer was lost, or who else may write here: over it.
    note_revision(
        answer->json.value("/responses/1/response_range/kvs"_json_pointer, json::array()));
  }
  return fail(ErrorCode::kUnavailable,
              "save the coordinator's state: somebody else writes {} in etcd; give each fleet its "
              "own --etcd-prefix",
              state_name_);
}

}  // namespace rekindle::coordinator::etcd
