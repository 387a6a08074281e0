#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "recovery/coordinator/etcd/gateway.h"
#include "recovery/coordinator/leader_term.h"

namespace rekindle::coordinator::etcd {

// The right to lead: one life of the key PREFIX/leader. Its creation revision fences the writes of
// the term.
struct Term {
  std::int64_t lease = 0;
  std::int64_t revision = 0;
};

// The election: the coordinator that creates PREFIX/leader leads, and the key lasts as long as its
// lease. A lease alone makes nobody safe, because a paused leader does not know that it ran out. So
// every write has the condition that the key is still that of this term. Blocks; one thread.
class Election {
 public:
  // `name` tells the others who leads. It is different for each process.
  Election(const EtcdOptions& options, Access access, std::string name);

  // One try. kUnavailable: another one leads, named, or etcd does not answer.
  Result<Term> campaign(std::chrono::milliseconds deadline);
  // Renews the lease. False: it is over, and another coordinator may lead. An error: no answer.
  Result<bool> keep(const Term& term, std::chrono::milliseconds deadline);
  // Gives the right back, so that the next one leads at once.
  void resign(const Term& term, std::chrono::milliseconds deadline);

 private:
  const std::string key_;
  const std::string name_;
  const std::chrono::seconds ttl_;
  Gateway gateway_;
};

std::string leader_key(const EtcdOptions& options);

}  // namespace rekindle::coordinator::etcd

namespace rekindle::coordinator {

// Runs one of several coordinators that share an etcd. It stands by, without a socket, until it
// wins the election, leads until `told` is set or its lease is over, and stands by again. A leader
// whose lease etcd has not confirmed in time answers UNAVAILABLE and steps down: another one may
// lead.
async::Task<Result<void>> stand_and_lead(const TermOptions& options, Stop& told);

}  // namespace rekindle::coordinator
