#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "src/base/units.h"
#include "src/tensor/tensor_set.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "tools/cli/progress_view.h"
#include "tools/cli/publisher_keys.h"

namespace rekindle::cli {
namespace {

struct PullArgs {
  std::string ref;
  std::string to, shard, spec, tensors, transport, fallback, root, otlp, source_timeout;
  std::vector<std::string> from, trust;
  bool dry_run = false;
  bool allow_code = false;
  transport::verbs::FabricOptions fabric;
  bool encrypt = false;
};

Result<agent::PullRequest> to_request(PullArgs args) {
  // `pull --from HOST:PORT MODEL`: --from takes several words; a model name has no colon.
  if (args.ref.empty() && args.from.size() > 1 && args.from.back().find(':') == std::string::npos) {
    args.ref = args.from.back();
    args.from.pop_back();
  }
  if (args.ref.empty()) {
    return fail(ErrorCode::kInvalid, "which model? rekindle pull MODEL[@VERSION]");
  }
  agent::PullRequest request;
  TRY(request.ref, ModelRef::parse(args.ref));
  if (!args.root.empty()) {
    auto root = Digest::from_hex(args.root);
    if (!root) return fail(std::move(root).error().with_context("--root " + args.root));
    request.root = *root;
  }
  if (!args.spec.empty()) {
    TRY(request.spec_json, read_text_file(args.spec));
    if (request.spec_json.empty()) {
      return fail(ErrorCode::kInvalid, "--spec {}: the file is empty", args.spec);
    }
    if (args.shard.empty()) {
      return fail(ErrorCode::kInvalid,
                  "--spec tells how to cut; name the part with --shard, e.g. "
                  "--shard tp=0/4");
    }
  }
  request.shard = args.shard;
  request.tensors_regex = args.tensors;
  for (const std::string& address : args.from) TRY_VOID(check_address("--from", address));
  request.from = args.from;
  request.transport = args.transport;
  if (!args.source_timeout.empty()) {
    TRY(request.silence, parse_duration("--source-timeout", args.source_timeout));
    if (request.silence.count() == 0) {
      return fail(ErrorCode::kInvalid, "--source-timeout 0: no source could ever send a byte");
    }
  }
  TRY(request.trust, read_trust(args.trust));
  request.allow_code = args.allow_code;
  request.encrypt = args.encrypt;
  if (!args.to.empty()) request.to = std::filesystem::absolute(args.to);
  if (!args.fallback.empty()) {
    std::error_code error;
    request.fallback = std::filesystem::canonical(args.fallback, error);
    if (error) return fail_errno(error.value(), "--fallback " + args.fallback);
  }
  return request;
}

void print_plan(const pull::PlanSummary& plan) {
  print_line(fmt::format("{}: {} tensors, {} wanted, {} over the wire in {} slices and {} buckets",
                         plan.id.to_string(), plan.tensors, format_bytes(plan.wanted_bytes),
                         format_bytes(plan.wire_bytes), plan.slices, plan.buckets));
  print_line(fmt::format("root {}", plan.root.hex()));
  std::vector<std::vector<std::string>> rows;
  for (const auto& source : plan.sources) {
    rows.push_back(
        {printable(source.name), printable(source.endpoint), format_bytes(source.bytes_available)});
  }
  print("\n" + table({{"SOURCE"}, {"ENDPOINT"}, {"HOLDS OF THE PLAN", true}}, rows));
  rows.clear();
  std::size_t files = 0;
  for (const auto& tensor : plan.wanted) {
    if (is_file_tensor(tensor.name)) {
      ++files;
      continue;
    }
    rows.push_back({printable(tensor.name), tensor.dtype, tensor.shape, tensor.box,
                    format_bytes(tensor.bytes)});
  }
  print("\n" + table({{"TENSOR"}, {"DTYPE"}, {"SHAPE"}, {"BOX"}, {"BYTES", true}}, rows));
  if (files > 0) print_line(fmt::format("and {} small files (configuration, tokenizer)", files));
  if (plan.wanted_total > plan.wanted.size()) {
    print_line(fmt::format("and {} more parts or files: choose some with --tensors",
                           plan.wanted_total - plan.wanted.size()));
  }
  for (const std::string& line : plan.missing) print_line("missing: " + printable(line));
  if (plan.missing_total > plan.missing.size()) {
    print_line(fmt::format("missing: and {} more", plan.missing_total - plan.missing.size()));
  }
}

Result<int> dry_run(const Settings& settings, agent::LocalAgent& host,
                    const agent::PullRequest& request) {
  TRY(const pull::PlanSummary plan, host.plan(request));
  if (settings.json) {
    print_json(to_json(plan));
  } else {
    print_plan(plan);
  }
  return plan.missing_total == 0 ? kExitOk : kExitNotFound;
}

void print_summary(const pull::TransferSummary& summary) {
  const double elapsed = std::max(std::chrono::duration<double>(summary.elapsed).count(), 1e-3);
  print_line(fmt::format("pulled {}: {} tensors, {} in {:.2f} s ({}), every byte verified",
                         summary.id.to_string(), summary.tensors, format_bytes(summary.bytes),
                         elapsed, format_rate(static_cast<double>(summary.bytes) / elapsed)));
  print_line(fmt::format("  root {}", summary.root.hex()));
  print_line(fmt::format("  into {}", printable(summary.path.string())));
  print_signers(summary.signatures);
  if (!summary.sources.empty()) print_line("  from " + describe_sources(summary.sources));
  if (!summary.left_out.empty()) {
    std::string names;
    for (const auto& name : summary.left_out) names += (names.empty() ? "" : ", ") + name;
    print_line(fmt::format("  left out {}: code that the checkpoint brings; --allow-code writes it",
                           printable(names)));
  }
  if (summary.resumed_bytes > 0) {
    print_line(fmt::format("  {} were here already", format_bytes(summary.resumed_bytes)));
  }
  if (summary.refetched_bytes > 0) {
    print_line(fmt::format("  {} fetched again (wrong or unfinished)",
                           format_bytes(summary.refetched_bytes)));
  }
}

Result<int> run_pull(Session& session, const PullArgs& args) {
  const Settings& settings = session.settings;
  TRY(agent::PullRequest request, to_request(args));
  TRY(auto traced, begin_span("rekindle pull", args.otlp));
  request.trace = traced.span.context();
  agent::LocalAgentOptions options = local_agent_options(settings);
  options.tracer = &traced.tracing->tracer;
  // --to leaves the store alone.
  options.embedded_only = !request.to.empty();
  options.rdma = {.enabled = !args.dry_run, .fabric = args.fabric};
  options.encrypt = args.encrypt;
  auto opened = agent::open_local_agent(options);
  if (!opened) {
    traced.span.end(opened);
    return fail(std::move(opened).error());
  }
  const auto host = std::move(*opened);
  if (args.dry_run) return dry_run(settings, *host, request);
  pull::TransferSummary summary;
  {
    ProgressView view("pull", ProgressView::style_for_stderr(settings.quiet));
    auto pulled = host->pull(request, [&](const pull::Progress& p) { view.update(p); });
    session.interrupted_by = host->interrupted_by();
    traced.span.end(pulled);
    if (!pulled) return fail(std::move(pulled).error());
    summary = std::move(*pulled);
    // An agent of an older release does not know the option.
    TRY_VOID(request.trust.check(summary.id, summary.root, summary.signatures));
  }
  if (settings.json) {
    Json report = to_json(summary);
    report["embedded"] = host->embedded();
    report["trace"] = request.trace.trace.hex();
    print_json(report);
  } else {
    print_summary(summary);
  }
  return kExitOk;
}

}  // namespace

void add_pull(Command& app, Session& session) {
  Command sub = app.command(
      "pull",
      "Fetch a checkpoint, or exactly a shard of it, from the hosts that hold it. Into the store\n"
      "(and this host serves it on), or with --to into a directory that any tool loads. Every "
      "byte\n"
      "is verified against the publisher's digests. A pull that was cut short resumes.");
  auto args = std::make_shared<PullArgs>();
  sub.option("MODEL[@VERSION]", args->ref, "e.g. qwen3@41; without version: the newest");
  sub.option("--to", args->to, "Make a complete checkpoint directory here").type_name("DIR");
  sub.flag("--allow-code", args->allow_code,
           "With --to: also write *.py files, which engines with trust_remote_code run [left out]");
  CommandOption shard =
      sub.option("--shard", args->shard,
                 "One rank's part: tp=R/N, pp=R/N, ep=R/N or several: tp=3/8,pp=0/2")
          .type_name("PLACE");
  sub.option("--spec", args->spec, "Sharding rules [built in, by config.json's model_type]")
      .type_name("FILE");
  sub.option("--tensors", args->tensors,
             "Only whole tensors whose names match (RE2 syntax, anywhere)")
      .type_name("REGEX")
      .excludes(shard);
  sub.option("--root", args->root,
             "Only the version with this root, as publish prints it; no source and no coordinator\n"
             "has to be trusted then")
      .type_name("HEX");
  add_trust_option(sub, args->trust);
  sub.option("--from", args->from,
             "Pull straight from these agents, without a coordinator; repeat or separate by "
             "commas")
      .type_name("HOST:PORT")
      .delimiter(',');
  sub.option("--transport", args->transport,
             "tcp, shm (same host) or verbs (RDMA) [the best there is]")
      .one_of({"tcp", "shm", "verbs"})
      .type_name("NAME");
  sub.option("--fallback", args->fallback,
             "Directory of safetensors files to read when no source is left")
      .type_name("DIR");
  sub.option("--source-timeout", args->source_timeout,
             "How long to look for sources while none of them sends a byte [4s]")
      .type_name("TIME");
  sub.flag("--encrypt", args->encrypt,
           "Read over encrypted data streams only (TLS 1.3), also where this host's agent pulls");
  add_fabric_options(sub, args->fabric);
  add_trusted_rails_option(sub, args->fabric);
  add_otlp_option(sub, args->otlp);
  sub.flag("-n,--dry-run", args->dry_run, "Show the plan, transfer nothing");
  sub.footer(
      "Examples:\n"
      "  rekindle pull qwen3@41 --to /tmp/qwen3\n"
      "  rekindle pull qwen3 --shard tp=3/8\n"
      "  rekindle pull qwen3@41 --from 10.0.0.3:7400 --tensors '^model\\.layers\\.0\\.' "
      "--dry-run\n");
  sub.runs(session, "pull", [&session, args] { return run_pull(session, *args); });
}

}  // namespace rekindle::cli
