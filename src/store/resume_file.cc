#include "src/store/resume_file.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>

#include "src/base/blake3.h"
#include "src/base/log.h"
#include "src/base/worker_pool.h"
#include "src/store/fault_guard.h"
#include "src/store/files.h"
#include "src/store/store_directory.h"
#include "src/tensor/canonical.h"

namespace rekindle::store {

namespace {

// Little-endian: magic, root, layout, tile count, partial count, bytes of proofs, BLAKE3 of all
// before.
constexpr std::string_view kMagic = "RKRESU03";
constexpr std::size_t kHeaderBytes = 8 + 32 + 32 + 8 + 8 + 8 + 32;
static_assert(kHeaderBytes % 8 == 0);
constexpr std::size_t kWordsPerDigest = sizeof(Digest) / 8;

std::string make_header(const ResumeIdentity& identity) {
  canonical::Writer out;
  out.raw(kMagic);
  out.digest(identity.root);
  out.digest(identity.layout);
  out.u64(identity.tile_count);
  out.u64(identity.partial.size());
  out.u64(identity.proofs_begin.back());
  std::string header = out.take();
  header += blake3(as_bytes(header)).to_bytes();
  return header;
}

std::size_t bitmap_bytes(TileIndex tiles) { return (std::size_t{tiles} + 63) / 64 * 8; }

std::size_t file_bytes(const ResumeIdentity& identity) {
  return kHeaderBytes + bitmap_bytes(identity.tile_count) +
         identity.partial.size() * sizeof(Digest) + identity.proofs_begin.back();
}

}  // namespace

bool ResumeFile::matches(const std::filesystem::path& path, const ResumeIdentity& identity) {
  const auto bytes = read_file(path, file_bytes(identity));
  return bytes && bytes->size() == file_bytes(identity) &&
         bytes->starts_with(make_header(identity));
}

Result<std::unique_ptr<ResumeFile>> ResumeFile::open(const std::filesystem::path& path,
                                                     const ResumeIdentity& identity) {
  const std::size_t size = file_bytes(identity);
  if (!matches(path, identity)) {
    std::string fresh = make_header(identity);
    fresh.resize(size, '\0');
    TRY_VOID(write_file_atomically(path, fresh, AfterPowerCut::kAnything));
  }
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!fd) return fail_errno(errno, fmt::format("open {}", path.string()));
  std::unique_ptr<ResumeFile> file(new ResumeFile);
  void* const data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return fail_errno(errno, fmt::format("map {}", path.string()));
  file->data_ = data;
  file->size_ = size;
  auto* const bytes = static_cast<std::byte*>(data);
  file->words_ = reinterpret_cast<std::uint64_t*>(bytes + kHeaderBytes);
  file->digests_ = file->words_ + bitmap_bytes(identity.tile_count) / 8;
  file->tile_count_ = identity.tile_count;
  file->partial_.assign(identity.partial.begin(), identity.partial.end());
  file->proofs_begin_.assign(identity.proofs_begin.begin(), identity.proofs_begin.end());
  file->proofs_ = reinterpret_cast<char*>(file->digests_) + file->partial_.size() * sizeof(Digest);
  return file;
}

ResumeFile::~ResumeFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

std::size_t ResumeFile::index_of(TileIndex tile) const {
  const auto at = std::lower_bound(partial_.begin(), partial_.end(), tile);
  return static_cast<std::size_t>(at - partial_.begin());
}

std::uint64_t* ResumeFile::slot(TileIndex tile) const {
  return digests_ + index_of(tile) * kWordsPerDigest;
}

std::span<char> ResumeFile::proofs(TileIndex tile) const {
  const std::size_t index = index_of(tile);
  return {proofs_ + proofs_begin_[index], proofs_begin_[index + 1] - proofs_begin_[index]};
}

Result<TileSet> ResumeFile::marked() const {
  TileSet tiles(tile_count_);
  TRY_VOID(guard_mapping_access("the resume file", [&] {
    for (std::size_t i = 0; i < tiles.words().size(); ++i) {
      tiles.words()[i] = std::atomic_ref(words_[i]).load(std::memory_order_acquire);
    }
  }));
  // Bits behind the last tile can only come from damage.
  if (tile_count_ % 64 != 0) {
    tiles.words().back() &= (std::uint64_t{1} << (tile_count_ % 64)) - 1;
  }
  return tiles;
}

void ResumeFile::mark(TileIndex tile) {
  std::atomic_ref(*word(tile)).fetch_or(std::uint64_t{1} << (tile % 64), std::memory_order_release);
}

void ResumeFile::set_partial_digest(TileIndex tile, const Digest& digest) {
  std::uint64_t* const to = slot(tile);
  for (std::size_t i = 0; i < kWordsPerDigest; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, digest.bytes.data() + i * 8, sizeof word);
    std::atomic_ref(to[i]).store(word, std::memory_order_relaxed);
  }
}

void ResumeFile::mark_partial(TileIndex tile, const Digest& digest) {
  set_partial_digest(tile, digest);
  mark(tile);
}

void ResumeFile::forget_partial_digest(TileIndex tile) { set_partial_digest(tile, Digest{}); }

void ResumeFile::clear(TileIndex tile) {
  std::atomic_ref(*word(tile))
      .fetch_and(~(std::uint64_t{1} << (tile % 64)), std::memory_order_release);
}

Digest ResumeFile::partial_digest(TileIndex tile) const {
  std::uint64_t* const from = slot(tile);
  Digest digest;
  for (std::size_t i = 0; i < kWordsPerDigest; ++i) {
    const std::uint64_t word = std::atomic_ref(from[i]).load(std::memory_order_relaxed);
    std::memcpy(digest.bytes.data() + i * 8, &word, sizeof word);
  }
  return digest;
}

// --- the marks of one copy

TileMarks::TileMarks(const Manifest& manifest, const fs::path& directory, ArrayOf array_of)
    : manifest_(manifest),
      directory_(directory),
      tiles_(tiles_of_layout(*manifest.checkpoint, manifest.layout)),
      array_of_(std::move(array_of)),
      verified_(manifest.checkpoint->tiles.tile_count()) {}

Result<void> TileMarks::open() {
  TRY(resume_, ResumeFile::open(directory_ / kResumeName, identity()));
  return {};
}

bool TileMarks::file_matches() const {
  return ResumeFile::matches(directory_ / kResumeName, identity());
}

ResumeIdentity TileMarks::identity() const {
  return {manifest_.checkpoint->root, manifest_.layout.digest(),
          manifest_.checkpoint->tiles.tile_count(), tiles_.partial, tiles_.proofs_begin};
}

bool TileMarks::still_verifies(TileIndex tile) const {
  const Checkpoint& checkpoint = *manifest_.checkpoint;
  bool good = false;
  const auto read = guard_mapping_access("segment", [&] {
    if (tiles_.is_partial(tile)) {
      good = resume_->partial_digest(tile) ==
             part_digest(checkpoint, manifest_.layout, tile, array_of_);
    } else {
      const auto digest = whole_tile_digest(checkpoint, manifest_.layout, tile, array_of_);
      good = digest && *digest == checkpoint.tile_digests[tile];
    }
  });
  return read && good;
}

bool TileMarks::proofs_are_right(TileIndex tile) const {
  const Checkpoint& checkpoint = *manifest_.checkpoint;
  const std::uint64_t element_bytes =
      dtype_size_bytes(checkpoint.tensors[checkpoint.tiles.tensor_of(tile)].dtype);
  const std::uint64_t tile_bytes = checkpoint.tiles.tile_box(tile).elements() * element_bytes;
  for (const KeptProof& kept : kept_proofs(checkpoint, manifest_.layout, tile)) {
    std::vector<std::byte> part(kept.range.end - kept.range.begin);
    std::string proof(kept.bytes, '\0');
    const auto read = guard_mapping_access("a file of the copy", [&] {
      copy_box(kept.part, array_of_(*kept.entry), kept.entry->box, part, kept.part, element_bytes);
      std::ranges::copy(resume_->proofs(tile).subspan(kept.offset, kept.bytes), proof.begin());
    });
    const auto leaf = leaf_by_proof(part, kept.range, tile_bytes, proof);
    if (!read || !leaf || *leaf != checkpoint.tile_digests[tile]) return false;
  }
  return true;
}

Result<void> TileMarks::verify() {
  auto found = resume_->marked();
  if (!found) return fail(cut_short());
  verified_ = std::move(*found);
  const std::vector<TileIndex> marked = verified_.tiles();
  std::vector<char> good(marked.size());  // not vector<bool>: written from several threads
  {
    WorkerPool pool("rk-store", store_threads(), 64);
    pool.parallel_for(marked.size(), [&](std::size_t i) {
      good[i] = tiles_.held.test(marked[i]) && still_verifies(marked[i]) ? 1 : 0;
    });
  }
  // The file is not synced, so a power cut may have lost any of its pages.
  for (const TileIndex tile : tiles_.partial) {
    if (!verified_.test(tile) || proofs_are_right(tile)) continue;
    (void)guard_mapping_access(kResumeName.data(),
                               [&] { std::ranges::fill(resume_->proofs(tile), '\0'); });
  }
  std::size_t lost = 0;
  const auto cleared = guard_mapping_access(kResumeName.data(), [&] {
    for (std::size_t i = 0; i < marked.size(); ++i) {
      if (good[i] != 0) continue;
      verified_.reset(marked[i]);
      resume_->clear(marked[i]);
      ++lost;
    }
  });
  if (!cleared) return fail(cut_short());
  log::info("store.resume", "version", manifest_.checkpoint->id.to_string(), "tiles_kept",
            marked.size() - lost, "tiles_lost", lost);
  return {};
}

void TileMarks::keep_proof(TileIndex tile, const Box& box, std::string_view proof) {
  if (!tiles_.is_partial(tile)) return;
  const Checkpoint& checkpoint = *manifest_.checkpoint;
  const std::uint64_t element_bytes =
      dtype_size_bytes(checkpoint.tensors[checkpoint.tiles.tensor_of(tile)].dtype);
  const Box whole = checkpoint.tiles.tile_box(tile);
  for (const KeptProof& kept : kept_proofs(checkpoint, manifest_.layout, tile)) {
    if (!contains(kept.part, box)) continue;
    const TileRange range = range_in_tile(box, whole, element_bytes);
    std::string joined(kept.bytes, '\0');
    const std::lock_guard lock(proofs_mutex_);
    const auto read = guard_mapping_access(kResumeName.data(), [&] {
      const std::span<char> at = resume_->proofs(tile).subspan(kept.offset, kept.bytes);
      std::memcpy(joined.data(), at.data(), at.size());
    });
    if (!read) return;
    add_to_proof(joined, kept.range, whole.elements() * element_bytes, proof, range);
    // A failure leaves a tile without a proof. The copy then says that it proves nothing.
    (void)guard_mapping_access(kResumeName.data(), [&] {
      const std::span<char> at = resume_->proofs(tile).subspan(kept.offset, kept.bytes);
      std::memcpy(at.data(), joined.data(), at.size());
    });
    return;
  }
}

bool TileMarks::mark(TileIndex tile) {
  if (tile >= tiles_.held.size() || !tiles_.held.test(tile)) return false;
  const auto marked = guard_mapping_access("a file of the copy", [&] {
    if (tiles_.is_partial(tile)) {
      resume_->mark_partial(tile,
                            part_digest(*manifest_.checkpoint, manifest_.layout, tile, array_of_));
    } else {
      resume_->mark(tile);
    }
  });
  if (!marked) {
    log::warn("store.mark", "directory", directory_.string(), "tile", tile, "error",
              marked.error());
  }
  return tiles_.is_partial(tile);
}

// A part of a tile has only the digest that this process computed from the file. If another process
// wrote to the file before, it is the digest of wrong bytes.
void TileMarks::distrust_all_parts() { forget_digests(tiles_.partial); }

// Distrusts all of them only once; every later part comes here as well.
void TileMarks::distrust_part(TileIndex newest) {
  if (!parts_distrusted_.exchange(true)) return distrust_all_parts();
  forget_digests({&newest, 1});
}

void TileMarks::forget_digests(std::span<const TileIndex> tiles) {
  const auto forgotten = guard_mapping_access(kResumeName.data(), [&] {
    for (const TileIndex tile : tiles) resume_->forget_partial_digest(tile);
  });
  if (!forgotten) {
    log::warn("store.mark", "directory", directory_.string(), "error", forgotten.error());
  }
}

Result<TileMarks::Parts> TileMarks::parts() const {
  Parts parts;
  parts.digests.resize(tiles_.partial.size());
  parts.proofs.resize(tiles_.proofs_begin.back());
  const auto read = guard_mapping_access(kResumeName.data(), [&] {
    for (std::size_t i = 0; i < parts.digests.size(); ++i) {
      const TileIndex tile = tiles_.partial[i];
      const std::uint64_t begin = tiles_.proofs_begin[i];
      parts.digests[i] = {tile, resume_->partial_digest(tile), begin};
      const std::span<const char> proofs = resume_->proofs(tile);
      if (!proofs.empty()) std::memcpy(parts.proofs.data() + begin, proofs.data(), proofs.size());
    }
  });
  if (!read) return fail(cut_short());
  for (std::size_t i = 0; i < parts.digests.size(); ++i) {
    const std::string_view proofs =
        std::string_view(parts.proofs)
            .substr(tiles_.proofs_begin[i], tiles_.proofs_begin[i + 1] - tiles_.proofs_begin[i]);
    // Never written: a copy without proofs that was set aside, or they were lost.
    if (proofs.empty() || proofs.find_first_not_of('\0') != std::string_view::npos) continue;
    parts.proofs.clear();
    for (PartDigest& part : parts.digests) part.proofs_begin = 0;
    break;
  }
  return parts;
}

Result<void> TileMarks::check_complete() const {
  const auto found = resume_->marked();
  if (!found) return fail(cut_short());
  const TileSet& marked = *found;
  TileIndex missing = 0;
  for (std::size_t i = 0; i < marked.words().size(); ++i) {
    missing +=
        static_cast<TileIndex>(__builtin_popcountll(tiles_.held.words()[i] & ~marked.words()[i]));
  }
  if (missing == 0) return {};
  if (!file_matches()) return fail(cut_short());
  return fail(ErrorCode::kInvalid, "{} cannot be committed: {} of {} tiles are not verified",
              manifest_.checkpoint->id.to_string(), missing, tiles_.held.count());
}

Error TileMarks::cut_short() const {
  return {ErrorCode::kInternal,
          fmt::format("{} was truncated while {} was filled: another process changed it; leave {} "
                      "alone and start the same command again",
                      (directory_ / kResumeName).string(), manifest_.checkpoint->id.to_string(),
                      directory_.string())};
}

}  // namespace rekindle::store
