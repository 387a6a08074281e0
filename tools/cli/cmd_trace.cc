#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "recovery/rpc/address.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/explanation.h"
#include "tools/cli/output.h"
#include "tools/cli/trace_query.h"

namespace rekindle::cli {
namespace {

struct TraceArgs {
  std::string what;
  std::string subject;
  std::string agent;
};

Result<CollectedTrace> collect(const Session& session, TraceWanted wanted,
                               const std::string& agent) {
  if (!agent.empty() && !agent.starts_with(rpc::kUnixPrefix)) {
    TRY_VOID(check_address("--agent", agent));
  }
  wanted.agent = agent;
  TRY(auto collected, collect_trace(session.settings, wanted));
  for (const std::string& silent : collected.silent) {
    std::fprintf(stderr, "rekindle %s: no spans from %s\n", session.command.c_str(),
                 printable(silent).c_str());
  }
  return collected;
}

Result<int> show_trace(const Session& session, const TraceArgs& args) {
  const TraceWanted wanted = trace_wanted(args.what);
  auto found = collect(session, wanted, args.agent);
  if (!found && wanted.operation == "update") {
    // The agent of this host knows its publications also without a coordinator.
    auto published =
        collect(session, {.operation = "publish", .subject = args.what, .agent = ""}, args.agent);
    const bool asked =
        found.error().code() == ErrorCode::kNotFound || session.settings.coordinator.empty();
    if (published || asked) found = std::move(published);
  }
  TRY(const auto collected, std::move(found));
  print_line(to_chrome_trace(collected.spans));
  return kExitOk;
}

Result<int> show_explanation(const Session& session, const TraceArgs& args) {
  const std::string operation = args.what == "publication" ? "publish" : args.what;
  TRY(const auto collected,
      collect(session, {.operation = operation, .subject = args.subject, .agent = ""}, args.agent));
  const auto findings = explain(operation, args.subject, collected.spans);
  if (findings.empty()) {
    return fail(ErrorCode::kNotFound, "the spans of {} have no {} in them", args.subject,
                args.what);
  }
  if (session.settings.json) {
    Json list = Json::array();
    for (const Finding& finding : findings) {
      Json item{{"kind", finding.kind}, {"text", finding.text}};
      if (!finding.advice.empty()) item["advice"] = finding.advice;
      list.push_back(std::move(item));
    }
    print_json({{"trace", collected.spans.front().context.trace.hex()}, {"findings", list}});
    return kExitOk;
  }
  for (const Finding& finding : findings) {
    print_line(printable(finding.text));
    if (!finding.advice.empty()) print_line("  " + printable(finding.advice));
  }
  return kExitOk;
}

constexpr const char* kAgentHelp = "Of a recovery: the agent of its host [this host's]";

}  // namespace

void add_trace(Command& app, Session& session) {
  Command sub = app.command(
      "trace",
      "Print what happened in a pull, update, publication or recovery, as JSON for Perfetto\n"
      "(https://ui.perfetto.dev) or chrome://tracing. Asks the coordinator and the agents that\n"
      "took part; those that do not answer are named on stderr. The newest operations are kept.");
  auto args = std::make_shared<TraceArgs>();
  sub.option("WHAT", args->what,
             "The id of a trace or pull (32 digits), MODEL@VERSION of an update or a\n"
             "publication, or an instance")
      .required();
  sub.option("--agent", args->agent, kAgentHelp).type_name("HOST:PORT");
  sub.footer("Example:\n  rekindle trace qwen3@42 > update.json\n");
  sub.runs(session, "trace", [&session, args] { return show_trace(session, *args); });
}

void add_explain(Command& app, Session& session) {
  Command sub = app.command(
      "explain",
      "Say where the time of a pull, update, publication or recovery went: its phases, what was\n"
      "slow and compared with what, what it waited for, what failed, and what to do.");
  auto args = std::make_shared<TraceArgs>();
  sub.option("WHAT", args->what, "pull, update, publication or recovery")
      .one_of({"pull", "update", "publication", "recovery"})
      .required();
  sub.option("SUBJECT", args->subject,
             "MODEL[@VERSION], the newest operation on it; the id of a pull or trace; or the\n"
             "instance of a recovery")
      .required();
  sub.option("--agent", args->agent, kAgentHelp).type_name("HOST:PORT");
  sub.footer("Examples:\n  rekindle explain pull qwen3@41\n  rekindle explain recovery chat\n");
  sub.runs(session, "explain", [&session, args] { return show_explanation(session, *args); });
}

}  // namespace rekindle::cli
