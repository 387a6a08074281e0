#include "recovery/agent/pull_export.h"

#include <algorithm>
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
#include "src/base/beneath.h"
#include "src/base/failpoint.h"
#include "src/base/unique_fd.h"
#include "src/store/store_directory.h"
#include "src/tensor/canonical.h"

namespace rekindle::agent {

namespace fs = std::filesystem;
using store::kManifestName;
using store::kPartialSuffix;

namespace {

// Lies in the inner store from before the first file of DIR is touched. It shows that the files of
// DIR are ours.
constexpr std::string_view kExporting = "exporting";

bool holds_files(const Checkpoint& checkpoint, const Layout& layout, std::uint32_t segment) {
  for (const auto& entry : layout.entries()) {
    if (entry.segment == segment) return is_file_tensor(checkpoint.tensors[entry.tensor].name);
  }
  return false;
}

// What runs by itself when a model is loaded: engines import it with trust_remote_code.
bool is_code_file(std::string_view name) { return name.ends_with(".py"); }

// On a file system that ignores the case of names, the later one would replace the earlier one.
Result<void> check_names_differ(const std::set<std::string>& names, const std::string& name) {
  const auto other = std::ranges::find(names, canonical::folded_name(name), canonical::folded_name);
  if (other == names.end()) return {};
  return fail(ErrorCode::kInvalid,
              "the checkpoint carries files named '{}' and '{}', which are one file on some file "
              "systems: refused",
              *other, name);
}

// Returns the files that were left out.
Result<std::vector<std::string>> write_small_files(const store::StoredVersion& stored,
                                                   int directory, bool allow_code) {
  const Checkpoint& checkpoint = *stored.manifest.checkpoint;
  std::set<std::string> names;
  std::vector<std::string> left_out;
  for (const auto& entry : stored.manifest.layout.entries()) {
    const std::string& tensor = checkpoint.tensors[entry.tensor].name;
    if (!is_file_tensor(tensor)) continue;
    const std::string name = tensor.substr(kFileTensorPrefix.size());
    if (!is_checkpoint_file(name)) {
      return fail(ErrorCode::kInvalid, "the checkpoint carries a file named '{}': refused",
                  canonical::printable(name));
    }
    if (is_code_file(name) && !allow_code) {
      left_out.push_back(name);
      continue;
    }
    TRY_VOID(check_names_differ(names, name));
    names.insert(name);
    TRY(const std::string content,
        pull::read_verified_file(checkpoint, stored.manifest.layout, entry.tensor,
                                 [&](const LayoutEntry& part) { return stored.array(part); }));
    // One folder down at most (is_checkpoint_file).
    const auto slash = name.find('/');
    if (slash == std::string::npos) {
      TRY_VOID(replace_beneath(directory, name, content));
      continue;
    }
    TRY(const UniqueFd folder, make_beneath(directory, name.substr(0, slash)));
    TRY_VOID(replace_beneath(folder.get(), name.substr(slash + 1), content));
  }
  return left_out;
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
                          int directory, const std::string& name) {
  struct stat status {};
  if (::fstatat(directory, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
    return fail_errno(errno, "stat " + name);
  }
  const store::FileStamp named = store::FileStamp::of(status);
  if (named.device != verified.device || named.inode != verified.inode ||
      named.size_bytes != verified.size_bytes) {
    return fail(ErrorCode::kCorrupt,
                "{} is another file than the one that has verified; run the same pull again", name);
  }
  if (verified.lease == 0) return {};
  const auto lease = segment.lease();
  if (lease && *lease == verified.lease) return {};
  return fail(ErrorCode::kCorrupt,
              "{} was opened for writing after its bytes had verified; run the same pull again",
              name);
}

// Links files instead of moving them. The store's copy stays whole until the export is done, so
// that an interrupted export starts again without fetching anything.
Result<void> link_weights(const fs::path& segment, int directory, const std::string& name) {
  const std::string temporary = name + std::string(kPartialSuffix);
  ::unlinkat(directory, temporary.c_str(), 0);
  if (::linkat(AT_FDCWD, segment.c_str(), directory, temporary.c_str(), 0) != 0) {
    // The file system has no links.
    if (::renameat(AT_FDCWD, segment.c_str(), directory, name.c_str()) == 0) return {};
    return fail_errno(errno, "move weights to " + name);
  }
  if (::renameat(directory, temporary.c_str(), directory, name.c_str()) != 0) {
    return fail_errno(errno, "move weights to " + name);
  }
  // It is still there when both names were one file already.
  ::unlinkat(directory, temporary.c_str(), 0);
  return {};
}

// Removes the names in DIR of files that are not the verified ones, so that nobody loads them.
Result<void> place_weights(const store::StoredVersion& stored,
                           const store::Verification::Stamps& verified,
                           const std::set<std::uint32_t>& dropped, int directory) {
  std::vector<std::uint32_t> weights;
  for (std::uint32_t i = 0; i < stored.segments.size(); ++i) {
    if (!dropped.contains(i)) weights.push_back(i);
  }
  const auto name = [&](std::uint32_t i) { return stored.manifest.layout.segments()[i].name; };
  for (const std::uint32_t i : weights) {
    TRY_VOID(check_unchanged(*stored.segments[i], verified[i]));
    TRY_VOID(failpoint("export.before_link"));
    TRY_VOID(link_weights(stored.segments[i]->path(), directory, name(i)));
  }
  TRY_VOID(failpoint("export.after_weights"));
  for (const std::uint32_t i : weights) {
    auto good = check_linked(*stored.segments[i], verified[i], directory, name(i));
    if (good) continue;
    ::unlinkat(directory, name(i).c_str(), 0);
    return good;
  }
  return {};
}

// Removes weights of an earlier export that this version does not have. Tools would load them, too.
void remove_other_weights(int directory, const std::set<std::string>& kept) {
  std::vector<std::string> others;
  std::error_code error;
  for (auto it = fs::directory_iterator(path_of(directory), error); !error && it != fs::end(it);
       it.increment(error)) {
    const std::string file = it->path().filename().string();
    std::string name = file;
    const bool partial = name.ends_with(kPartialSuffix);
    if (partial) name.resize(name.size() - kPartialSuffix.size());
    if (name.ends_with(".safetensors") && (partial || !kept.contains(name))) others.push_back(file);
  }
  for (const auto& file : others) ::unlinkat(directory, file.c_str(), 0);
}

constexpr const char* kInnerStore = ".rekindle";
constexpr const char* kUsedStore = ".rekindle.used";

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

fs::path export_store(const fs::path& directory) { return directory / kInnerStore; }

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
  TRY(const UniqueFd target, open_directory(directory));
  const auto inner = open_beneath(target.get(), kInnerStore, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!inner && inner.error().code() != ErrorCode::kNotFound) {
    return fail(Error(inner.error()).with_context(directory.string()));
  }
  fs::remove_all(path_of(target.get()) / kUsedStore, error);
  struct stat ignored {};
  const auto has = [&](int at, const char* name) {
    return ::fstatat(at, name, &ignored, AT_SYMLINK_NOFOLLOW) == 0;
  };
  // With a manifest, or after an interrupted export, the directory is ours.
  if (has(target.get(), std::string(kManifestName).c_str()) ||
      (inner && has(inner->get(), std::string(kExporting).c_str()))) {
    return {};
  }
  for (const auto& item : fs::directory_iterator(path_of(target.get()), error)) {
    if (item.path().extension() == ".safetensors") {
      return fail(ErrorCode::kDenied,
                  "{} already holds {}, which no pull put there: choose another --to",
                  directory.string(), canonical::printable(item.path().filename().string()));
    }
  }
  return {};
}

namespace {

Result<std::vector<std::string>> fill(const store::StoredVersion& stored, int directory,
                                      bool allow_code) {
  const Manifest& manifest = stored.manifest;
  const auto remove = [directory](const char* name) { ::unlinkat(directory, name, 0); };
  TRY(const auto verified, verified_files(stored));
  TRY(const UniqueFd inner,
      open_beneath(directory, kInnerStore, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  TRY_VOID(replace_beneath(inner.get(), std::string(kExporting), ""));
  // Until the new manifest is there nothing vouches for the files.
  remove(std::string(kManifestName).c_str());
  std::set<std::uint32_t> dropped;
  std::set<std::string> kept;
  for (std::uint32_t i = 0; i < manifest.layout.segments().size(); ++i) {
    if (holds_files(*manifest.checkpoint, manifest.layout, i)) {
      dropped.insert(i);
      continue;
    }
    const std::string& name = manifest.layout.segments()[i].name;
    TRY_VOID(check_names_differ(kept, name));
    kept.insert(name);
  }
  TRY_VOID(place_weights(stored, verified, dropped, directory));
  remove_other_weights(directory, kept);
  TRY(auto left_out, write_small_files(stored, directory, allow_code));
  constexpr const char* kIndex = "model.safetensors.index.json";
  remove(kIndex);
  if (kept.size() > 1) TRY_VOID(replace_beneath(directory, kIndex, make_index(manifest)));
  TRY_VOID(failpoint("export.before_manifest"));
  TRY(const Manifest weights, weights_only(manifest, dropped));
  TRY_VOID(replace_beneath(directory, std::string(kManifestName), weights.serialize()));
  TRY_VOID(failpoint("export.after_manifest"));
  // In one step, because half a store would hinder the next pull.
  ::renameat(directory, kInnerStore, directory, kUsedStore);
  TRY_VOID(failpoint("export.before_clean"));
  std::error_code ignored;
  fs::remove_all(path_of(directory) / kUsedStore, ignored);
  return left_out;
}

}  // namespace

Result<std::vector<std::string>> export_checkpoint(const store::StoredVersion& stored,
                                                   const fs::path& directory, bool allow_code) {
  TRY(const UniqueFd target, open_directory(directory));
  auto filled = fill(stored, target.get(), allow_code);
  if (!filled) return fail(std::move(filled).error().with_context(directory.string()));
  return filled;
}

}  // namespace rekindle::agent
