#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "recovery/coordinator/etcd/gateway.h"
#include "recovery/coordinator/etcd/options.h"

namespace rekindle::coordinator::etcd {

// The right to lead: the key PREFIX/leader in one life of it. Its creation revision fences what is
// written under it.
struct Term {
  std::int64_t lease = 0;
  std::int64_t revision = 0;
};

// Who leads: the coordinator that could create PREFIX/leader, which is there as long as its lease.
// A lease alone makes nobody safe (a paused leader does not know that it ran out): every write is
// made on the condition that the key still is the one of this term. Blocks; one thread.
class Election {
 public:
  // `name` says who leads to those that wait, and is different for each process.
  Election(const EtcdOptions& options, std::vector<rpc::HostPort> endpoints, std::string name);

  // One try. kUnavailable: another one leads, named, or etcd does not answer.
  Result<Term> campaign(std::chrono::milliseconds deadline);
  // Keeps the lease. False: it is over, somebody else may lead. An error: etcd did not say.
  Result<bool> keep(const Term& term, std::chrono::milliseconds deadline);
  // Lets the next one lead at once.
  void resign(const Term& term, std::chrono::milliseconds deadline);

 private:
  const std::string key_;
  const std::string name_;
  const std::chrono::seconds ttl_;
  Gateway gateway_;
};

std::string leader_key(const EtcdOptions& options);

}  // namespace rekindle::coordinator::etcd
