#pragma once

#include <optional>
#include <string>
#include <vector>

#include "recovery/coordinator/etcd/election.h"
#include "recovery/coordinator/etcd/state_seal.h"
#include "recovery/coordinator/state_records.h"

namespace rekindle::coordinator::etcd {

// The records as keys of etcd: PREFIX/KEY. They are read and written only while PREFIX/leader is
// the key of this term, so a coordinator that was replaced can change nothing. Each write also
// writes PREFIX/meta, on the condition that this key still has the modification revision that was
// read or written last: a write without an answer that arrives late undoes no later one. A write
// that is too large for one transaction is split; the first ones may be durable when a later one
// fails. A call blocks for at most a second per transaction. When etcd has not answered, further
// calls fail at once for a second.
//
// With a state key each value carries a MAC over its key and itself, and PREFIX/meta also the seal
// of all other records, so that whoever can write to etcd can neither invent a record, nor move,
// take away or bring back a single one. Only all of the state of an earlier moment is accepted, or
// none at all.
class EtcdState : public DurableStore {
 public:
  EtcdState(const EtcdOptions& options, Access access, const Term& term);
  std::string place() const override { return prefix_ + " in etcd"; }
  Result<Records> load() override;
  Result<void> write(const std::vector<RecordWrite>& writes) override;

 private:
  struct Answer {
    bool done = false;
    nlohmann::json json;
  };
  using Clock = std::chrono::steady_clock;
  Result<Answer> transact(nlohmann::json compare, nlohmann::json success,
                          Clock::time_point give_up);
  Result<void> put(const std::vector<RecordWrite>& writes);
  Result<void> read_state_key();
  Result<void> open_all(Records& records);
  Result<void> adopt(Records& records);
  Result<void> check_no_former_state();
  nlohmann::json is_leader() const;
  void note_revision(const nlohmann::json& pairs);
  std::string key_of(const std::string& name) const { return to_base64(prefix_ + name); }

  const Term term_;
  const std::string prefix_;
  const std::string leader_key_;
  const std::string meta_key_;
  const std::string state_key_file_;
  const bool adopt_unsigned_;
  Gateway gateway_;
  // nullopt: records carry no MAC.
  std::optional<StateSeal> seal_;
  // Of a transaction without an answer. Until they are written again, nobody knows whether the
  // records have these values.
  std::vector<RecordWrite> unanswered_;
  // The value of PREFIX/meta that was read or written last.
  std::string meta_;
  // The last known modification revision of PREFIX/meta; 0: the key does not exist.
  std::int64_t revision_ = 0;
  // A transaction came to no answer: it may have been applied, or may be yet.
  bool unsure_ = false;
  Clock::time_point away_until_;
  Error away_{ErrorCode::kUnavailable, ""};
};

}  // namespace rekindle::coordinator::etcd
