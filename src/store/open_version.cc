#include <unordered_map>

#include "src/store/files.h"
#include "src/store/scan.h"
#include "src/store/store_directory.h"
#include "src/tensor/safetensors.h"

namespace rekindle::store {

namespace {

constexpr std::uint64_t kMaxManifestBytes = std::uint64_t{1} << 31;

// The file's own header must say what the layout says; other tools go by it.
Result<void> check_header(const Manifest& manifest, std::span<const LayoutEntry* const> entries,
                          const MappedSegment& segment) {
  const fs::path& path = segment.path();
  // By descriptor: the mapped file, which may have no name any more.
  auto header = safetensors::read_header(fmt::format("/proc/self/fd/{}", segment.fd()));
  if (!header) return fail(std::move(header).error().with_context(path.string()));
  std::unordered_map<std::string_view, const safetensors::Entry*> by_name;
  by_name.reserve(header->entries.size());
  for (const auto& entry : header->entries) by_name.emplace(entry.info.name, &entry);
  for (const LayoutEntry* const wanted : entries) {
    const LayoutEntry& entry = *wanted;
    const TensorInfo& tensor = manifest.checkpoint->tensors[entry.tensor];
    const std::string name = box_entry_name(tensor, entry.box);
    const auto at = by_name.find(name);
    if (at == by_name.end() || at->second->info.dtype != tensor.dtype ||
        at->second->info.shape != entry.box.extent ||
        (at->second->offset_bytes != entry.offset_bytes && !entry.box.empty())) {
      return fail(ErrorCode::kCorrupt, "{}: its header does not hold '{}' as the manifest says",
                  path.string(), name);
    }
  }
  return {};
}

}  // namespace

Result<StoredVersion> load_copy(const fs::path& directory, Evidence evidence) {
  const fs::path path = directory / kManifestName;
  TRY(const std::string bytes, read_file(path, kMaxManifestBytes));
  auto manifest = Manifest::parse(bytes);
  if (!manifest) return fail(std::move(manifest).error().with_context(path.string()));
  const auto segments = manifest->layout.segments();
  std::vector<std::shared_ptr<MappedSegment>> files;
  for (std::uint32_t i = 0; i < segments.size(); ++i) {
    const fs::path file = directory / segments[i].name;
    TRY(auto mapped, MappedSegment::open_read(file, segments[i].size_bytes));
    files.push_back(std::move(mapped));
  }
  StoredVersion version(std::move(*manifest), std::move(files), directory, evidence);
  TRY_VOID(check_headers(version));
  return version;
}

Result<void> check_headers(const StoredVersion& version) {
  const Layout& layout = version.manifest.layout;
  std::vector<std::vector<const LayoutEntry*>> by_segment(layout.segments().size());
  for (const LayoutEntry& entry : layout.entries()) by_segment[entry.segment].push_back(&entry);
  for (std::uint32_t i = 0; i < layout.segments().size(); ++i) {
    TRY_VOID(check_header(version.manifest, by_segment[i], *version.segments[i]));
  }
  return {};
}

Result<StoredVersion> open_version(const fs::path& path) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    if (!fs::exists(path / kManifestName, ignored)) {
      return fail(ErrorCode::kNotFound, "{} has no {}: it is not a copy in a rekindle store",
                  path.string(), kManifestName);
    }
    return load_copy(path, Evidence::kStamps);
  }
  if (path.filename() != kManifestName) {
    return fail(ErrorCode::kInvalid, "{} is neither a directory nor a {}", path.string(),
                kManifestName);
  }
  return load_copy(path.has_parent_path() ? path.parent_path() : fs::path("."), Evidence::kStamps);
}

}  // namespace rekindle::store
