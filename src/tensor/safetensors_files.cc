#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include <nlohmann/json.hpp>

#include "src/base/failpoint.h"
#include "src/base/log.h"
#include "src/base/units.h"
#include "src/tensor/canonical.h"
#include "src/tensor/safetensors.h"

// Finding the files of a checkpoint.
namespace rekindle::safetensors {

namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kMaxExtraBytes = 64 * kMiB;
constexpr std::uint64_t kMaxIndexBytes = 512 * kMiB;
constexpr std::size_t kMaxExtras = 4096;

Failure filesystem_failure(const fs::path& path, const std::error_code& error) {
  return fail_errno(error.value(), path.string());
}

Result<std::vector<fs::path>> list(const fs::path& directory) {
  std::error_code error;
  std::vector<fs::path> entries;
  for (auto it = fs::directory_iterator(directory, error); !error && it != fs::end(it);
       it.increment(error)) {
    entries.push_back(it->path());
  }
  if (error) return filesystem_failure(directory, error);
  std::sort(entries.begin(), entries.end());
  return entries;
}

Result<void> add_extras(const fs::path& directory, const std::string& prefix,
                        CheckpointFiles& files) {
  TRY(const auto entries, list(directory));
  for (const fs::path& path : entries) {
    const std::string name = path.filename().string();
    std::error_code ignored;
    if (prefix.empty() && !name.starts_with('.') && fs::is_directory(path, ignored)) {
      if (auto below = add_extras(path, name + '/', files); !below) {
        log::warn("checkpoint.folder_skipped", "folder", path.string(), "why", below.error());
      }
      continue;
    }
    if (!is_checkpoint_file(prefix + name) || !fs::is_regular_file(path, ignored)) continue;
    std::error_code error;
    const std::uintmax_t bytes = fs::file_size(path, error);
    if (error) return filesystem_failure(path, error);
    if (bytes > kMaxExtraBytes) {
      log::warn("checkpoint.file_skipped", "file", path.string(), "bytes", bytes, "why",
                "larger than 64 MiB");
      continue;
    }
    if (files.extras.size() == kMaxExtras) {
      return fail(ErrorCode::kInvalid,
                  "{}: more than {} small files beside the weights; publish the files by name",
                  directory.string(), kMaxExtras);
    }
    files.extras.emplace_back(prefix + name, path);
  }
  return {};
}

// Pulls would refuse such a checkpoint: on a file system that ignores the case of names, one of the
// two files would replace the other. The failpoint makes a publisher that does not care.
Result<void> check_extras_differ(const fs::path& directory, const CheckpointFiles& files) {
  if (!failpoint("publish.any_names")) return {};
  std::map<std::string, std::string> names;
  for (const auto& [name, path] : files.extras) {
    const auto [other, is_new] = names.emplace(canonical::folded_name(name), name);
    if (is_new) continue;
    return fail(ErrorCode::kInvalid,
                "{}: the files '{}' and '{}' are one file on some file systems, so pulls would "
                "refuse them: rename one, or take it away",
                directory.string(), canonical::printable(other->second),
                canonical::printable(name));
  }
  return {};
}

Result<std::vector<fs::path>> read_index(const fs::path& path) {
  const auto bad = [&](std::string_view why) {
    return fail(ErrorCode::kInvalid, "{}: {}", path.string(), why);
  };
  std::error_code error;
  const std::uintmax_t bytes = fs::file_size(path, error);
  if (error) return filesystem_failure(path, error);
  if (bytes > kMaxIndexBytes) return bad("too large for an index");
  std::ifstream in(path, std::ios::binary);
  if (!in) return fail(ErrorCode::kDenied, "{}: cannot be opened", path.string());
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  // Parsed without exceptions; the callback bounds the depth.
  const auto json = nlohmann::json::parse(
      text, [](int depth, nlohmann::json::parse_event_t, nlohmann::json&) { return depth <= 4; },
      false);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    return bad("not an index of safetensors files (no \"weight_map\" object)");
  }
  std::set<fs::path> weights;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (name.empty() || name.starts_with('.') || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos || !name.ends_with(".safetensors")) {
      return bad(fmt::format("tensor '{}' is not mapped to a .safetensors file beside the index",
                             canonical::printable(tensor)));
    }
    weights.insert(path.parent_path() / name);
  }
  if (weights.empty()) return bad("the index names no file");
  for (const fs::path& file : weights) {
    if (!fs::is_regular_file(file, error)) {
      return fail(ErrorCode::kNotFound, "{}: the file '{}' that it names is not there",
                  path.string(), file.filename().string());
    }
  }
  return std::vector<fs::path>(weights.begin(), weights.end());
}

Result<std::vector<fs::path>> weights_in(const fs::path& directory) {
  std::error_code ignored;
  const fs::path index = directory / "model.safetensors.index.json";
  if (fs::exists(index, ignored)) return read_index(index);
  TRY(auto entries, list(directory));
  std::erase_if(entries, [&](const fs::path& path) {
    const std::string name = path.filename().string();
    return name.starts_with('.') || !name.ends_with(".safetensors") ||
           !fs::is_regular_file(path, ignored);
  });
  if (entries.empty()) {
    return fail(ErrorCode::kNotFound, "{}: no .safetensors file in this directory",
                directory.string());
  }
  return entries;
}

}  // namespace

Result<CheckpointFiles> find_checkpoint(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) {
    return error && error != std::errc::no_such_file_or_directory
               ? filesystem_failure(path, error)
               : fail(ErrorCode::kNotFound, "{}: no such file or directory", path.string());
  }
  CheckpointFiles files;
  if (fs::is_directory(status)) {
    TRY(files.weights, weights_in(path));
    TRY_VOID(add_extras(path, "", files));
    TRY_VOID(check_extras_differ(path, files));
  } else if (path.extension() == ".json") {
    TRY(files.weights, read_index(path));
    const fs::path beside = path.parent_path();
    TRY_VOID(add_extras(beside.empty() ? "." : beside, "", files));
  } else if (fs::is_regular_file(status)) {
    files.weights.push_back(path);
  } else {
    return fail(ErrorCode::kInvalid, "{}: neither a directory nor a file", path.string());
  }
  std::sort(files.extras.begin(), files.extras.end());
  return files;
}

}  // namespace rekindle::safetensors
