#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/digest.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"

// Artifact sets: directories of compile caches that travel as a version of the model
// "artifacts/MODEL/HASH", where HASH stands for the fingerprint of the engine. The tensor
// "fingerprint" has the text itself, and "files/NAME/PATH" has the bytes of one file. All are U8
// of rank 1 (docs/reference/formats.md). Modes, owners and times are left out, so equal caches have
// equal roots. Engines run what these files contain. Therefore a file is written only after its
// tiles matched the version's root, and never outside of its directory.
namespace rekindle::cli {

inline constexpr std::string_view kArtifactsPrefix = "artifacts/";
inline constexpr std::size_t kMaxFingerprintBytes = 16 << 10;
inline constexpr std::size_t kMaxArtifactFiles = 200'000;
inline constexpr std::uint64_t kMaxArtifactBytes = std::uint64_t{64} << 30;

// One cache: its name in the set, and its place on this host.
struct CacheDirectory {
  std::string name;
  std::filesystem::path path;
};
// NAME=DIR, with names that differ. DIR need not exist.
Result<std::vector<CacheDirectory>> parse_cache_directories(const std::vector<std::string>& texts);

// 32 hexadecimal digits. kInvalid: the text is empty or too long.
Result<std::string> fingerprint_hash(std::string_view model, std::string_view fingerprint);
// "artifacts/MODEL/HASH". kInvalid also where MODEL is too long for this.
Result<std::string> artifact_set_name(std::string_view model, std::string_view hash);

// Whether a file of a set may have this path below its directory: relative, no "." or "..", no
// control characters, no name that this module uses itself.
Result<void> check_artifact_path(std::string_view path);

struct CacheFile {
  // "files/NAME/PATH".
  std::string tensor;
  std::filesystem::path path;
  std::uint64_t size_bytes = 0;
  std::int64_t changed_ns = 0;
  bool operator==(const CacheFile&) const = default;
};
// The regular files, sorted by tensor. Links, other kinds of files, locks and unfinished files of
// engines are left out. A missing directory counts as empty.
Result<std::vector<CacheFile>> list_caches(std::span<const CacheDirectory> caches);

// Holds a lock of a directory, until the descriptor closes. Of this module's processes only one has
// it; others wait, with a deadline.
Result<UniqueFd> lock_directory(const std::filesystem::path& path);

// A hidden directory in a cache, for files that are not finished. Its process
// holds the lock of the cache, and has removed what a killed process had left.
class CacheWorkplace {
 public:
  static Result<std::unique_ptr<CacheWorkplace>> open(const std::filesystem::path& cache);
  ~CacheWorkplace();
  CacheWorkplace(const CacheWorkplace&) = delete;
  CacheWorkplace& operator=(const CacheWorkplace&) = delete;
  // Of the cache.
  int root() const { return root_.get(); }
  const std::filesystem::path& path() const { return path_; }

 private:
  CacheWorkplace() = default;
  // Holds the lock.
  UniqueFd root_;
  std::filesystem::path path_;
};

// Writes the set as a safetensors file. kUnavailable: a file has changed since it was listed.
Result<void> pack_caches(std::span<const CacheFile> files, std::string_view fingerprint,
                         const std::filesystem::path& out);

struct UnpackReport {
  std::uint64_t files = 0;
  std::uint64_t bytes = 0;
  std::uint64_t written = 0;
  // Files that were there with other bytes. They stay as they are.
  std::uint64_t kept = 0;
  // Files of caches that the caller did not name.
  std::uint64_t unwanted = 0;
};
// Adds the files of the copy in a store to the caches. No file gets its name before all files of
// its cache are complete. kStale: the set belongs to another fingerprint. kCorrupt: bytes do not
// match `root`. kInvalid: the copy is no artifact set, or names a path that is not allowed; nothing
// is written then.
Result<UnpackReport> unpack_artifacts(const std::filesystem::path& copy, const Digest& root,
                                      std::string_view fingerprint,
                                      std::span<const CacheDirectory> caches);

}  // namespace rekindle::cli
