#include "recovery/coordinator/etcd/etcd_state.h"

#include <algorithm>
#include <utility>

namespace rekindle::coordinator::etcd {

using nlohmann::json;

namespace {

constexpr std::chrono::milliseconds kDeadline{1000};
constexpr std::chrono::milliseconds kAway{1000};
constexpr std::chrono::milliseconds kLeastDeadline{10};
constexpr int kRecordsPerPage = 1000;
// By default etcd allows 128 operations and 1.5 MiB in one transaction.
constexpr std::size_t kMaxOperations = 100;
constexpr std::size_t kMaxTransactionBytes = 512u << 10;
constexpr const char* kMeta = "meta";

}  // namespace

EtcdState::EtcdState(const EtcdOptions& options, std::vector<rpc::HostPort> endpoints,
                     const Term& term)
    : term_(term),
      prefix_(options.prefix),
      leader_key_(to_base64(leader_key(options))),
      meta_key_(key_of(kMeta)),
      gateway_(std::move(endpoints)) {}

json EtcdState::is_leader() const {
  return {{"key", leader_key_},
          {"target", "CREATE"},
          {"result", "EQUAL"},
          {"create_revision", std::to_string(term_.revision)}};
}

// When a comparison fails it reads the leader's key, which shows whether the term is over, and
// PREFIX/meta.
Result<EtcdState::Answer> EtcdState::transact(json compare, json success,
                                              Clock::time_point give_up) {
  const auto now = Clock::now();
  if (now < away_until_) return fail(Error(away_));
  const json leader = {{"request_range", {{"key", leader_key_}, {"keys_only", true}}}};
  const json meta = {{"request_range", {{"key", meta_key_}, {"keys_only", true}}}};
  const json txn = {{"compare", std::move(compare)},
                    {"success", std::move(success)},
                    {"failure", json::array({leader, meta})}};
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
  if (leaders.empty() || number_in(leaders.front(), "create_revision") != term_.revision) {
    return fail(ErrorCode::kStale, "another coordinator leads now (by etcd)");
  }
  return Answer{false, std::move(*answer)};
}

void EtcdState::note_revision(const json& pairs) {
  revision_ = pairs.empty() ? 0 : number_in(pairs.front(), "mod_revision");
}

Result<void> EtcdState::check_no_former_state() {
  const json read = {{"request_range", {{"key", key_of("state")}, {"keys_only", true}}}};
  TRY(const Answer answer,
      transact(json::array({is_leader()}), json::array({read}), Clock::now() + kDeadline));
  const json found =
      answer.json.value("/responses/0/response_range/kvs"_json_pointer, json::array());
  if (found.empty()) return {};
  return fail(ErrorCode::kInvalid,
              "{}state in etcd is of an earlier format, which is not read any more; delete the "
              "key to begin anew (agents report what they hold)",
              prefix_);
}

// Reads in pages. Nobody else writes during this term, and each page checks that it lasts.
Result<Records> EtcdState::load() {
  TRY_VOID(check_no_former_state());
  Records records;
  std::string from = prefix_;
  std::string end = prefix_;
  if (end.empty())
    end = std::string(1, '\0');  // means all keys to etcd
  else
    ++end.back();  // the first key that does not begin with the prefix
  for (;;) {
    const json read = {{"request_range",
                        {{"key", to_base64(from)},
                         {"range_end", to_base64(end)},
                         {"limit", std::to_string(kRecordsPerPage)}}}};
    TRY(const Answer answer,
        transact(json::array({is_leader()}), json::array({read}), Clock::now() + kDeadline));
    if (!answer.done) return fail(ErrorCode::kUnavailable, "etcd contradicts itself");
    const json range =
        answer.json.value("/responses/0/response_range"_json_pointer, json::object());
    const json pairs = range.value("kvs", json::array());
    for (const json& pair : pairs) {
      TRY(const std::string key, from_base64(pair.value("key", "")));
      TRY(std::string value, from_base64(pair.value("value", "")));
      from = key + '\0';
      const std::string name = key.substr(prefix_.size());
      if (name == "leader") continue;
      if (name == kMeta) {
        meta_ = value;
        revision_ = number_in(pair, "mod_revision");
      }
      records[name] = std::move(value);
    }
    if (!range.value("more", false) || pairs.empty()) return records;
  }
}

Result<void> EtcdState::write(const std::vector<RecordWrite>& writes) {
  for (const RecordWrite& write : writes) {
    if (write.key == kMeta && write.value) meta_ = *write.value;
  }
  json operations = json::array();
  std::size_t bytes = 0;
  for (const RecordWrite& write : writes) {
    if (write.key == kMeta) continue;
    const std::size_t added = 2 * (write.key.size() + (write.value ? write.value->size() : 0));
    if (operations.size() + 1 >= kMaxOperations || bytes + added > kMaxTransactionBytes) {
      TRY_VOID(put(operations));
      operations = json::array();
      bytes = 0;
    }
    bytes += added;
    if (write.value) {
      operations.push_back(
          {{"request_put", {{"key", key_of(write.key)}, {"value", to_base64(*write.value)}}}});
    } else {
      operations.push_back({{"request_delete_range", {{"key", key_of(write.key)}}}});
    }
  }
  return put(operations);
}

// One transaction, with PREFIX/meta.
Result<void> EtcdState::put(const json& operations) {
  json success = operations;
  success.push_back({{"request_put", {{"key", meta_key_}, {"value", to_base64(meta_)}}}});
  const auto give_up = Clock::now() + kDeadline;
  for (int attempt = 0; attempt < 2; ++attempt) {
    const json unchanged = {{"key", meta_key_},
                            {"target", "MOD"},
                            {"result", "EQUAL"},
                            {"mod_revision", std::to_string(revision_)}};
    const bool was_unsure = std::exchange(unsure_, true);
    auto answer = transact(json::array({is_leader(), unchanged}), success, give_up);
    if (!answer)
      return fail(std::move(answer).error().with_context("save the coordinator's state"));
    if (answer->done) {
      revision_ = number_in(answer->json.value("header", json::object()), "revision");
      unsure_ = false;
      return {};
    }
    unsure_ = was_unsure;
    if (!unsure_) break;
    // The answer to a write of this term was lost. Write over it.
    note_revision(
        answer->json.value("/responses/1/response_range/kvs"_json_pointer, json::array()));
  }
  return fail(unsure_ ? ErrorCode::kUnavailable : ErrorCode::kStale,
              "save the coordinator's state: somebody else writes {}meta in etcd; give each fleet "
              "its own --etcd-prefix",
              prefix_);
}

}  // namespace rekindle::coordinator::etcd
