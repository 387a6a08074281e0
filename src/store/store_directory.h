#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/tensor/layout.h"

// Names and ownership of a store's directory.
namespace rekindle::store {

class SegmentPool;
enum class Deletion;

inline constexpr std::string_view kManifestName = "rekindle.manifest";
inline constexpr std::string_view kPartialManifestName = "rekindle.manifest.partial";
inline constexpr std::string_view kResumeName = "rekindle.resume";
inline constexpr std::string_view kRetiredName = "rekindle.retired";
inline constexpr std::string_view kPartialSuffix = ".partial";
inline constexpr std::string_view kModelsName = "models";
inline constexpr std::string_view kStagingName = "staging";
inline constexpr std::string_view kPoolName = "pool";

// Creates the directory (0700) or checks that it is a store of ours that nobody else can write to,
// and takes its lock. The descriptor that is returned holds the lock. kDenied for a directory that
// is not ours, kUnavailable (with the holder's pid) when another process has it.
Result<UniqueFd> open_store_directory(const std::filesystem::path& directory);

std::string encode_version(const ModelVersion& id);  // "org%2Fname@41"
Result<ModelVersion> decode_version(std::string_view name);
std::filesystem::path version_directory(const std::filesystem::path& store, const ModelVersion& id);
std::filesystem::path copy_directory(const std::filesystem::path& store, const ModelVersion& id,
                                     const Digest& layout);
bool is_layout_name(std::string_view name);  // 16 hexadecimal digits
// A file that the store itself puts into a copy's directory.
bool is_store_file(std::string_view name);
bool is_segment_name(std::string_view name);  // "….safetensors", also with ".partial"

// Deletes a copy's directory. After a crash in between, the next open finishes it. The manifest
// becomes rekindle.retired, then the segments go to the pool, which keeps or deletes them, then the
// marker is removed. Files that are not ours stay, with a warning.
Result<void> remove_copy(const std::filesystem::path& directory, SegmentPool& pool, Deletion when);
// Bytes that the files of a copy's directory take.
std::uint64_t disk_bytes(const std::filesystem::path& directory);

}  // namespace rekindle::store
