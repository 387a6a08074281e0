#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "recovery/agent/local_agent.h"
#include "src/base/units.h"
#include "src/store/segment_store.h"
#include "tools/cli/arguments.h"
#include "tools/cli/checkpoint_view.h"
#include "tools/cli/command_line.h"
#include "tools/cli/exit_code.h"
#include "tools/cli/output.h"
#include "tools/cli/progress_view.h"
#include "tools/cli/status_view.h"

namespace rekindle::cli {
namespace {

Json checkpoint_json(const CheckpointView& view) {
  Json files = Json::array();
  for (const auto& [name, bytes] : view.files) files.push_back({{"name", name}, {"bytes", bytes}});
  Json tensors = Json::array();
  for (const auto& line : view.tensors) {
    Json tensor = {{"name", line.name},
                   {"dtype", line.dtype},
                   {"shape", line.shape},
                   {"bytes", line.bytes},
                   {"file", line.file}};
    if (!line.box.empty()) tensor["box"] = line.box;
    tensors.push_back(std::move(tensor));
  }
  Json result = {{"kind", view.kind}};
  if (view.id) {
    result["model"] = view.id->model;
    result["version"] = view.id->version;
  }
  if (view.root) result["root"] = view.root->hex();
  result["tensor_set"] = view.tensor_set.hex();
  result["layout"] = view.layout.hex();
  result["whole"] = view.whole;
  result["tensor_count"] = view.tensors.size();
  result["tensor_bytes"] = view.tensor_bytes;
  result["files"] = files;
  result["extras"] = view.extras;
  result["tensors"] = tensors;
  return result;
}

void print_view(const CheckpointView& view) {
  std::vector<std::vector<std::string>> rows;
  std::map<std::string, std::uint64_t> by_dtype;
  bool boxes = false;
  for (const auto& line : view.tensors) boxes |= !line.box.empty();
  for (const auto& line : view.tensors) {
    by_dtype[line.dtype] += line.bytes;
    std::vector<std::string> row = {printable(line.name), line.dtype, line.shape};
    if (boxes) row.push_back(line.box.empty() ? "whole" : line.box);
    row.push_back(fmt::format("{}", line.bytes));
    row.push_back(printable(line.file));
    rows.push_back(std::move(row));
  }
  std::vector<Column> columns = {{"TENSOR"}, {"DTYPE"}, {"SHAPE"}};
  if (boxes) columns.push_back({"BOX"});
  columns.push_back({"BYTES", true});
  columns.push_back({"FILE"});
  print(table(columns, rows) + "\n");
  std::string dtypes;
  for (const auto& [dtype, bytes] : by_dtype) {
    dtypes += fmt::format("{}{} {}", dtypes.empty() ? "" : ", ", dtype, format_bytes(bytes));
  }
  std::uint64_t file_bytes = 0;
  for (const auto& [name, bytes] : view.files) file_bytes += bytes;
  if (view.id) print_line(fmt::format("version     {}", view.id->to_string()));
  print_line(fmt::format("tensors     {}{}, {} ({})", view.tensors.size(),
                         view.whole ? "" : " (a part of the checkpoint)",
                         format_bytes(view.tensor_bytes), dtypes));
  print_line(fmt::format("files       {}, {}", view.files.size(), format_bytes(file_bytes)));
  std::string extras;
  for (const std::string& name : view.extras) extras += (extras.empty() ? "" : ", ") + name;
  if (!extras.empty()) print_line("with        " + printable(extras));
  if (view.root) print_line("root        " + view.root->hex());
  print_line("tensor set  " + view.tensor_set.hex());
  print_line("layout      " + view.layout.hex());
}

Result<int> verify(const Settings& settings, const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    return fail(ErrorCode::kNotFound, "{}: no such file or directory", path);
  }
  if (!is_store_copy(path)) {
    return fail(ErrorCode::kInvalid,
                "{} has no rekindle.manifest to verify against; name a copy in a store, e.g. "
                "/dev/shm/rekindle/models/qwen3@41/…, or a directory that `pull --to` made",
                path);
  }
  TRY(const store::StoredVersion version, store::open_version(path));
  const TimePoint begin = SteadyClock().now();
  pull::Progress progress;
  progress.phase = "verify";
  progress.id = version.manifest.checkpoint->id;
  ProgressView view("verify", ProgressView::style_for_stderr(settings.quiet || settings.json));
  TRY_VOID(store::verify_version(version, std::max(1U, std::thread::hardware_concurrency()),
                                 [&](const store::PublishProgress& done) {
                                   progress.bytes_done = done.bytes_done;
                                   progress.bytes_total = done.bytes_total;
                                   const double elapsed = seconds(SteadyClock().now() - begin);
                                   if (elapsed > 0)
                                     progress.bytes_per_second =
                                         static_cast<double>(done.bytes_done) / elapsed;
                                   view.update(progress);
                                 }));
  view.finish();
  const double elapsed = seconds(SteadyClock().now() - begin);
  const std::uint64_t bytes = version.manifest.layout.payload_bytes();
  const auto& checkpoint = *version.manifest.checkpoint;
  if (settings.json) {
    print_json({{"ok", true},
                {"model", checkpoint.id.model},
                {"version", checkpoint.id.version},
                {"root", checkpoint.root.hex()},
                {"layout", version.manifest.layout.digest().hex()},
                {"bytes", bytes},
                {"elapsed_ms", elapsed * 1e3}});
  } else {
    print_line(fmt::format("{}: {} verified in {:.2f} s ({}), every tile matches root {}",
                           checkpoint.id.to_string(), format_bytes(bytes), elapsed,
                           format_rate(static_cast<double>(bytes) / std::max(elapsed, 1e-3)),
                           checkpoint.root.hex()));
  }
  return kExitOk;
}

// `what` is MODEL@VERSION, or the path of a copy.
Result<ModelVersion> version_meant(const std::string& what) {
  std::error_code ignored;
  if (std::filesystem::exists(what, ignored) && is_store_copy(what)) {
    TRY(const store::StoredVersion version, store::open_version(what));
    return version.manifest.checkpoint->id;
  }
  return parse_model_version(what);
}

Result<int> repair(const Settings& settings, const std::string& what) {
  TRY(const ModelVersion id, version_meant(what));
  TRY(const auto host, agent::open_local_agent(local_agent_options(settings)));
  TRY(const auto copies, host->verify(id));
  const bool all_right = std::ranges::all_of(
      copies, [](const proto::CopyStatus& copy) { return copy.state() == "verified"; });
  if (settings.json) {
    Json list = Json::array();
    for (const auto& copy : copies) list.push_back(to_json(copy));
    print_json({{"ok", all_right}, {"copies", std::move(list)}});
  } else {
    print(copies_text({copies.begin(), copies.end()}));
  }
  return all_right ? kExitOk : kExitCorrupt;
}

}  // namespace

void add_inspect(Command& app, Session& session) {
  Command sub = app.command(
      "inspect",
      "Show the tensors of a safetensors file, a checkpoint directory or a copy in a store:\n"
      "names, dtypes, shapes, bytes, totals and the digests that name them.");
  auto path = std::make_shared<std::string>();
  sub.option("PATH", *path, "File or directory").required();
  sub.runs(session, "inspect", [&session, path]() -> Result<int> {
    TRY(const CheckpointView view, view_checkpoint(*path));
    if (session.settings.json) {
      print_json(checkpoint_json(view));
    } else {
      print_view(view);
    }
    return kExitOk;
  });
}

void add_verify(Command& app, Session& session) {
  Command sub = app.command("verify",
                            "Digest every byte of a copy again and compare it with its manifest. "
                            "Exit code 4 and the first\n"
                            "bad tensor when something differs.");
  auto path = std::make_shared<std::string>();
  auto mend = std::make_shared<bool>(false);
  sub.option("COPY", *path,
             "Directory with a rekindle.manifest, or that file; with --repair also "
             "MODEL@VERSION")
      .required();
  sub.flag("--repair", *mend,
           "All copies of the version in the --store, through its agent if one runs; wrong\n"
           "tiles are fetched from peers");
  sub.runs(session, "verify", [&session, path, mend] {
    return *mend ? repair(session.settings, *path) : verify(session.settings, *path);
  });
}

}  // namespace rekindle::cli
