#include "src/store/scan.h"

#include <algorithm>

#include <unistd.h>

#include "src/base/log.h"
#include "src/store/files.h"
#include "src/store/store_directory.h"

namespace rekindle::store {

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

// What a crash between the commit and its clean-up left.
void clean_committed(const fs::path& directory) {
  for (const std::string_view name : {kResumeName, kPartialManifestName}) {
    if (auto gone = unlink_if_present(directory / name); !gone) {
      log::warn("store.clean", "directory", directory.string(), "error", gone.error());
    }
  }
}

Result<void> scan_copy(StoreState& state, const fs::path& directory, const ModelVersion& id) {
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

Result<void> scan_version(StoreState& state, const fs::path& directory) {
  const auto id = decode_version(directory.filename().string());
  if (!id || !is_real_directory(directory)) {
    warn_stray(directory);
    return {};
  }
  TRY_VOID(sync_directory(directory));  // for the same reason, and models/ below
  TRY(const auto copies, entries_of(directory));
  for (const fs::path& copy : copies) {
    if (!is_layout_name(copy.filename().string()) || !is_real_directory(copy)) {
      warn_stray(copy);
      continue;
    }
    if (auto scanned = scan_copy(state, copy, *id); !scanned) {
      log::error("store.unreadable_copy", "directory", copy.string(), "error", scanned.error());
    }
  }
  ::rmdir(directory.c_str());  // succeeds only when nothing is in it
  return {};
}

}  // namespace

Result<void> scan_store(StoreState& state) {
  TRY_VOID(state.pool().discard_leftovers());
  TRY(const auto staged, entries_of(state.directory() / kStagingName));
  for (const fs::path& directory : staged) TRY_VOID(discard_staged(state, directory));
  TRY_VOID(sync_directory(state.directory() / kModelsName));
  TRY(const auto versions, entries_of(state.directory() / kModelsName));
  for (const fs::path& directory : versions) TRY_VOID(scan_version(state, directory));
  return {};
}

}  // namespace rekindle::store
