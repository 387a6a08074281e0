#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "proto/frame.pb.h"
#include "recovery/rpc/rpc.h"
#include "src/base/result.h"

// Who may call what (docs/internals/security.md). The table says which roles may call each method,
// and which right a call needs where a rights file decides.
namespace rekindle::rpc {

// What a principal may do with a model. `kNone`: membership is enough.
enum class Verb : std::uint8_t {
  kNone,
  kPublish,
  kRead,
  kRetire,
  kDrain,
  kUpdate,
  kAdmin,
  // To take part as an agent, for principals whose certificate does not say so.
  kMember,
};
inline constexpr std::array kAllVerbs = {Verb::kPublish, Verb::kRead,  Verb::kRetire, Verb::kDrain,
                                         Verb::kUpdate,  Verb::kAdmin, Verb::kMember};
std::string_view verb_name(Verb verb);
// Nothing: there is no such verb. `kNone` has no name.
std::optional<Verb> verb_from(std::string_view name);
// "publish, read, …"
std::string verb_names();

struct MethodRule {
  proto::Method method;
  // Bits of proto::Role.
  std::uint32_t roles;
  // Needed at a coordinator with a rights file.
  Verb verb = Verb::kNone;
  // The call changes the fleet or this host, so the audit log has a line for it. Calls that are
  // denied have one, too.
  bool audited = false;

  bool allows(proto::Role role) const { return ((roles >> static_cast<unsigned>(role)) & 1u) != 0; }
};
// nullptr: the method has no rule, so nobody may call it.
const MethodRule* rule_of(proto::Method method);
std::span<const MethodRule> method_rules();

// What a call is about.
struct CallObject {
  // "": the right concerns no model.
  std::string model;
  // For the audit log: "m@7", or the name of a node.
  std::string text;
};
// Reads only what it needs of the body. kInvalid: the body is malformed.
Result<CallObject> object_of(proto::Method method, const std::string& body);

// The role and the name that a certificate gives: of "spiffe://example.org/rekindle/agent/gpu-7"
// these are "agent" and "gpu-7". Without a name, as in "spiffe://example.org/rekindle/agent", the
// processes of a role share the certificate. Nothing: it names no role.
struct CertifiedRole {
  std::string role;
  std::string name;
  bool is_of(std::string_view node_id) const { return name.empty() || name == node_id; }
};
std::optional<CertifiedRole> certified_role(std::span<const std::string> principals);

// kDenied: this role may not call the method, or the peer claims another role or node than its
// certificate names. Anybody may call as a puller or a client.
Result<void> check_role(const Peer& peer, const MethodRule& rule);

// Decides which calls a server lets through, and hears how those that change something have ended.
// On the server's thread.
class CallGuard {
 public:
  virtual ~CallGuard() = default;
  // Before the handler runs. The error is the answer.
  virtual Result<void> admit(const Peer& peer, const MethodRule& rule,
                             const CallObject& object) = 0;
  // The call did not run, or its handler has denied it.
  virtual void denied(const Peer& peer, proto::Method method, const CallObject& object,
                      const Error& why) = 0;
  // An audited call has ended.
  virtual void ended(const Peer& peer, proto::Method method, const CallObject& object,
                     const Result<void>& outcome) = 0;
  // Returns when what it wrote down outlives this host. Audited calls are answered after it, unless
  // only members make them. The error is the answer.
  virtual async::Task<Result<void>> settle() = 0;
  // A connection was refused before its first call.
  virtual void refused(const std::string& address, const Error& why) = 0;
};

// "agent gpu-7 (spiffe://…) at 10.0.0.3:51234"
std::string describe(const Peer& peer);

}  // namespace rekindle::rpc
