#include "recovery/agent/puller_rights.h"

#include "recovery/rpc/convert.h"
#include "recovery/rpc/grants.h"
#include "src/base/clock.h"

namespace rekindle::agent {

std::string connection_of(const rpc::Peer& peer) {
  return peer.incarnation.hex() + " " + peer.address;
}

Result<TimePoint> PullerRights::check(const rpc::Peer& puller, const proto::Grant& grant,
                                      const Digest& root) const {
  TRY(const auto issuer, Incarnation::from_bytes(grant.issuer()));
  TRY(const std::string key, clock_.key_of(issuer));
  TRY_VOID(rpc::check_grant(grant, key, self_.secret.reveal(),
                            {puller.incarnation, self_.incarnation, root}));
  return clock_.check(issuer, grant.epoch(), grant.expiry_ms(), steady_now());
}

Result<void> PullerRights::show(const rpc::Peer& puller, const proto::Grant& grant) {
  if (grant.issuer().empty()) return {};
  const Digest root = rpc::from_proto(grant.root());
  const auto known = shown_.find(connection_of(puller));
  if (known != shown_.end() && known->second.contains(root)) return {};
  TRY_VOID(check(puller, grant, root));
  shown_[connection_of(puller)].insert(root);
  return {};
}

const std::set<Digest>* PullerRights::readable(const rpc::Peer& puller) const {
  static const std::set<Digest> kNone;
  if (puller.public_key.empty()) return nullptr;
  const auto shown = shown_.find(connection_of(puller));
  return shown == shown_.end() ? &kNone : &shown->second;
}

void PullerRights::disconnected(const rpc::Peer& puller) { shown_.erase(connection_of(puller)); }

}  // namespace rekindle::agent
