#include "recovery/agent/pull_export.h"

#include <cerrno>
#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "recovery/pull/tile_verifier.h"
#include "src/base/failpoint.h"
#include "src/base/unique_fd.h"
#include "src/store/store_directory.h"

namespace rekindle::agent {

namespace fs = std::filesystem;
using store::kManifestName;
using store::kPartialSuffix;

namespace {

// Lies in the inner store from before the first file of DIR is touched. It shows that the files of
// DIR are ours.
constexpr std::string_view kExporting = "exporting";

// Refuses symbolic links: their author would choose the file that is overwritten.
Result<void> check_no_link(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_symlink(fs::symlink_status(path, ignored))) return {};
  return fail(ErrorCode::kDenied,
              "{} is a symbolic link, which a pull does not write through: remove it, or choose "
              "another --to",
              path.string());
}

// A new file that replaces the file of its name. It replaces a link and does not follow it.
Result<void> write_file(const fs::path& path, std::string_view content) {
  std::error_code error;
  const fs::path temporary = path.string() + std::string(kPartialSuffix);
  fs::remove(temporary, error);
  const UniqueFd file(
      ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!file) return fail_errno(errno, fmt::format("create {}", temporary.string()));
  while (!content.empty()) {
    const ssize_t put = ::write(file.get(), content.data(), content.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return fail_errno(errno, fmt::format("write {}", temporary.string()));
    content.remove_prefix(static_cast<std::size_t>(put));
  }
  fs::rename(temporary, path, error);
  if (error) return fail_errno(error.value(), fmt::format("rename {}", path.string()));
  return {};
}

// One folder down at most (is_checkpoint_file).
Result<void> make_folder(const fs::path& folder) {
  TRY_VOID(check_no_link(folder));
  std::error_code error;
  fs::create_directory(folder, error);
  if (error) return fail_errno(error.value(), fmt::format("create {}", folder.string()));
  return {};
}

bool holds_files(const Checkpoint& checkpoint, const Layout& layout, std::uint32_t segment) {
  for (const auto& entry : layout.entries()) {
    if (entry.segment == segment) return is_file_tensor(checkpoint.tensors[entry.tensor].name);
  }
  return false;
}

Result<void> write_small_files(const store::StoredVersion& stored, const fs::path& directory) {
  const Checkpoint& checkpoint = *stored.manifest.checkpoint;
  for (const auto& entry : stored.manifest.layout.entries()) {
    const std::string& tensor = checkpoint.tensors[entry.tensor].name;
    if (!is_file_tensor(tensor)) continue;
    const std::string name = tensor.substr(kFileTensorPrefix.size());
    if (!is_checkpoint_file(name)) {
      return fail(ErrorCode::kInvalid, "the checkpoint carries a file named '{}': refused", name);
    }
    TRY(const std::string content,
        pull::read_verified_file(checkpoint, stored.manifest.layout, entry.tensor,
                                 [&](const LayoutEntry& part) { return stored.array(part); }));
    if (const fs::path folder = fs::path(name).parent_path(); !folder.empty()) {
      TRY_VOID(make_folder(directory / folder));
    }
    TRY_VOID(write_file(directory / name, content));
  }
  return {};
}

// The state of the files when their bytes matched. It is the evidence for every file that gets a
// name in DIR. The leases and mappings outlive the store.
Result<store::Verification::Stamps> verified_files(const store::StoredVersion& stored) {
  if (stored.verification->state() == store::CopyState::kVerified) {
    if (auto record = stored.verification->record()) return std::move(record->files);
  }
  // The error names the file where possible.
  if (auto now = stored.verification->stamp(); !now) {
    return fail(now.error().code(), "{}; run the same pull again", now.error().message());
  }
  return fail(ErrorCode::kCorrupt,
              "a file in {} was changed after its bytes had verified; run the same pull again",
              stored.directory.string());
}

Result<void> check_unchanged(const store::MappedSegment& segment,
                             const store::FileStamp& verified) {
  TRY(store::FileStamp now, segment.stamp());
  now.lease = verified.lease;
  if (now == verified) return {};
  return fail(ErrorCode::kCorrupt,
              "segment {} was changed after its bytes had verified; run the same pull again",
              segment.path().string());
}

// Checks that the name in DIR is that of the verified file. Links change its ctime, so only the
// lease tells whether somebody has written to it meanwhile.
Result<void> check_linked(store::MappedSegment& segment, const store::FileStamp& verified,
                          const fs::path& target) {
  struct stat status {};
  if (::lstat(target.c_str(), &status) != 0) {
    return fail_errno(errno, fmt::format("stat {}", target.string()));
  }
  const store::FileStamp named = store::FileStamp::of(status);
  if (named.device != verified.device || named.inode != verified.inode ||
      named.size_bytes != verified.size_bytes) {
    return fail(ErrorCode::kCorrupt,
                "{} is another file than the one that has verified; run the same pull again",
                target.string());
  }
  if (verified.lease == 0) return {};
  const auto lease = segment.lease();
  if (lease && *lease == verified.lease) return {};
  return fail(ErrorCode::kCorrupt,
              "{} was opened for writing after its bytes had verified; run the same pull again",
              target.string());
}

// Links files instead of moving them. The store's copy stays whole until the export is done, so
// that an interrupted export starts again without fetching anything.
Result<void> link_weights(const fs::path& segment, const fs::path& target) {
  const fs::path temporary = target.string() + std::string(kPartialSuffix);
  std::error_code error;
  fs::remove(temporary, error);
  fs::create_hard_link(segment, temporary, error);
  // The file system has no links.
  if (error) {
    fs::rename(segment, target, error);
  } else {
    fs::rename(temporary, target, error);
    std::error_code ignored;
    // It is still there when both names were one file already.
    fs::remove(temporary, ignored);
  }
  if (error) return fail_errno(error.value(), fmt::format("move weights to {}", target.string()));
  return {};
}

// Removes the names in DIR of files that are not the verified ones, so that nobody loads them.
Result<void> place_weights(const store::StoredVersion& stored,
                           const store::Verification::Stamps& verified,
                           const std::set<std::uint32_t>& dropped, const fs::path& directory) {
  std::vector<std::uint32_t> weights;
  for (std::uint32_t i = 0; i < stored.segments.size(); ++i) {
    if (!dropped.contains(i)) weights.push_back(i);
  }
  const auto target = [&](std::uint32_t i) {
    return directory / stored.manifest.layout.segments()[i].name;
  };
  for (const std::uint32_t i : weights) {
    TRY_VOID(check_unchanged(*stored.segments[i], verified[i]));
    TRY_VOID(failpoint("export.before_link"));
    TRY_VOID(link_weights(stored.segments[i]->path(), target(i)));
  }
  TRY_VOID(failpoint("export.after_weights"));
  for (const std::uint32_t i : weights) {
    auto good = check_linked(*stored.segments[i], verified[i], target(i));
    if (good) continue;
    std::error_code ignored;
    fs::remove(target(i), ignored);
    return good;
  }
  return {};
}

// Removes weights of an earlier export that this version does not have. Tools would load them, too.
void remove_other_weights(const fs::path& directory, const std::set<std::string>& kept) {
  std::vector<fs::path> others;
  std::error_code error;
  for (auto it = fs::directory_iterator(directory, error); !error && it != fs::end(it);
       it.increment(error)) {
    std::string name = it->path().filename().string();
    const bool partial = name.ends_with(kPartialSuffix);
    if (partial) name.resize(name.size() - kPartialSuffix.size());
    if (name.ends_with(".safetensors") && (partial || !kept.contains(name)))
      others.push_back(it->path());
  }
  for (const auto& path : others) fs::remove(path, error);
}

fs::path used_store(const fs::path& directory) { return directory / ".rekindle.used"; }

std::string make_index(const Manifest& manifest) {
  const Checkpoint& checkpoint = *manifest.checkpoint;
  std::map<std::string, std::string> weight_map;
  std::uint64_t total = 0;
  for (const auto& entry : manifest.layout.entries()) {
    const TensorInfo& info = checkpoint.tensors[entry.tensor];
    if (is_file_tensor(info.name)) continue;
    total += entry.box.elements() * dtype_size_bytes(info.dtype);
    weight_map[box_entry_name(info, entry.box)] = manifest.layout.segments()[entry.segment].name;
  }
  const nlohmann::json index = {{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
  return index.dump(2) + "\n";
}

// The manifest of DIR: the weights, without the segment of small files.
Result<Manifest> weights_only(const Manifest& manifest, const std::set<std::uint32_t>& dropped) {
  std::vector<SegmentSpec> segments;
  std::map<std::uint32_t, std::uint32_t> renumbered;
  for (std::uint32_t i = 0; i < manifest.layout.segments().size(); ++i) {
    if (dropped.contains(i)) continue;
    renumbered[i] = static_cast<std::uint32_t>(segments.size());
    segments.push_back(manifest.layout.segments()[i]);
  }
  std::vector<LayoutEntry> entries;
  for (LayoutEntry entry : manifest.layout.entries()) {
    if (dropped.contains(entry.segment)) continue;
    entry.segment = renumbered[entry.segment];
    entries.push_back(entry);
  }
  TRY(auto layout,
      Layout::create(manifest.checkpoint->tensors, std::move(segments), std::move(entries)));
  Manifest result = manifest;
  result.layout = std::move(layout);
  return result;
}

}  // namespace

fs::path export_store(const fs::path& directory) { return directory / ".rekindle"; }

void drop_unused_store(const fs::path& directory) {
  const fs::path inner = export_store(directory);
  std::error_code error;
  for (const std::string_view used : {store::kModelsName, store::kStagingName}) {
    for (auto it = fs::recursive_directory_iterator(inner / used, error);
         !error && it != fs::end(it); it.increment(error)) {
      if (!it->is_directory(error)) return;
    }
    if (error && error != std::errc::no_such_file_or_directory) return;
  }
  if (fs::exists(inner / kExporting, error)) return;
  fs::remove_all(inner, error);
}

Result<void> check_export_target(const fs::path& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) return fail_errno(error.value(), fmt::format("create {}", directory.string()));
  TRY_VOID(check_no_link(export_store(directory)));
  fs::remove_all(used_store(directory), error);
  // With a manifest, or after an interrupted export, the directory is ours.
  if (fs::exists(directory / kManifestName, error) ||
      fs::exists(export_store(directory) / kExporting, error)) {
    return {};
  }
  for (const auto& item : fs::directory_iterator(directory, error)) {
    if (item.path().extension() == ".safetensors") {
      return fail(ErrorCode::kDenied,
                  "{} already holds {}, which no pull put there: choose another --to",
                  directory.string(), item.path().filename().string());
    }
  }
  return {};
}

Result<void> export_checkpoint(const store::StoredVersion& stored, const fs::path& directory) {
  const Manifest& manifest = stored.manifest;
  std::error_code error;
  TRY(const auto verified, verified_files(stored));
  TRY_VOID(write_file(export_store(directory) / kExporting, ""));
  // Until the new manifest is there nothing vouches for the files.
  fs::remove(directory / kManifestName, error);
  std::set<std::uint32_t> dropped;
  std::set<std::string> kept;
  for (std::uint32_t i = 0; i < manifest.layout.segments().size(); ++i) {
    if (holds_files(*manifest.checkpoint, manifest.layout, i)) {
      dropped.insert(i);
    } else {
      kept.insert(manifest.layout.segments()[i].name);
    }
  }
  TRY_VOID(place_weights(stored, verified, dropped, directory));
  remove_other_weights(directory, kept);
  TRY_VOID(write_small_files(stored, directory));
  fs::remove(directory / "model.safetensors.index.json", error);
  if (kept.size() > 1) {
    TRY_VOID(write_file(directory / "model.safetensors.index.json", make_index(manifest)));
  }
  TRY_VOID(failpoint("export.before_manifest"));
  TRY(const Manifest weights, weights_only(manifest, dropped));
  TRY_VOID(write_file(directory / kManifestName, weights.serialize()));
  TRY_VOID(failpoint("export.after_manifest"));
  // In one step, because half a store would hinder the next pull.
  fs::rename(export_store(directory), used_store(directory), error);
  TRY_VOID(failpoint("export.before_clean"));
  fs::remove_all(used_store(directory), error);
  return {};
}

}  // namespace rekindle::agent
