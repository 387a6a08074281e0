#include "recovery/coordinator/access_control.h"

#include <algorithm>
#include <map>
#include <vector>

#include "recovery/rpc/handshake.h"

namespace rekindle::coordinator {

namespace {

constexpr int kMostPrincipals = 32;

template <typename Messages, typename Unreadable>
void drop_if(Messages& messages, const Unreadable& unreadable) {
  messages.erase(std::remove_if(messages.begin(), messages.end(), unreadable), messages.end());
}

}  // namespace

void AccessControl::set_rights(std::shared_ptr<const rpc::Rights> rights) {
  rights_ = std::move(rights);
  if (const auto changed = changed_.lock()) (*changed)();
}

std::shared_ptr<const void> AccessControl::on_change(std::function<void()> changed) {
  auto kept = std::make_shared<const std::function<void()>>(std::move(changed));
  changed_ = kept;
  return kept;
}

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
  return AuditedCalls::admit(peer, rule, object);
}

}  // namespace rekindle::coordinator
