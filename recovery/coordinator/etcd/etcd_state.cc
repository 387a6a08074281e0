#include "recovery/coordinator/etcd/etcd_state.h"

#include <algorithm>
#include <utility>

#include "recovery/rpc/credentials.h"
#include "src/base/log.h"

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

EtcdState::EtcdState(const EtcdOptions& options, Access access, const Term& term)
    : term_(term),
      prefix_(options.prefix),
      leader_key_(to_base64(leader_key(options))),
      meta_key_(key_of(kMeta)),
      state_key_file_(options.state_key_file),
      adopt_unsigned_(options.adopt_unsigned),
      gateway_(std::move(access)) {}

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

Result<void> EtcdState::read_state_key() {
  if (state_key_file_.empty() || seal_) return {};
  auto key = rpc::read_secret(state_key_file_);
  if (!key) return fail(std::move(key).error().with_context("--etcd-state-key"));
  seal_.emplace(*std::move(key));
  return {};
}

// Reads in pages. Nobody else writes during this term, and each page checks that it lasts.
Result<Records> EtcdState::load() {
  seal_.reset();
  TRY_VOID(read_state_key());
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
      if (name == kMeta) revision_ = number_in(pair, "mod_revision");
      records[name] = std::move(value);
    }
    if (!range.value("more", false) || pairs.empty()) break;
  }
  TRY_VOID(open_all(records));
  if (const auto meta = records.find(kMeta); meta != records.end()) meta_ = meta->second;
  return records;
}

// Replaces stored values by plain ones.
Result<void> EtcdState::open_all(Records& records) {
  if (records.empty()) return {};
  bool adopted = false;
  for (auto& [name, value] : records) {
    if (!seal_) {
      if (!StateSeal::is_sealed(value)) continue;
      return fail(ErrorCode::kInvalid,
                  "{}{} in etcd is authenticated with a key; give it as --etcd-state-key", prefix_,
                  name);
    }
    if (adopt_unsigned_ && !StateSeal::is_sealed(value)) {
      adopted = true;
    } else if (name != kMeta) {
      TRY(value, seal_->open(prefix_ + name, value));
    }
  }
  if (!seal_) return {};
  if (adopted) return adopt(records);
  const auto meta = records.find(kMeta);
  if (meta == records.end()) {
    return fail(ErrorCode::kCorrupt,
                "{}{} is missing in etcd, but other records are there: somebody took it away. "
                "Restore etcd as a whole from a backup",
                prefix_, kMeta);
  }
  TRY(meta->second, seal_->open_head(prefix_ + kMeta, meta->second));
  return {};
}

// From a state without authentication, or one whose adoption was interrupted.
Result<void> EtcdState::adopt(Records& records) {
  log::warn("coordinator.adopting_unsigned_state", "place", place(), "records", records.size());
  if (const auto meta = records.find(kMeta);
      meta != records.end() && StateSeal::is_sealed(meta->second)) {
    TRY(meta->second,
        seal_->open_head(prefix_ + kMeta, meta->second, StateSeal::Others::kMayDiffer));
  }
  std::vector<RecordWrite> all;
  for (const auto& [name, value] : records) all.push_back({name, value});
  return write(all);
}

Result<void> EtcdState::write(const std::vector<RecordWrite>& writes) {
  TRY_VOID(read_state_key());
  for (const RecordWrite& write : writes) {
    if (write.key == kMeta && write.value) meta_ = *write.value;
  }
  if (!unanswered_.empty()) {
    const auto again = unanswered_;
    TRY_VOID(put(again));
  }
  std::vector<RecordWrite> part;
  std::size_t bytes = 0;
  for (const RecordWrite& write : writes) {
    if (write.key == kMeta) continue;
    const std::size_t added = 2 * (write.key.size() + (write.value ? write.value->size() : 0));
    if (part.size() + 1 >= kMaxOperations || bytes + added > kMaxTransactionBytes) {
      TRY_VOID(put(std::exchange(part, {})));
      bytes = 0;
    }
    bytes += added;
    part.push_back(write);
  }
  return put(part);
}

// One transaction, with PREFIX/meta.
Result<void> EtcdState::put(const std::vector<RecordWrite>& writes) {
  // Nothing is sealed that is not sent.
  if (Clock::now() < away_until_) {
    return fail(Error(away_).with_context("save the coordinator's state"));
  }
  json success = json::array();
  for (const RecordWrite& write : writes) {
    const std::string name = prefix_ + write.key;
    if (write.value) {
      const std::string value = seal_ ? seal_->seal(name, *write.value) : *write.value;
      success.push_back(
          {{"request_put", {{"key", key_of(write.key)}, {"value", to_base64(value)}}}});
    } else {
      if (seal_) seal_->forget(name);
      success.push_back({{"request_delete_range", {{"key", key_of(write.key)}}}});
    }
  }
  const std::string meta = seal_ ? seal_->seal_head(prefix_ + kMeta, meta_) : meta_;
  success.push_back({{"request_put", {{"key", meta_key_}, {"value", to_base64(meta)}}}});
  const auto give_up = Clock::now() + kDeadline;
  for (int attempt = 0; attempt < 2; ++attempt) {
    const json unchanged = {{"key", meta_key_},
                            {"target", "MOD"},
                            {"result", "EQUAL"},
                            {"mod_revision", std::to_string(revision_)}};
    const bool was_unsure = std::exchange(unsure_, true);
    auto answer = transact(json::array({is_leader(), unchanged}), success, give_up);
    if (!answer) {
      if (seal_) unanswered_ = writes;
      return fail(std::move(answer).error().with_context("save the coordinator's state"));
    }
    if (answer->done) {
      revision_ = number_in(answer->json.value("header", json::object()), "revision");
      unsure_ = false;
      unanswered_.clear();
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
