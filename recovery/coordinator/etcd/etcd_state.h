#pragma once

#include <string>
#include <vector>

#include "recovery/coordinator/durable_store.h"
#include "recovery/coordinator/etcd/election.h"

namespace rekindle::coordinator::etcd {

// The durable state as the value of PREFIX/state, read and written only while PREFIX/leader is the
// key of this reign: a coordinator that has been replaced can change nothing any more. Written only
// over the revision of it that was read or written last: a write of ours that came to no answer and
// arrives late changes nothing that has been written since. A call
// blocks for a second at most; after one that etcd did not answer the next second's fail at once,
// so that an etcd that is away costs those who publish, not those who serve.
class EtcdState : public DurableStore {
 public:
  EtcdState(const EtcdOptions& options, std::vector<rpc::HostPort> endpoints, const Reign& reign);
  Result<DurableState> load() override;
  Result<void> save(const DurableState& state) override;

 private:
  struct Answer {
    bool done = false;
    nlohmann::json json;
  };
  using Clock = std::chrono::steady_clock;
  Result<Answer> transact(nlohmann::json compare, nlohmann::json success,
                          Clock::time_point give_up);
  nlohmann::json is_leader() const;
  void note_revision(const nlohmann::json& pairs);

  const Reign reign_;
  const std::string leader_key_;
  const std::string state_name_;
  const std::string state_key_;
  Gateway gateway_;
  std::int64_t revision_ = 0;  // of PREFIX/state when it last changed, as far as is known; 0: none
  Clock::time_point away_until_;
  Error away_{ErrorCode::kUnavailable, ""};
};

}  // namespace rekindle::coordinator::etcd
