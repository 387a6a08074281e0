#include "tools/cli/checkpoint_view.h"

#include <algorithm>
#include <map>

#include "src/store/segment_store.h"
#include "src/tensor/layout.h"
#include "src/tensor/safetensors.h"
#include "src/tensor/tensor_set.h"

namespace rekindle::cli {
namespace {

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

}  // namespace

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

}  // namespace rekindle::cli
