#include <algorithm>
#include <unordered_map>

#include <unistd.h>

#include "src/base/log.h"
#include "src/store/files.h"
#include "src/store/store_directory.h"
#include "src/store/store_state.h"
#include "src/tensor/safetensors.h"

namespace rekindle::store {

namespace {

constexpr std::uint64_t kMaxManifestBytes = std::uint64_t{1} << 31;

// The file's own header must agree with the layout, because other tools read the header.
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

// Maps a committed copy and checks manifest, file sizes and headers (not the digests).
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

}  // namespace

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

namespace {

void warn_stray(const fs::path& path) {
  log::warn("store.stray_file", "file", path.string(), "action", "kept");
}

bool is_real_directory(const fs::path& path) {
  std::error_code ignored;
  return fs::symlink_status(path, ignored).type() == fs::file_type::directory;
}

Result<std::shared_ptr<const StoredVersion>> adopt(const fs::path& directory,
                                                   const ModelVersion& id, Evidence evidence) {
  TRY(StoredVersion version, load_copy(directory, evidence));
  const Digest& layout = version.manifest.layout.digest();
  if (version.manifest.checkpoint->id != id ||
      layout.hex().substr(0, 16) != directory.filename().string()) {
    return fail(ErrorCode::kCorrupt, "{} holds the manifest of {} layout {}", directory.string(),
                version.manifest.checkpoint->id.to_string(), layout.hex());
  }
  return std::make_shared<const StoredVersion>(std::move(version));
}

// Removes the files that a crash between the commit and its clean-up has left.
void clean_committed(const fs::path& directory) {
  for (const std::string_view name : {kResumeName, kPartialManifestName}) {
    if (auto gone = unlink_if_present(directory / name); !gone) {
      log::warn("store.clean", "directory", directory.string(), "error", gone.error());
    }
  }
}

Result<void> scan_copy(StoreState& state, const fs::path& directory, const ModelVersion& id,
                       const PublisherTrust& trust) {
  std::error_code ignored;
  TRY(const auto files, entries_of(directory));
  for (const fs::path& file : files) {
    if (!is_store_file(file.filename().string())) warn_stray(file);
  }
  if (fs::exists(directory / kRetiredName, ignored)) {
    return remove_copy(directory, state.pool(), Deletion::kLater);
  }
  if (fs::exists(directory / kManifestName, ignored)) {
    auto version = adopt(directory, id, state.evidence());
    if (version) {
      const Checkpoint& checkpoint = *(*version)->manifest.checkpoint;
      const auto trusted = trust.check(id, checkpoint.root, checkpoint.signatures);
      if (!trusted) version = fail(trusted.error());
    }
    if (version) {
      // The process that renamed the manifest may have been killed before it synced.
      TRY_VOID(sync_directory(directory));
      clean_committed(directory);
      state.commit(*version);
      return {};
    }
    log::error("store.unreadable_copy", "directory", directory.string(), "error", version.error(),
               "action", "not served; retire, pull or publish the version again to replace it");
  } else if (!fs::exists(directory / kPartialManifestName, ignored)) {
    // Neither committed nor begun. Files that only look like ours are kept.
    ::rmdir(directory.c_str());
    if (!fs::exists(directory, ignored)) return {};
  }
  state.release(directory, id, std::max<std::uint64_t>(1, disk_bytes(directory)));
  return {};
}

// Segments by way of the pool, which frees their bytes behind the open.
Result<void> discard_staged(StoreState& state, const fs::path& directory) {
  if (is_real_directory(directory)) {
    TRY(const auto files, entries_of(directory));
    for (const fs::path& file : files) {
      if (!is_segment_name(file.filename().string()) || is_real_directory(file)) continue;
      TRY_VOID(state.pool().put(file, Deletion::kLater));
    }
  }
  return remove_tree(directory);
}

Result<void> scan_version(StoreState& state, const fs::path& directory,
                          const PublisherTrust& trust) {
  const auto id = decode_version(directory.filename().string());
  if (!id || !is_real_directory(directory)) {
    warn_stray(directory);
    return {};
  }
  // Its entries, and those of models/ below, may not be synced either.
  TRY_VOID(sync_directory(directory));
  TRY(const auto copies, entries_of(directory));
  for (const fs::path& copy : copies) {
    if (!is_layout_name(copy.filename().string()) || !is_real_directory(copy)) {
      warn_stray(copy);
      continue;
    }
    if (auto scanned = scan_copy(state, copy, *id, trust); !scanned) {
      log::error("store.unreadable_copy", "directory", copy.string(), "error", scanned.error());
    }
  }
  ::rmdir(directory.c_str());  // succeeds only when nothing is in it
  return {};
}

}  // namespace

Result<void> scan_store(StoreState& state, const PublisherTrust& trust) {
  TRY_VOID(state.pool().discard_leftovers());
  TRY(const auto staged, entries_of(state.directory() / kStagingName));
  for (const fs::path& directory : staged) TRY_VOID(discard_staged(state, directory));
  TRY_VOID(sync_directory(state.directory() / kModelsName));
  TRY(const auto versions, entries_of(state.directory() / kModelsName));
  for (const fs::path& directory : versions) TRY_VOID(scan_version(state, directory, trust));
  return {};
}

}  // namespace rekindle::store
