#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <fmt/ranges.h>

#include "proto/rights.pb.h"
#include "recovery/agent/local_agent.h"
#include "recovery/rpc/address.h"
#include "recovery/rpc/audit_log.h"
#include "recovery/rpc/rights.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "tools/cli/remote.h"

namespace rekindle::cli {
namespace {

Result<std::unique_ptr<Remote>> ask_coordinator(const Settings& settings) {
  if (settings.coordinator.empty()) {
    return fail(ErrorCode::kInvalid, "give the fleet's --coordinator HOST:PORT");
  }
  return Remote::create(settings, settings.coordinator);
}

Json json_of(const proto::Right& right) {
  return {{"principals", right.principals()}, {"verbs", right.verbs()}, {"models", right.models()}};
}

// Without a coordinator the agent of this host answers.
Result<int> whoami(const Settings& settings) {
  std::string address = settings.coordinator;
  if (address.empty()) {
    const std::filesystem::path socket = agent::agent_socket(settings.store);
    std::error_code error;
    const bool runs = std::filesystem::exists(socket, error);
    if (error) {
      return fail(ErrorCode::kDenied,
                  "cannot look for the agent of this host at {}: {}; name your own --store, or a "
                  "--coordinator",
                  socket.string(), error.message());
    }
    if (!runs) {
      return fail(ErrorCode::kNotFound,
                  "no agent runs here ({} does not exist); name a --coordinator", socket.string());
    }
    address = std::string(rpc::kUnixPrefix) + socket.string();
  }
  TRY(const auto daemon, Remote::create(settings, address));
  TRY(const auto seen, daemon->call<proto::WHOAMI>({}));
  if (settings.json) {
    Json rights = Json::array();
    for (const auto& right : seen.rights()) rights.push_back(json_of(right));
    print_json({{"role", seen.role()},
                {"node", seen.node_id()},
                {"address", seen.address()},
                {"proof", seen.proof()},
                {"principals", seen.principals()},
                {"encrypted", seen.encrypted()},
                {"rights", rights}});
    return kExitOk;
  }
  print_line(printable(fmt::format("{} {} from {}, {}", seen.role(), seen.node_id(), seen.address(),
                                   seen.encrypted() ? "encrypted" : "not encrypted")));
  print_line("proof: " + printable(seen.proof()));
  for (const std::string& principal : seen.principals()) {
    print_line("principal: " + printable(principal));
  }
  for (const auto& right : seen.rights()) {
    const std::string models = right.models().empty()
                                   ? std::string("all models")
                                   : fmt::format("{}", fmt::join(right.models(), ", "));
    print_line(printable(fmt::format("may {} on {}", fmt::join(right.verbs(), ", "), models)));
  }
  if (seen.rights().empty()) print_line("no rights");
  return kExitOk;
}

struct AuthCheckArgs {
  std::string principal;
  std::string verb;
  std::string model;
  std::string rights;
};

Result<proto::AuthorizeResponse> check_right(const Settings& settings, const AuthCheckArgs& args) {
  proto::AuthorizeResponse answer;
  if (args.rights.empty()) {
    TRY(const auto coordinator, ask_coordinator(settings));
    proto::AuthorizeRequest request;
    request.add_principals(args.principal);
    request.set_verb(args.verb);
    request.set_model(args.model);
    return coordinator->call<proto::AUTHORIZE>(request);
  }
  TRY(const rpc::Rights rights, rpc::Rights::read(args.rights));
  const auto verb = rpc::verb_from(args.verb);
  if (!verb) {
    return fail(ErrorCode::kInvalid, "'{}' is no verb; there are: {}", args.verb,
                rpc::verb_names());
  }
  const auto allowed = rights.allow(std::span(&args.principal, 1), *verb, args.model);
  answer.set_allowed(allowed.has_value());
  answer.set_why(allowed ? *allowed : allowed.error().message());
  return answer;
}

Result<int> auth_check(const Settings& settings, const AuthCheckArgs& args) {
  TRY(const auto answer, check_right(settings, args));
  if (settings.json) {
    print_json({{"principal", args.principal},
                {"verb", args.verb},
                {"model", args.model},
                {"allowed", answer.allowed()},
                {"why", answer.why()}});
  } else {
    print_line((answer.allowed() ? "allowed: " : "denied: ") + printable(answer.why()));
  }
  return answer.allowed() ? kExitOk : kExitDenied;
}

Result<int> audit_verify(const Settings& settings, const std::vector<std::string>& files) {
  TRY(const auto chain, rpc::verify_audit({files.begin(), files.end()}));
  if (settings.json) {
    print_json({{"lines", chain.lines},
                {"first", chain.first},
                {"last", chain.last},
                {"lost", chain.lost},
                {"hash", chain.hash}});
    return kExitOk;
  }
  if (chain.lines == 0) {
    print_line("no lines");
    return kExitOk;
  }
  print_line(fmt::format("{} lines, {} to {}: each follows the one before it", chain.lines,
                         chain.first, chain.last));
  if (chain.lost > 0) print_line(fmt::format("{} acts could not be written", chain.lost));
  print_line("the last line has the hash " + chain.hash);
  return kExitOk;
}

}  // namespace

void add_audit(Command& app, Session& session) {
  Command sub = app.command("audit", "Read the audit log of a coordinator (`--audit`).");
  sub.require_command();
  Command verify = sub.command(
      "verify",
      "Find lines that were removed, changed or moved. What was cut off the end does not show:\n"
      "keep the hash of the last line elsewhere. Exit code 4: a line does not follow the one\n"
      "before it.");
  auto files = std::make_shared<std::vector<std::string>>();
  verify.option("FILE", *files, "The files of the log, the oldest first").required();
  verify.runs(session, "audit verify",
              [&session, files] { return audit_verify(session.settings, *files); });
}

void add_whoami(Command& app, Session& session) {
  Command sub = app.command("whoami",
                            "Show who this command is to the coordinator, or to the agent of this\n"
                            "host: how it has proven its name, its principals, and its rights.");
  sub.runs(session, "whoami", [&session] { return whoami(session.settings); });
}

void add_auth(Command& app, Session& session) {
  Command sub = app.command(
      "auth",
      "Say who may do what. A rights file is JSON; what no line allows is denied:\n"
      "  {\"rights\": [{\"principals\": [\"spiffe://example.org/rekindle/client/ops-*\"],\n"
      "               \"verbs\": [\"retire\", \"drain\"], \"models\": [\"qwen3*\"]}]}\n"
      "Without `models` a line is about all models. In a pattern, * is any text, ? one character.");
  sub.require_command();
  Command check = sub.command(
      "check", "Say whether a principal has a right, and by which line. Exit code 7: it has not.");
  auto args = std::make_shared<AuthCheckArgs>();
  check.option("PRINCIPAL", args->principal, "As `rekindle whoami` shows it").required();
  check.option("VERB", args->verb, "publish, read, retire, drain, update, admin or member")
      .required();
  check.option("MODEL", args->model, "The right on this model [on all models]");
  check
      .option("--rights", args->rights,
              "Read this rights file, and ask nobody [the rights of --coordinator]")
      .type_name("FILE");
  check.runs(session, "auth check",
             [&session, args] { return auth_check(session.settings, *args); });
}

}  // namespace rekindle::cli
