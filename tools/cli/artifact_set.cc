#include "tools/cli/artifact_set.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "src/base/blake3.h"
#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/units.h"
#include "src/store/segment_store.h"
#include "src/tensor/safetensors.h"

namespace rekindle::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFingerprintTensor = "fingerprint";
constexpr std::string_view kFilesPrefix = "files/";
constexpr std::string_view kWorkplacePrefix = ".rekindle-artifacts.";
constexpr std::size_t kMaxNameBytes = 255;
constexpr std::size_t kMaxDepth = 32;
constexpr std::size_t kMaxPathBytes = 2048;
constexpr std::size_t kPieceBytes = 1 << 20;
constexpr std::chrono::minutes kLockWait{10};
constexpr std::chrono::milliseconds kLockCheck{50};

std::vector<std::string_view> parts_of(std::string_view path) {
  std::vector<std::string_view> parts;
  while (true) {
    const auto slash = path.find('/');
    parts.push_back(path.substr(0, slash));
    if (slash == std::string_view::npos) return parts;
    path.remove_prefix(slash + 1);
  }
}

Result<void> check_cache_name(std::string_view name) {
  const bool plain = std::ranges::all_of(name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-';
  });
  if (!name.empty() && name.size() <= 64 && plain) return {};
  return fail(ErrorCode::kInvalid,
              "'{}' is no name of a cache; use 1 to 64 characters of A-Z a-z 0-9 _ -", name);
}

// Engines make these and remove or replace them.
bool is_passing(std::string_view name) {
  return name.starts_with(kWorkplacePrefix) || name.starts_with("tmp.") || name.ends_with(".tmp") ||
         name.ends_with(".lock");
}

Result<void> check_amount(std::size_t files, std::uint64_t bytes) {
  if (files > kMaxArtifactFiles) {
    return fail(ErrorCode::kExhausted, "an artifact set has at most {} files, this one {}",
                kMaxArtifactFiles, files);
  }
  if (bytes > kMaxArtifactBytes) {
    return fail(ErrorCode::kExhausted, "an artifact set has at most {}, this one {}",
                format_bytes(kMaxArtifactBytes), format_bytes(bytes));
  }
  return {};
}

class Lister {
 public:
  Result<void> add(const CacheDirectory& cache) {
    return walk(cache.path, std::string(kFilesPrefix) + cache.name + "/", "");
  }
  Result<std::vector<CacheFile>> take() {
    std::ranges::sort(files_, {}, &CacheFile::tensor);
    return std::move(files_);
  }

 private:
  // Entries that vanish while they are listed are left out: an engine may be at work.
  Result<void> walk(const fs::path& directory, const std::string& prefix,
                    const std::string& relative) {
    std::error_code error;
    auto entry = fs::directory_iterator(directory, error);
    if (error == std::errc::no_such_file_or_directory) return {};
    for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
      TRY_VOID(take_entry(entry->path(), prefix, relative));
    }
    if (error) return fail_errno(error.value(), directory.string());
    return {};
  }

  Result<void> take_entry(const fs::path& path, const std::string& prefix,
                          const std::string& relative) {
    const std::string name = path.filename().string();
    struct stat state {};
    if (is_passing(name) || ::lstat(path.c_str(), &state) != 0) return {};
    const std::string below = relative + name;
    if (!S_ISDIR(state.st_mode) && !S_ISREG(state.st_mode)) return {};
    if (auto valid = check_artifact_path(below); !valid) {
      return fail(std::move(valid).error().with_context(path.string()));
    }
    if (S_ISDIR(state.st_mode)) return walk(path, prefix, below + "/");
    const auto size = static_cast<std::uint64_t>(state.st_size);
    bytes_ += size;
    files_.push_back(
        {prefix + below, path, size, state.st_mtim.tv_sec * 1'000'000'000 + state.st_mtim.tv_nsec});
    return check_amount(files_.size(), bytes_);
  }

  std::vector<CacheFile> files_;
  std::uint64_t bytes_ = 0;
};

Result<void> write_all(int fd, std::span<const std::byte> bytes, const fs::path& path) {
  while (!bytes.empty()) {
    const ssize_t wrote = ::write(fd, bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return fail_errno(errno, path.string());
    bytes = bytes.subspan(static_cast<std::size_t>(wrote));
  }
  return {};
}

// Fewer bytes than `out` has: the file ends there.
Result<std::size_t> read_at(int fd, std::span<std::byte> out, std::uint64_t offset,
                            const fs::path& path) {
  std::size_t done = 0;
  while (done < out.size()) {
    const ssize_t got =
        ::pread(fd, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_errno(errno, path.string());
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  return done;
}

Failure has_changed(const fs::path& path) {
  return fail(ErrorCode::kUnavailable, "{}: changed while it was packed; try again", path.string());
}

Result<void> append_file(int out, const fs::path& out_path, const CacheFile& file,
                         std::vector<std::byte>& piece) {
  const UniqueFd in(::open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!in && errno == ENOENT) return has_changed(file.path);
  if (!in) return fail_errno(errno, file.path.string());
  std::uint64_t done = 0;
  while (done < file.size_bytes) {
    const std::size_t want = std::min<std::uint64_t>(piece.size(), file.size_bytes - done);
    const std::span<std::byte> here(piece.data(), want);
    TRY(const std::size_t got, read_at(in.get(), here, done, file.path));
    if (got != want) return has_changed(file.path);
    TRY_VOID(write_all(out, here, out_path));
    done += want;
  }
  struct stat state {};
  if (::fstat(in.get(), &state) != 0) return fail_errno(errno, file.path.string());
  const bool same = S_ISREG(state.st_mode) &&
                    static_cast<std::uint64_t>(state.st_size) == file.size_bytes &&
                    state.st_mtim.tv_sec * 1'000'000'000 + state.st_mtim.tv_nsec == file.changed_ns;
  if (!same) return has_changed(file.path);
  return {};
}

// A verified way to the bytes of a copy. Each tile is digested in the memory that the caller then
// gets, so nobody can change it in between.
class VerifiedCopy {
 public:
  static Result<VerifiedCopy> open(const fs::path& directory, const Digest& root) {
    TRY(store::StoredVersion version, store::open_version(directory));
    if (version.manifest.checkpoint->root != root) {
      return fail(ErrorCode::kCorrupt, "{}: has root {} instead of {}", directory.string(),
                  version.manifest.checkpoint->root.hex(), root.hex());
    }
    return VerifiedCopy(std::move(version));
  }

  const TensorSet& tensors() const { return version_.manifest.checkpoint->tensors; }

  // Calls use(offset, bytes) for one tile after the other.
  template <typename Use>
  Result<void> read(TensorIndex tensor, const Use& use) {
    const Checkpoint& checkpoint = *version_.manifest.checkpoint;
    const TensorInfo& info = checkpoint.tensors[tensor];
    const TileGrid& grid = checkpoint.tiles.grid(tensor);
    for (std::uint64_t local = 0; local < grid.tile_count(); ++local) {
      const Box box = grid.tile_box(local);
      TRY(const std::span<const std::byte> bytes, tile_bytes(tensor, box));
      if (digest_box(box, 1, bytes, box) !=
          checkpoint.tile_digests[checkpoint.tiles.first_tile(tensor) + local]) {
        return fail(ErrorCode::kCorrupt, "{}: {} does not match its digest",
                    version_.directory.string(), info.name);
      }
      TRY_VOID(use(box.offset[0], bytes));
    }
    return {};
  }

 private:
  explicit VerifiedCopy(store::StoredVersion version)
      : version_(std::move(version)), tile_(kMaxTileBytes) {}

  Result<std::span<const std::byte>> tile_bytes(TensorIndex tensor, const Box& box) {
    const auto entries = version_.manifest.layout.entries_of(tensor);
    const TensorInfo& info = tensors()[tensor];
    if (entries.size() != 1 || !is_whole(entries[0].box, info.shape)) {
      return fail(ErrorCode::kInvalid, "{}: has only a part of {}", version_.directory.string(),
                  info.name);
    }
    const auto& segment = *version_.segments[entries[0].segment];
    const std::span<std::byte> out(tile_.data(), box.elements());
    TRY(const std::size_t got,
        read_at(segment.fd(), out, entries[0].offset_bytes + box.offset[0], segment.path()));
    if (got != out.size()) {
      return fail(ErrorCode::kCorrupt, "{}: truncated", segment.path().string());
    }
    return std::span<const std::byte>(out);
  }

  store::StoredVersion version_;
  std::vector<std::byte> tile_;
};

// One file of a set, by its tensor.
struct Artifact {
  TensorIndex tensor = 0;
  std::string_view cache;
  // Below the directory of the cache.
  std::string_view path;
  std::uint64_t size_bytes = 0;
};

Result<Artifact> parse_artifact(const TensorInfo& info, TensorIndex index) {
  Artifact file{index, {}, info.name, info.size_bytes()};
  file.path.remove_prefix(kFilesPrefix.size());
  const auto slash = file.path.find('/');
  if (slash == std::string_view::npos) {
    return fail(ErrorCode::kInvalid, "an artifact set names the file '{}'", info.name);
  }
  file.cache = file.path.substr(0, slash);
  file.path.remove_prefix(slash + 1);
  TRY_VOID(check_cache_name(file.cache));
  TRY_VOID(check_artifact_path(file.path));
  return file;
}

Result<std::vector<Artifact>> artifacts_of(const TensorSet& tensors) {
  std::vector<Artifact> files;
  std::uint64_t bytes = 0;
  bool marked = false;
  for (TensorIndex index = 0; index < tensors.size(); ++index) {
    const TensorInfo& info = tensors[index];
    const bool is_file = info.name.starts_with(kFilesPrefix);
    if (info.dtype != DType::kU8 || info.shape.rank() != 1 ||
        (!is_file && info.name != kFingerprintTensor)) {
      return fail(ErrorCode::kInvalid, "no artifact set: it has a tensor '{}'", info.name);
    }
    marked = marked || !is_file;
    if (!is_file) continue;
    TRY(files.emplace_back(), parse_artifact(info, index));
    bytes += files.back().size_bytes;
    TRY_VOID(check_amount(files.size(), bytes));
  }
  if (!marked) return fail(ErrorCode::kInvalid, "no artifact set: it has no fingerprint");
  for (const Artifact& file : files) {
    const std::string& name = tensors[file.tensor].name;
    for (auto slash = name.find('/', kFilesPrefix.size()); slash != std::string::npos;
         slash = name.find('/', slash + 1)) {
      if (!tensors.find(std::string_view(name).substr(0, slash))) continue;
      return fail(ErrorCode::kInvalid, "no artifact set: '{}' is a file and a directory",
                  name.substr(0, slash));
    }
  }
  return files;
}

Result<void> check_fingerprint(VerifiedCopy& copy, std::string_view wanted) {
  std::string text;
  const auto index = copy.tensors().find(kFingerprintTensor);
  if (copy.tensors()[*index].size_bytes() <= kMaxFingerprintBytes) {
    const auto append = [&](std::uint64_t, std::span<const std::byte> bytes) -> Result<void> {
      text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      return {};
    };
    TRY_VOID(copy.read(*index, append));
  }
  if (text == wanted) return {};
  return fail(ErrorCode::kStale, "the artifact set belongs to another fingerprint: {}",
              text.substr(0, 500));
}

// Adds the files of one cache to its directory, of which it follows no link.
class CacheWriter {
 public:
  CacheWriter(VerifiedCopy& copy, const CacheWorkplace& workplace, UnpackReport& report)
      : copy_(copy), workplace_(workplace), report_(report) {}

  Result<void> add(std::span<const Artifact> files) {
    TRY_VOID(check_room(files));
    const UniqueFd staging(
        ::open(workplace_.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
    if (!staging) return fail_errno(errno, workplace_.path().string());
    std::vector<const Artifact*> staged;
    for (const Artifact& file : files) {
      ++report_.files;
      report_.bytes += file.size_bytes;
      TRY(const bool there, is_there(file));
      if (there) continue;
      TRY_VOID(stage(file, staging.get(), std::to_string(staged.size())));
      staged.push_back(&file);
    }
    // A file with a name and without its bytes after a power cut would stay in the way for ever.
    if (::syncfs(staging.get()) != 0) return fail_errno(errno, workplace_.path().string());
    for (std::size_t i = 0; i < staged.size(); ++i) {
      TRY_VOID(place(*staged[i], staging.get(), std::to_string(i)));
    }
    return {};
  }

 private:
  Result<void> check_room(std::span<const Artifact> files) const {
    std::uint64_t needed = 0;
    for (const Artifact& file : files) needed += file.size_bytes;
    struct statvfs room {};
    if (::fstatvfs(workplace_.root(), &room) != 0) return fail_errno(errno, "statvfs");
    const std::uint64_t free = room.f_bavail * room.f_frsize;
    if (needed <= free) return {};
    return fail(ErrorCode::kExhausted, "{}: the artifacts need {}, and {} are free",
                workplace_.path().parent_path().string(), format_bytes(needed), format_bytes(free));
  }

  Failure failure(const Artifact& file, int error) const {
    const fs::path path = workplace_.path().parent_path() / file.path;
    if (error == ELOOP || error == ENOTDIR) {
      return fail(ErrorCode::kInvalid, "{}: a link or file is in the way of a directory; remove it",
                  path.string());
    }
    return fail_errno(error, path.string());
  }

  // The directory of the file.
  Result<UniqueFd> parent(const Artifact& file, bool create) const {
    UniqueFd at(::openat(workplace_.root(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    auto parts = parts_of(file.path);
    parts.pop_back();
    for (const std::string_view part : parts) {
      const std::string name(part);
      if (create && ::mkdirat(at.get(), name.c_str(), 0777) != 0 && errno != EEXIST) {
        return failure(file, errno);
      }
      UniqueFd next(
          ::openat(at.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
      if (!next) return failure(file, errno);
      at = std::move(next);
    }
    if (!at) return failure(file, errno);
    return at;
  }

  // Another file of this name also counts: it is kept.
  Result<bool> is_there(const Artifact& file) {
    const auto directory = parent(file, false);
    if (!directory && directory.error().code() == ErrorCode::kNotFound) return false;
    if (!directory) return fail(directory.error());
    const std::string name(parts_of(file.path).back());
    struct stat state {};
    if (::fstatat(directory->get(), name.c_str(), &state, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) return false;
      return failure(file, errno);
    }
    const UniqueFd present(S_ISREG(state.st_mode) ? ::openat(directory->get(), name.c_str(),
                                                             O_RDONLY | O_CLOEXEC | O_NOFOLLOW)
                                                  : -1);
    bool same = present && static_cast<std::uint64_t>(state.st_size) == file.size_bytes;
    std::vector<std::byte> piece(kMaxTileBytes);
    const auto compare = [&](std::uint64_t offset,
                             std::span<const std::byte> bytes) -> Result<void> {
      const std::span<std::byte> here(piece.data(), bytes.size());
      TRY(const std::size_t got, read_at(present.get(), here, offset, file.path));
      same = same && got == bytes.size() && std::memcmp(here.data(), bytes.data(), got) == 0;
      return {};
    };
    if (same) TRY_VOID(copy_.read(file.tensor, compare));
    if (!same) ++report_.kept;
    return true;
  }

  Result<void> stage(const Artifact& file, int staging, const std::string& name) {
    const UniqueFd out(::openat(staging, name.c_str(),
                                O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666));
    if (!out) return failure(file, errno);
    return copy_.read(file.tensor,
                      [&](std::uint64_t, std::span<const std::byte> bytes) -> Result<void> {
                        return write_all(out.get(), bytes, workplace_.path() / name);
                      });
  }

  Result<void> place(const Artifact& file, int staging, const std::string& staged) {
    TRY(const UniqueFd directory, parent(file, true));
    const std::string name(parts_of(file.path).back());
    if (::linkat(staging, staged.c_str(), directory.get(), name.c_str(), 0) == 0) {
      ++report_.written;
      return {};
    }
    // An engine has just made it.
    if (errno != EEXIST) return failure(file, errno);
    ++report_.kept;
    return {};
  }

  VerifiedCopy& copy_;
  const CacheWorkplace& workplace_;
  UnpackReport& report_;
};

}  // namespace

Result<std::vector<CacheDirectory>> parse_cache_directories(const std::vector<std::string>& texts) {
  std::vector<CacheDirectory> caches;
  std::set<std::string> names;
  for (const std::string& text : texts) {
    const auto equals = text.find('=');
    if (equals == std::string::npos || equals + 1 == text.size()) {
      return fail(ErrorCode::kInvalid,
                  "'{}' names no cache; write NAME=DIR, for example triton=/var/cache/triton",
                  text);
    }
    TRY_VOID(check_cache_name(std::string_view(text).substr(0, equals)));
    std::error_code error;
    const fs::path path = fs::absolute(text.substr(equals + 1), error).lexically_normal();
    if (error) return fail_errno(error.value(), text);
    if (!names.insert(text.substr(0, equals)).second) {
      return fail(ErrorCode::kInvalid, "two caches are called '{}'", text.substr(0, equals));
    }
    caches.push_back({text.substr(0, equals), path.has_filename() ? path : path.parent_path()});
  }
  return caches;
}

Result<std::string> fingerprint_hash(std::string_view model, std::string_view fingerprint) {
  if (fingerprint.empty() || fingerprint.size() > kMaxFingerprintBytes) {
    return fail(ErrorCode::kInvalid,
                "a fingerprint is a text of 1 to {} bytes that names the engine, its versions and "
                "the GPU; `python -m rekindle.artifacts` prints one",
                kMaxFingerprintBytes);
  }
  constexpr std::size_t kDigits = 32;
  std::string text(model);
  text += '\n';
  text += fingerprint;
  return blake3(as_bytes(text)).hex().substr(0, kDigits);
}

Result<std::string> artifact_set_name(std::string_view model, std::string_view hash) {
  std::string name = fmt::format("{}{}/{}", kArtifactsPrefix, model, hash);
  TRY_VOID(check_model_name(model));
  TRY_VOID(check_model_name(name));
  return name;
}

Result<void> check_artifact_path(std::string_view path) {
  const auto bad = [&](std::string_view why) {
    return fail(ErrorCode::kInvalid, "artifact path '{}' {}", path.substr(0, kMaxNameBytes), why);
  };
  if (path.size() > kMaxPathBytes) return bad("is too long");
  const auto parts = parts_of(path);
  if (parts.size() > kMaxDepth) return bad("is too deep");
  for (const std::string_view part : parts) {
    if (part.empty() || part == "." || part == ".." || part.size() > kMaxNameBytes) {
      return bad("is not a plain relative path");
    }
    if (part.starts_with(kWorkplacePrefix)) return bad("is reserved");
    for (const char c : part) {
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return bad("has control characters");
    }
  }
  return {};
}

Result<std::vector<CacheFile>> list_caches(std::span<const CacheDirectory> caches) {
  Lister lister;
  for (const CacheDirectory& cache : caches) TRY_VOID(lister.add(cache));
  return lister.take();
}

Result<UniqueFd> lock_directory(const fs::path& path) {
  UniqueFd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory) return fail_errno(errno, path.string());
  const TimePoint give_up = steady_now() + kLockWait;
  while (::flock(directory.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return fail_errno(errno, path.string());
    if (steady_now() > give_up) {
      return fail(ErrorCode::kUnavailable,
                  "{}: another process has fetched or packed artifacts there for {} minutes",
                  path.string(), kLockWait.count());
    }
    std::this_thread::sleep_for(kLockCheck);
  }
  return directory;
}

Result<std::unique_ptr<CacheWorkplace>> CacheWorkplace::open(const fs::path& cache) {
  std::error_code error;
  fs::create_directories(cache, error);
  if (error) return fail_errno(error.value(), cache.string());
  std::unique_ptr<CacheWorkplace> place(new CacheWorkplace);
  TRY(place->root_, lock_directory(cache));
  for (auto entry = fs::directory_iterator(cache, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    std::error_code ignored;
    if (entry->path().filename().string().starts_with(kWorkplacePrefix)) {
      fs::remove_all(entry->path(), ignored);
    }
  }
  if (error) return fail_errno(error.value(), cache.string());
  std::string made = (cache / (std::string(kWorkplacePrefix) + "XXXXXX")).string();
  if (::mkdtemp(made.data()) == nullptr) return fail_errno(errno, made);
  place->path_ = made;
  return place;
}

CacheWorkplace::~CacheWorkplace() {
  std::error_code ignored;
  if (root_) fs::remove_all(path_, ignored);
}

Result<void> pack_caches(std::span<const CacheFile> files, std::string_view fingerprint,
                         const fs::path& out) {
  std::vector<TensorInfo> tensors = {
      {std::string(kFingerprintTensor), DType::kU8, Shape{fingerprint.size()}}};
  for (const CacheFile& file : files) {
    tensors.push_back({file.tensor, DType::kU8, Shape{file.size_bytes}});
    if (auto fits = check_tensor(tensors.back()); !fits) {
      return fail(std::move(fits).error().with_context(file.path.string()));
    }
  }
  TRY(const std::string header, safetensors::make_header(tensors, {}, 8));
  const UniqueFd fd(::open(out.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd) return fail_errno(errno, out.string());
  TRY_VOID(write_all(fd.get(), as_bytes(header), out));
  TRY_VOID(write_all(fd.get(), as_bytes(fingerprint), out));
  std::vector<std::byte> piece(kPieceBytes);
  for (const CacheFile& file : files) TRY_VOID(append_file(fd.get(), out, file, piece));
  return {};
}

Result<UnpackReport> unpack_artifacts(const fs::path& directory, const Digest& root,
                                      std::string_view fingerprint,
                                      std::span<const CacheDirectory> caches) {
  TRY(VerifiedCopy copy, VerifiedCopy::open(directory, root));
  TRY(const std::vector<Artifact> files, artifacts_of(copy.tensors()));
  TRY_VOID(check_fingerprint(copy, fingerprint));
  UnpackReport report;
  report.unwanted = files.size();
  for (const CacheDirectory& cache : caches) {
    std::vector<Artifact> own;
    std::ranges::copy_if(files, std::back_inserter(own),
                         [&](const Artifact& file) { return file.cache == cache.name; });
    report.unwanted -= own.size();
    if (own.empty()) continue;
    TRY(const auto workplace, CacheWorkplace::open(cache.path));
    CacheWriter writer(copy, *workplace, report);
    TRY_VOID(writer.add(own));
  }
  return report;
}

}  // namespace rekindle::cli
