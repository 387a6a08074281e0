#pragma once

#include <memory>
#include <string>
#include <utility>

#include "recovery/rpc/audit_log.h"
#include "recovery/rpc/method_rules.h"

namespace rekindle::rpc {

// Writes the calls of a server to an audit log, those that were refused, too. The guard of daemons
// without a rights file. On the server's thread.
class AuditedCalls : public CallGuard {
 public:
  // nullptr: nobody writes down what happens. Otherwise calls that change something are refused
  // while the log cannot be written; only members may register.
  void set_audit(std::unique_ptr<AuditLog> audit) { audit_ = std::move(audit); }
  // What no call has caused. Without a log it does nothing.
  void note(const AuditEntry& entry);
  // The same for what others can cause as often as they like.
  void note_some(AuditEntry entry);
  // At SIGHUP: goes on in a new file after a rotation, and writes a line about the reload.
  void reloaded(const Result<void>& outcome);

  Result<void> admit(const Peer& peer, const MethodRule& rule, const CallObject& object) override;
  void denied(const Peer& peer, proto::Method method, const CallObject& object,
              const Error& why) override;
  void ended(const Peer& peer, proto::Method method, const CallObject& object,
             const Result<void>& outcome) override;
  void refused(const std::string& address, const Error& why) override;
  async::Task<Result<void>> settle() override;

 private:
  std::unique_ptr<AuditLog> audit_;
};

// A line about what a peer did.
AuditEntry audit_entry(const Peer& peer, std::string act, std::string object,
                       const Result<void>& outcome);

}  // namespace rekindle::rpc
