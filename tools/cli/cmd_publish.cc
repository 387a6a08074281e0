#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/coordinator.pb.h"
#include "src/base/units.h"
#include "src/store/segment_store.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "tools/cli/progress_view.h"
#include "tools/cli/publisher_keys.h"
#include "tools/cli/remote.h"

namespace rekindle::cli {
namespace {

struct PublishArgs {
  std::string id;
  std::vector<std::string> paths;
  std::optional<std::uint32_t> replicas;
  std::string otlp;
  std::string sign_key;
};

// Read here, because a signature that covered what another process says would prove nothing.
Result<Digest> root_to_sign(const Settings& settings, const agent::PublishRequest& request) {
  ProgressView view("sign", ProgressView::style_for_stderr(settings.quiet));
  return store::root_of_files(request.id, request.paths, [&](const store::PublishProgress& done) {
    pull::Progress progress;
    progress.phase = "sign";
    progress.id = request.id;
    progress.bytes_done = done.bytes_done;
    progress.bytes_total = done.bytes_total;
    view.update(progress);
  });
}

Result<int> publish(const Settings& settings, const PublishArgs& args) {
  agent::PublishRequest request;
  TRY(request.id, parse_model_version(args.id));
  for (const std::string& path : args.paths) {
    std::error_code error;
    const auto absolute = std::filesystem::canonical(path, error);
    if (error) return fail_errno(error.value(), path);
    request.paths.push_back(absolute);
  }
  request.replicas = args.replicas;
  TRY(auto traced, begin_span("rekindle publish", args.otlp));
  request.trace = traced.span.context();
  if (!args.sign_key.empty()) {
    TRY(const auto key, read_sign_key(args.sign_key));
    TRY(const Digest root, root_to_sign(settings, request));
    request.signatures = {sign_version(key, request.id, root)};
  }
  agent::LocalAgentOptions options = local_agent_options(settings);
  options.tracer = &traced.tracing->tracer;
  auto opened = agent::open_local_agent(options);
  if (!opened) {
    traced.span.end(opened);
    return fail(std::move(opened).error());
  }
  const auto host = std::move(*opened);
  pull::TransferSummary summary;
  {
    ProgressView view("publish", ProgressView::style_for_stderr(settings.quiet));
    auto published = host->publish(request, [&](const pull::Progress& p) { view.update(p); });
    traced.span.end(published);
    if (!published) return fail(std::move(published).error());
    summary = std::move(*published);
  }
  if (settings.json) {
    Json report = to_json(summary);
    report["embedded"] = host->embedded();
    report["trace"] = request.trace.trace.hex();
    print_json(report);
    return kExitOk;
  }
  const double elapsed = std::chrono::duration<double>(summary.elapsed).count();
  print_line(
      fmt::format("published {}: {} tensors, {} in {:.2f} s ({})", summary.id.to_string(),
                  summary.tensors, format_bytes(summary.bytes), elapsed,
                  format_rate(static_cast<double>(summary.bytes) / std::max(elapsed, 1e-3))));
  print_line(fmt::format("  root {}", summary.root.hex()));
  print_line(fmt::format("  at   {}", printable(summary.path.string())));
  print_signers(summary.signatures);
  if (settings.coordinator.empty() && host->embedded()) {
    print_line("  kept in the local store only: no agent runs here and no --coordinator was given");
  }
  return kExitOk;
}

struct RetireArgs {
  std::string id;
  bool everywhere = false;
  bool force = false;
  std::optional<std::uint32_t> deadline_s;
};

Result<int> retire_everywhere(const Settings& settings, const ModelVersion& id,
                              const RetireArgs& args) {
  if (settings.coordinator.empty()) {
    return fail(ErrorCode::kInvalid, "--everywhere needs a --coordinator");
  }
  TRY(const auto coordinator, Remote::create(settings, settings.coordinator));
  proto::RetireRequest request;
  request.mutable_id()->set_model(id.model);
  request.mutable_id()->set_version(id.version);
  constexpr std::uint32_t kMaxSeconds = 86400;
  if (args.deadline_s) request.set_deadline_ms(std::min(*args.deadline_s, kMaxSeconds) * 1000);
  if (args.force) request.set_deadline_ms(0);
  TRY(const auto response, (coordinator->call<proto::COORDINATOR_RETIRE>(request)));
  print_result(settings.json,
               {{"model", id.model}, {"version", id.version}, {"nodes", response.nodes()}},
               fmt::format("retired {}: {} hosts were told to remove it\n", id.to_string(),
                           response.nodes()));
  return kExitOk;
}

Result<int> retire(const Settings& settings, const RetireArgs& args) {
  TRY(const ModelVersion id, parse_model_version(args.id));
  if (args.everywhere) return retire_everywhere(settings, id, args);
  TRY(const auto host, agent::open_local_agent(local_agent_options(settings)));
  TRY(const std::uint64_t freed, host->retire(id));
  print_result(
      settings.json, {{"model", id.model}, {"version", id.version}, {"freed_bytes", freed}},
      fmt::format("retired {} on this host: {} freed\n", id.to_string(), format_bytes(freed)));
  return kExitOk;
}

struct ReleaseArgs {
  std::string what, device;
  bool all = false;
};

Result<int> release(const Settings& settings, const ReleaseArgs& args) {
  std::optional<ModelRef> what;
  if (args.what.empty() != args.all) {
    return fail(ErrorCode::kInvalid, "release what? Name a model or version, or say --all");
  }
  if (!args.all) {
    TRY(what, ModelRef::parse(args.what));
  }
  TRY(const auto host, agent::open_local_agent(local_agent_options(settings)));
  TRY(const std::uint64_t released, host->release(what, args.device));
  print_result(settings.json, {{"released", released}},
               fmt::format("{} resident copies released\n", released));
  return kExitOk;
}

}  // namespace

void add_release(Command& app, Session& session) {
  Command sub = app.command(
      "release",
      "Give back GPU memory that workers of this host have left for their successors. A worker\n"
      "that runs keeps its memory; only its successor has to load.");
  auto args = std::make_shared<ReleaseArgs>();
  sub.option("MODEL[@VERSION]", args->what, "Whose parameters, e.g. qwen3");
  sub.option("--device", args->device, "Only on this device: GPU-6f2c... [all]").type_name("ID");
  sub.flag("--all", args->all, "Those of all models");
  sub.runs(session, "release", [&session, args] { return release(session.settings, *args); });
}

void add_publish(Command& app, Session& session) {
  Command sub = app.command(
      "publish",
      "Give the fleet a checkpoint: safetensors files, or a directory of them with their index "
      "and\n"
      "config files. The store keeps its own copy, so the files may change afterwards. "
      "Through\n"
      "this host's agent when one runs, else straight into the store. A version is published "
      "once:\n"
      "again with other bytes is refused.");
  auto args = std::make_shared<PublishArgs>();
  sub.option("MODEL@VERSION", args->id, "Name and training step, e.g. qwen3@41").required();
  sub.option("PATH", args->paths, "One directory, or .safetensors files").required();
  sub.option("--replicas", args->replicas,
             "Whole copies that the fleet keeps, in different failure domains [the "
             "coordinator's --replicas]")
      .type_name("R")
      .between(0u, 1024u);
  sub.option("--sign-key", args->sign_key,
             "Sign the version with this Ed25519 key (`rekindle keys new`), for those who trust\n"
             "only some publishers; reads the files once more [unsigned]")
      .type_name("FILE");
  add_otlp_option(sub, args->otlp);
  sub.runs(session, "publish", [&session, args] { return publish(session.settings, *args); });
}

void add_retire(Command& app, Session& session) {
  Command sub = app.command(
      "retire",
      "Retire a version: remove this host's copy, or with --everywhere all copies. Pulls that\n"
      "read it continue from other holders; the memory is free when its last reader is done.");
  auto args = std::make_shared<RetireArgs>();
  sub.option("MODEL@VERSION", args->id, "The version to retire, e.g. qwen3@40").required();
  CommandOption everywhere =
      sub.flag("--everywhere", args->everywhere, "On all hosts, through the coordinator");
  CommandOption deadline =
      sub.option("--deadline", args->deadline_s,
                 "With --everywhere: seconds until sessions that still use it are ended "
                 "(default 600)")
          .needs(everywhere);
  sub.flag("--force", args->force,
           "With --everywhere: do not wait for sessions that use it, end them")
      .needs(everywhere)
      .excludes(deadline);
  sub.runs(session, "retire", [&session, args] { return retire(session.settings, *args); });
}

}  // namespace rekindle::cli
