#include "recovery/coordinator/access_control.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <vector>

#include "recovery/rpc/handshake.h"
#include "src/base/clock.h"

namespace rekindle::coordinator {

namespace {

constexpr int kMostPrincipals = 32;

template <typename Messages, typename Unreadable>
void drop_if(Messages& messages, const Unreadable& unreadable) {
  messages.erase(std::remove_if(messages.begin(), messages.end(), unreadable), messages.end());
}

// "begin_update" for COORDINATOR_BEGIN_UPDATE.
std::string act_of(proto::Method method) {
  std::string name = proto::Method_Name(method);
  constexpr std::string_view kPrefix = "COORDINATOR_";
  if (name.starts_with(kPrefix)) name.erase(0, kPrefix.size());
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

AuditEntry entry_of(const rpc::Peer& peer, proto::Method method, const std::string& object,
                    const Result<void>& outcome) {
  AuditEntry entry;
  entry.act = act_of(method);
  if (!outcome) entry.result = outcome.error().message();
  entry.object = object;
  entry.principals = rpc::principals_of(peer);
  entry.role = rpc::role_name(peer.role);
  entry.node = peer.node_id;
  entry.address = peer.address;
  return entry;
}

}  // namespace

Result<std::string> AccessControl::allow(std::span<const std::string> principals, rpc::Verb verb,
                                         const std::string& model) const {
  if (rights_ != nullptr) return rights_->allow(principals, verb, model);
  return std::string("the coordinator has no rights file, so everybody has all rights");
}

bool AccessControl::may_read(const rpc::Peer& peer, const std::string& model) const {
  return rights_ == nullptr ||
         rights_->allow(rpc::principals_of(peer), rpc::Verb::kRead, model).has_value();
}

Result<void> AccessControl::may_announce(std::span<const std::string> principals,
                                         const std::string& model) const {
  if (auto allowed = allow(principals, rpc::Verb::kPublish, model); !allowed) {
    return fail(ErrorCode::kDenied, "{} is not known here, and {}", model,
                allowed.error().message());
  }
  return {};
}

Result<void> AccessControl::may_hold(std::span<const std::string> principals,
                                     const std::string& model) const {
  auto reads = allow(principals, rpc::Verb::kRead, model);
  if (reads || allow(principals, rpc::Verb::kPublish, model)) return {};
  return fail(std::move(reads).error());
}

void AccessControl::hide_unreadable(const rpc::Peer& peer,
                                    proto::ClusterStatusResponse& status) const {
  if (rights_ == nullptr) return;
  std::map<std::string, bool> known;
  const auto hidden = [&](const proto::ModelVersion& id) {
    if (id.model().empty()) return false;
    const auto [entry, fresh] = known.try_emplace(id.model());
    if (fresh) entry->second = may_read(peer, id.model());
    return !entry->second;
  };
  const auto concerns = [&](const auto& message) { return hidden(message.id()); };
  for (auto& node : *status.mutable_nodes()) {
    drop_if(*node.mutable_holdings(), concerns);
    drop_if(*node.mutable_sole_copies(), hidden);
  }
  drop_if(*status.mutable_versions(), concerns);
  drop_if(*status.mutable_pulls(), concerns);
  drop_if(*status.mutable_instances(), concerns);
  drop_if(*status.mutable_rounds(), concerns);
  if (status.has_events()) drop_if(*status.mutable_events()->mutable_events(), concerns);
}

proto::WhoamiResponse AccessControl::whoami(const rpc::Peer& peer) const {
  proto::WhoamiResponse answer = rpc::whoami(peer);
  const auto principals = rpc::principals_of(peer);
  if (rights_ != nullptr) {
    for (auto& line : rights_->lines_of(principals)) *answer.add_rights() = std::move(line);
    return answer;
  }
  auto& all = *answer.add_rights();
  all.mutable_principals()->Add(principals.begin(), principals.end());
  for (const rpc::Verb verb : rpc::kAllVerbs) *all.add_verbs() = rpc::verb_name(verb);
  return answer;
}

Result<proto::AuthorizeResponse> AccessControl::authorize(
    const rpc::Peer& peer, const proto::AuthorizeRequest& request) const {
  const auto verb = rpc::verb_from(request.verb());
  if (!verb) {
    return fail(ErrorCode::kInvalid, "'{}' is no verb; there are: {}", request.verb(),
                rpc::verb_names());
  }
  if (request.principals().empty() || request.principals_size() > kMostPrincipals) {
    return fail(ErrorCode::kInvalid, "a question about {} principals; 1 to {} are possible",
                request.principals_size(), kMostPrincipals);
  }
  const std::vector<std::string> asked(request.principals().begin(), request.principals().end());
  const auto own = rpc::principals_of(peer);
  const bool about_itself = std::ranges::all_of(
      asked, [&](const auto& each) { return std::ranges::count(own, each) > 0; });
  if (!about_itself && peer.role != proto::ROLE_AGENT) {
    TRY_VOID(allow(own, rpc::Verb::kAdmin, ""));
  }
  const auto allowed = allow(asked, *verb, request.model());
  proto::AuthorizeResponse answer;
  answer.set_allowed(allowed.has_value());
  answer.set_why(allowed ? *allowed : allowed.error().message());
  return answer;
}

Result<void> AccessControl::admit(const rpc::Peer& peer, const rpc::MethodRule& rule,
                                  const rpc::CallObject& object) {
  if (rights_ != nullptr && rule.verb != rpc::Verb::kNone) {
    // The certificate of an agent says that it is one, and a secret is that of all members.
    const bool is_member =
        peer.proof != rpc::Proof::kCertificate || rpc::certified_role(peer.principals);
    if (rule.verb != rpc::Verb::kMember || !is_member) {
      auto allowed = allow(rpc::principals_of(peer), rule.verb, object.model);
      if (!allowed) return fail(std::move(allowed).error());
    }
  }
  // The fleet must not come apart because a disk is full.
  if (audit_ == nullptr || !rule.audited || rule.verb == rpc::Verb::kMember) return {};
  return audit_->check();
}

void AccessControl::denied(const rpc::Peer& peer, proto::Method method, const Error& why) {
  if (audit_ != nullptr)
    audit_->write_some(entry_of(peer, method, "", fail(Error(why))), steady_now());
}

void AccessControl::ended(const rpc::Peer& peer, proto::Method method,
                          const rpc::CallObject& object, const Result<void>& outcome) {
  if (audit_ != nullptr) audit_->write(entry_of(peer, method, object.text, outcome));
}

void AccessControl::refused(const std::string& address, const Error& why) {
  AuditEntry entry;
  entry.act = "connect";
  entry.result = why.message();
  entry.address = address;
  if (audit_ != nullptr) audit_->write_some(std::move(entry), steady_now());
}

}  // namespace rekindle::coordinator
