#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "proto/coordinator.pb.h"
#include "proto/rights.pb.h"
#include "recovery/rpc/audited_calls.h"
#include "recovery/rpc/method_rules.h"
#include "recovery/rpc/rights.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::coordinator {

// Who may do what at this coordinator, by its rights file. One for all terms of a process. On the
// executor's one thread.
class AccessControl final : public rpc::AuditedCalls {
 public:
  // nullptr: there is no file, and everybody who may connect has all rights. Calls that have begun
  // go on.
  void set_rights(std::shared_ptr<const rpc::Rights> rights);
  // Calls `changed` after each change of the rights, as long as the result lives, or until the next
  // call.
  [[nodiscard]] std::shared_ptr<const void> on_change(std::function<void()> changed);

  bool has_rights() const { return rights_ != nullptr; }

  // Returns the rule that gives the right.
  Result<std::string> allow(std::span<const std::string> principals, rpc::Verb verb,
                            const std::string& model) const;
  bool may_read(const rpc::Peer& peer, const std::string& model) const;
  // May a member make versions of this model known that no publisher has claimed? As if it
  // published them.
  Result<void> may_announce(std::span<const std::string> principals,
                            const std::string& model) const;
  // May a member have copies of the model? It has pulled or published them.
  Result<void> may_hold(std::span<const std::string> principals, const std::string& model) const;
  // Takes out what concerns models that the peer may not read.
  void hide_unreadable(const rpc::Peer& peer, proto::ClusterStatusResponse& status) const;

  // The answers to WHOAMI and AUTHORIZE. Only agents, and those with the right `admin`, may ask
  // about others.
  proto::WhoamiResponse whoami(const rpc::Peer& peer) const;
  Result<proto::AuthorizeResponse> authorize(const rpc::Peer& peer,
                                             const proto::AuthorizeRequest& request) const;

  Result<void> admit(const rpc::Peer& peer, const rpc::MethodRule& rule,
                     const rpc::CallObject& object) override;

 private:
  std::shared_ptr<const rpc::Rights> rights_;
  std::weak_ptr<const std::function<void()>> changed_;
};

}  // namespace rekindle::coordinator
