#pragma once

#include <map>
#include <set>
#include <string>

#include "proto/coordinator.pb.h"
#include "recovery/agent/grant_clock.h"
#include "recovery/rpc/rpc.h"
#include "src/base/clock.h"
#include "src/base/digest.h"
#include "src/base/result.h"

namespace rekindle::agent {

// What the pullers at the control connections of this host may read: the checkpoints for which they
// have shown a grant. Control thread only.
class PullerRights {
 public:
  // Both outlive this.
  PullerRights(const rpc::Identity& self, const GrantClock& clock) : self_(self), clock_(clock) {}

  // Returns the end of the grant. kDenied: the grant is forged, expired, of another puller or
  // another root. kStale: of another life of this source, or of an issuer that is unknown here.
  Result<TimePoint> check(const rpc::Peer& puller, const proto::Grant& grant,
                          const Digest& root) const;

  // Checks the grant and remembers it for the connection, which may read metadata of the grant's
  // root until it ends: metadata may take longer than a grant lives. Without a grant it does
  // nothing.
  Result<void> show(const rpc::Peer& puller, const proto::Grant& grant);
  // Roots whose metadata the connection may read. nullptr: of all, because pullers of protocol 2
  // show no grant.
  const std::set<Digest>* readable(const rpc::Peer& puller) const;
  void disconnected(const rpc::Peer& puller);

 private:
  const rpc::Identity& self_;
  const GrantClock& clock_;
  // By connection.
  std::map<std::string, std::set<Digest>> shown_;
};

// Names a control connection.
std::string connection_of(const rpc::Peer& peer);

}  // namespace rekindle::agent
