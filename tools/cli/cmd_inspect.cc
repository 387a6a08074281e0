#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "recovery/agent/local_agent.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/base/units.h"
#include "src/store/segment_store.h"
#include "src/tensor/layout.h"
#include "src/tensor/safetensors.h"
#include "src/tensor/tensor_set.h"
#include "tools/cli/arguments.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"
#include "tools/cli/progress_view.h"
#include "tools/cli/status_view.h"

namespace rekindle::cli {
namespace {

// The facts that `inspect` shows of a safetensors file, a checkpoint directory or a copy in a
// store.
struct CheckpointView {
  struct Line {
    std::string name;
    std::string dtype;
    std::string shape;
    // "": the whole tensor.
    std::string box;
    std::string file;
    std::uint64_t bytes = 0;
  };
  // "safetensors" or "store copy".
  std::string kind;
  std::vector<Line> tensors;
  // Name and size.
  std::vector<std::pair<std::string, std::uint64_t>> files;
  // The small files: config.json, …
  std::vector<std::string> extras;
  Digest tensor_set;
  Digest layout;
  std::uint64_t tensor_bytes = 0;
  // Of a copy in a store only.
  std::optional<ModelVersion> id;
  std::optional<Digest> root;
  std::vector<VersionSignature> signatures;
  // It has every tensor of the checkpoint, completely.
  bool whole = true;
};

constexpr std::string_view kManifestName = "rekindle.manifest";

void add_layout(const TensorSet& tensors, const Layout& layout, CheckpointView& view) {
  for (const SegmentSpec& segment : layout.segments()) {
    view.files.emplace_back(segment.name, segment.size_bytes);
  }
  std::uint64_t whole_tensors = 0;
  for (const LayoutEntry& entry : layout.entries()) {
    const TensorInfo& info = tensors[entry.tensor];
    if (is_file_tensor(info.name)) {
      view.extras.push_back(info.name.substr(kFileTensorPrefix.size()));
      continue;
    }
    const std::uint64_t bytes = entry.box.elements() * dtype_size_bytes(info.dtype);
    const bool whole = entry.box == Box::whole(info.shape);
    whole_tensors += whole ? 1 : 0;
    view.tensor_bytes += bytes;
    view.tensors.push_back({info.name, std::string(dtype_name(info.dtype)), info.shape.to_string(),
                            whole ? "" : entry.box.to_string(),
                            layout.segments()[entry.segment].name, bytes});
  }
  const auto model_tensors = std::ranges::count_if(
      tensors.tensors(), [](const TensorInfo& info) { return !is_file_tensor(info.name); });
  view.whole = whole_tensors == static_cast<std::uint64_t>(model_tensors);
  view.tensor_set = tensors.digest();
  view.layout = layout.digest();
}

Result<CheckpointView> view_store_copy(const std::filesystem::path& path) {
  TRY(const store::StoredVersion version, store::open_version(path));
  CheckpointView view;
  view.kind = "store copy";
  view.id = version.manifest.checkpoint->id;
  view.root = version.manifest.checkpoint->root;
  view.signatures = version.manifest.checkpoint->signatures;
  add_layout(version.manifest.checkpoint->tensors, version.manifest.layout, view);
  return view;
}

Result<CheckpointView> view_files(const std::filesystem::path& path) {
  TRY(const safetensors::CheckpointFiles found, safetensors::find_checkpoint(path));
  std::vector<SegmentSpec> segments;
  std::vector<TensorInfo> infos;
  // By name.
  std::map<std::string, std::pair<std::uint32_t, std::uint64_t>> places;
  for (const auto& file : found.weights) {
    auto header = safetensors::read_header(file);
    if (!header) return fail(std::move(header).error());
    const auto segment = static_cast<std::uint32_t>(segments.size());
    segments.push_back({file.filename().string(), header->file_bytes});
    for (const safetensors::Entry& entry : header->entries) {
      places[entry.info.name] = {segment, entry.offset_bytes};
      infos.push_back(entry.info);
    }
  }
  TRY(const TensorSet tensors, TensorSet::create(std::move(infos)));
  std::vector<LayoutEntry> entries;
  for (TensorIndex i = 0; i < tensors.size(); ++i) {
    const auto [segment, offset] = places.at(tensors[i].name);
    entries.push_back({i, Box::whole(tensors[i].shape), segment, offset});
  }
  TRY(const Layout layout, Layout::create(tensors, std::move(segments), std::move(entries)));
  CheckpointView view;
  view.kind = "safetensors";
  add_layout(tensors, layout, view);
  for (const auto& [name, extra] : found.extras) view.extras.push_back(name);
  return view;
}

// Whether the path is the directory of a copy, or its manifest.
bool is_store_copy(const std::filesystem::path& path) {
  std::error_code ignored;
  return path.filename() == kManifestName ||
         std::filesystem::is_regular_file(path / kManifestName, ignored);
}

Result<CheckpointView> view_checkpoint(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    return fail(ErrorCode::kNotFound, "{}: no such file or directory", path.string());
  }
  return is_store_copy(path) ? view_store_copy(path) : view_files(path);
}

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
  if (view.root) {
    result["root"] = view.root->hex();
    result["signers"] = signers_json(view.signatures);
  }
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
  if (!view.signatures.empty()) print_line("signed by   " + describe_signers(view.signatures));
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
                {"signers", signers_json(checkpoint.signatures)},
                {"layout", version.manifest.layout.digest().hex()},
                {"bytes", bytes},
                {"elapsed_ms", elapsed * 1e3}});
  } else {
    print_line(fmt::format("{}: {} verified in {:.2f} s ({}), every tile matches root {}",
                           checkpoint.id.to_string(), format_bytes(bytes), elapsed,
                           format_rate(static_cast<double>(bytes) / std::max(elapsed, 1e-3)),
                           checkpoint.root.hex()));
    print_signers(checkpoint.signatures);
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
