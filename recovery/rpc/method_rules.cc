#include "recovery/rpc/method_rules.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/ranges.h>

#include "proto/agent.pb.h"
#include "proto/coordinator.pb.h"
#include "proto/drill.pb.h"
#include "proto/local.pb.h"
#include "proto/rights.pb.h"
#include "recovery/rpc/handshake.h"
#include "src/base/text.h"

namespace rekindle::rpc {

namespace {

constexpr std::uint32_t bit(proto::Role role) { return 1u << static_cast<unsigned>(role); }

constexpr std::uint32_t kAgent = bit(proto::ROLE_AGENT);
constexpr std::uint32_t kReader = kAgent | bit(proto::ROLE_PULLER);
constexpr std::uint32_t kCaller = kReader | bit(proto::ROLE_CLIENT);
constexpr std::uint32_t kAny = kCaller | bit(proto::ROLE_COORDINATOR);

constexpr std::array kVerbs = {std::pair{Verb::kPublish, std::string_view("publish")},
                               std::pair{Verb::kRead, std::string_view("read")},
                               std::pair{Verb::kRetire, std::string_view("retire")},
                               std::pair{Verb::kDrain, std::string_view("drain")},
                               std::pair{Verb::kUpdate, std::string_view("update")},
                               std::pair{Verb::kAdmin, std::string_view("admin")},
                               std::pair{Verb::kMember, std::string_view("member")}};

constexpr bool kAudited = true;

constexpr std::array kRules = {
    // Members.
    MethodRule{proto::COORDINATOR_REGISTER, kAgent, Verb::kMember},
    MethodRule{proto::COORDINATOR_HEARTBEAT, kAgent},
    MethodRule{proto::COORDINATOR_ANNOUNCE, kAgent},
    MethodRule{proto::COORDINATOR_REPORT_RANK, kAgent, Verb::kRead},
    MethodRule{proto::COORDINATOR_LET_GO, kAgent},
    MethodRule{proto::COORDINATOR_ROUND, kAgent},
    MethodRule{proto::COORDINATOR_REPORT_JOINT, kAgent, Verb::kPublish},
    // Publishers and pullers. A pull belongs to the process that opened it.
    MethodRule{proto::COORDINATOR_PUBLISH, kReader, Verb::kPublish, kAudited},
    MethodRule{proto::COORDINATOR_OPEN_PULL, kReader, Verb::kRead},
    MethodRule{proto::COORDINATOR_PULL_PROGRESS, kReader, Verb::kRead},
    MethodRule{proto::COORDINATOR_CLOSE_PULL, kReader},
    MethodRule{proto::COORDINATOR_RESOLVE, kCaller, Verb::kRead},
    // Operators. The status has only models that the caller may read.
    MethodRule{proto::COORDINATOR_STATUS, kAny},
    MethodRule{proto::COORDINATOR_UPDATE_STATUS, kCaller},
    MethodRule{proto::COORDINATOR_PLAN_UPDATE, kCaller, Verb::kUpdate},
    MethodRule{proto::COORDINATOR_BEGIN_UPDATE, kCaller, Verb::kUpdate, kAudited},
    MethodRule{proto::COORDINATOR_RETIRE, kCaller, Verb::kRetire, kAudited},
    MethodRule{proto::COORDINATOR_DRAIN, kCaller, Verb::kDrain, kAudited},
    // Of agents. Their grants and sessions decide.
    MethodRule{proto::AGENT_OPEN_DIRECT, kCaller, Verb::kRead},
    MethodRule{proto::AGENT_GET_PAGE, kReader},
    MethodRule{proto::AGENT_OPEN_SESSION, kReader},
    MethodRule{proto::AGENT_CLOSE_SESSION, kReader},
    MethodRule{proto::AGENT_PROVE_RANGES, kReader},
    MethodRule{proto::AGENT_CONNECT_PATHS, kReader},
    MethodRule{proto::AGENT_WATCH_HAVE, kReader},
    MethodRule{proto::AGENT_STATUS, kAny},
    MethodRule{proto::AGENT_JOINT, kAgent},
    // On the unix socket of an agent, to the same user.
    MethodRule{proto::LOCAL_PUBLISH, kCaller, Verb::kNone, kAudited},
    MethodRule{proto::LOCAL_PULL, kCaller},
    MethodRule{proto::LOCAL_RETIRE, kCaller, Verb::kNone, kAudited},
    MethodRule{proto::LOCAL_PLAN, kCaller},
    MethodRule{proto::LOCAL_VERIFY, kCaller},
    MethodRule{proto::LOCAL_RELEASE, kCaller, Verb::kNone, kAudited},
    MethodRule{proto::LOCAL_SWITCH, kCaller, Verb::kNone, kAudited},
    // Agents ask each other for the memory of a benchmark.
    MethodRule{proto::DRILL, kCaller, Verb::kAdmin, kAudited},
    // Spans name models and nodes.
    MethodRule{proto::FIND_TRACE, kCaller, Verb::kRead},
    MethodRule{proto::WHOAMI, kAny},
    MethodRule{proto::AUTHORIZE, kCaller},
};

constexpr std::string_view kRekindlePath = "/rekindle/";
// Of a name in a message.
constexpr std::size_t kShown = 128;

template <typename Request>
Result<CallObject> versioned(const std::string& body) {
  TRY(const Request request, parse_body<Request>(body));
  return CallObject{request.id().model(),
                    fmt::format("{}@{}", request.id().model(), request.id().version())};
}

template <typename Request>
Result<CallObject> modelled(const std::string& body) {
  TRY(const Request request, parse_body<Request>(body));
  return CallObject{request.model(), request.model()};
}

// "model@7"; "model" for its newest version, or for all versions.
std::string object_text(const std::string& model, std::uint64_t version) {
  return version == 0 ? model : fmt::format("{}@{}", model, version);
}

Result<CallObject> opened_directly(const std::string& body) {
  TRY(const auto request, parse_body<proto::OpenDirectRequest>(body));
  return CallObject{request.model(), object_text(request.model(), request.version())};
}

Result<CallObject> released(const std::string& body) {
  TRY(const auto request, parse_body<proto::LocalReleaseRequest>(body));
  return CallObject{"", object_text(request.model(), request.version())};
}

Result<CallObject> switched(const std::string& body) {
  TRY(const auto request, parse_body<proto::LocalSwitchRequest>(body));
  return CallObject{"", fmt::format("{} to {}", request.instance(),
                                    object_text(request.model(), request.version()))};
}

Result<CallObject> drilled(const std::string& body) {
  TRY(const auto request, parse_body<proto::DrillRequest>(body));
  const auto* const kind =
      proto::DrillRequest::descriptor()->FindFieldByNumber(request.kind_case());
  return CallObject{"", kind == nullptr ? "" : kind->name()};
}

}  // namespace

std::string_view verb_name(Verb verb) {
  const auto* const found = std::ranges::find(kVerbs, verb, &decltype(kVerbs)::value_type::first);
  return found == kVerbs.end() ? std::string_view() : found->second;
}

std::optional<Verb> verb_from(std::string_view name) {
  const auto* const found = std::ranges::find(kVerbs, name, &decltype(kVerbs)::value_type::second);
  return found == kVerbs.end() ? std::nullopt : std::optional(found->first);
}

std::string verb_names() {
  std::string names;
  for (const auto& [verb, name] : kVerbs) {
    if (!names.empty()) names += ", ";
    names += name;
  }
  return names;
}

const MethodRule* rule_of(proto::Method method) {
  const auto* const found = std::ranges::find(kRules, method, &MethodRule::method);
  return found == kRules.end() ? nullptr : found;
}

std::span<const MethodRule> method_rules() { return kRules; }

Result<CallObject> object_of(proto::Method method, const std::string& body) {
  switch (method) {
    case proto::COORDINATOR_PUBLISH:
      return versioned<proto::PublishRequest>(body);
    case proto::COORDINATOR_REPORT_JOINT:
      return versioned<proto::JointReport>(body);
    case proto::COORDINATOR_PULL_PROGRESS:
      return versioned<proto::PullProgressRequest>(body);
    case proto::COORDINATOR_RETIRE:
      return versioned<proto::RetireRequest>(body);
    case proto::COORDINATOR_BEGIN_UPDATE:
      return versioned<proto::BeginUpdateRequest>(body);
    case proto::COORDINATOR_PLAN_UPDATE:
      return versioned<proto::PlanUpdateRequest>(body);
    case proto::COORDINATOR_REPORT_RANK:
      return modelled<proto::RankReport>(body);
    case proto::COORDINATOR_OPEN_PULL:
      return modelled<proto::OpenPullRequest>(body);
    case proto::COORDINATOR_RESOLVE:
      return modelled<proto::ResolveRequest>(body);
    case proto::COORDINATOR_DRAIN: {
      TRY(const auto request, parse_body<proto::DrainRequest>(body));
      return CallObject{"", request.undo() ? request.node_id() + " (undo)" : request.node_id()};
    }
    case proto::COORDINATOR_REGISTER: {
      TRY(const auto request, parse_body<proto::RegisterRequest>(body));
      return CallObject{"", request.node().node_id()};
    }
    case proto::AGENT_OPEN_DIRECT:
      return opened_directly(body);
    case proto::LOCAL_PUBLISH:
      return versioned<proto::LocalPublishRequest>(body);
    case proto::LOCAL_RETIRE:
      return versioned<proto::LocalRetireRequest>(body);
    case proto::LOCAL_RELEASE:
      return released(body);
    case proto::LOCAL_SWITCH:
      return switched(body);
    case proto::DRILL:
      return drilled(body);
    default:
      return CallObject{};
  }
}

std::optional<CertifiedRole> certified_role(std::span<const std::string> principals) {
  for (const std::string& principal : principals) {
    constexpr std::string_view kScheme = "spiffe://";
    if (!principal.starts_with(kScheme)) continue;
    const std::size_t path = principal.find('/', kScheme.size());
    if (path == std::string::npos) return std::nullopt;
    const std::string_view rest = std::string_view(principal).substr(path);
    if (!rest.starts_with(kRekindlePath)) return std::nullopt;
    const std::string_view named = rest.substr(kRekindlePath.size());
    const std::size_t slash = named.find('/');
    if (named.empty()) return std::nullopt;
    if (slash == std::string_view::npos) return CertifiedRole{std::string(named), ""};
    // SPIFFE allows no empty part, so this is the name of nobody.
    if (slash + 1 == named.size()) return CertifiedRole{std::string(named), ""};
    return CertifiedRole{std::string(named.substr(0, slash)), std::string(named.substr(slash + 1))};
  }
  return std::nullopt;
}

Result<void> check_role(const Peer& peer, const MethodRule& rule) {
  const std::string name = proto::Method_Name(rule.method);
  if (!rule.allows(peer.role)) {
    return fail(ErrorCode::kDenied, "{} may not call {}: it is not for the role '{}'",
                describe(peer), name, role_name(peer.role));
  }
  const bool free_role = peer.role == proto::ROLE_PULLER || peer.role == proto::ROLE_CLIENT;
  if (free_role || peer.proof != Proof::kCertificate) return {};
  const auto certified = certified_role(peer.principals);
  if (!certified) return {};
  if (certified->role != role_name(peer.role) ||
      (peer.role == proto::ROLE_AGENT && !certified->is_of(peer.node_id))) {
    return fail(ErrorCode::kDenied,
                "{} may not call {}: its certificate names the {} '{}'; give it a certificate of "
                "its own, or start it with this name",
                describe(peer), name, cut_text(certified->role, kShown),
                cut_text(certified->name, kShown));
  }
  return {};
}

std::string describe(const Peer& peer) {
  std::string text = fmt::format("{} '{}'", role_name(peer.role), cut_text(peer.node_id, kShown));
  if (!peer.principals.empty())
    text += fmt::format(" ({})", cut_text(peer.principals.front(), kShown));
  if (!peer.address.empty()) text += " at " + peer.address;
  return text;
}

}  // namespace rekindle::rpc
