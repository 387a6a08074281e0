#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/digest.h"
#include "src/base/result.h"
#include "src/tensor/held_tile.h"
#include "src/tensor/tile.h"

namespace rekindle::store {

// The pull of a resume file. A file of another identity is replaced.
struct ResumeIdentity {
  Digest root;
  Digest layout;
  TileIndex tile_count = 0;
  std::span<const TileIndex> partial;           // tiles that the layout holds in part, ascending
  std::span<const std::uint64_t> proofs_begin;  // of LayoutTiles
};

// rekindle.resume: which tiles of a pull are verified, and the digests and kept proofs of those
// that the layout holds only in part. Mapped shared, so that the marks survive the process. Not
// synced: after a power loss the marked tiles are digested again anyway. Thread-safe for distinct
// tiles.
class ResumeFile {
 public:
  // Reopens the file when it has this identity, else starts a new one.
  static Result<std::unique_ptr<ResumeFile>> open(const std::filesystem::path& path,
                                                  const ResumeIdentity& identity);
  // The file is there, intact, and of this identity.
  static bool matches(const std::filesystem::path& path, const ResumeIdentity& identity);
  ~ResumeFile();
  ResumeFile(const ResumeFile&) = delete;
  ResumeFile& operator=(const ResumeFile&) = delete;

  Result<TileSet> marked() const;  // kCorrupt: the file was cut short
  void mark(TileIndex tile);
  void mark_partial(TileIndex tile, const Digest& digest);
  void clear(TileIndex tile);
  // The tile stays marked, but no bytes match its digest: the next process fetches it again.
  void forget_partial_digest(TileIndex tile);
  Digest partial_digest(TileIndex tile) const;
  // The kept proofs of a partial tile, joined, in the mapping.
  std::span<char> proofs(TileIndex tile) const;

 private:
  ResumeFile() = default;
  std::uint64_t* word(TileIndex tile) const { return words_ + tile / 64; }
  std::size_t index_of(TileIndex tile) const;  // among the partial ones
  std::uint64_t* slot(TileIndex tile) const;
  void set_partial_digest(TileIndex tile, const Digest& digest);

  void* data_ = nullptr;
  std::size_t size_ = 0;
  std::uint64_t* words_ = nullptr;    // the bitmap, in the mapping
  std::uint64_t* digests_ = nullptr;  // four words per partial tile, behind it
  char* proofs_ = nullptr;            // behind them
  TileIndex tile_count_ = 0;
  std::vector<TileIndex> partial_;
  std::vector<std::uint64_t> proofs_begin_;
};

// The marks of a pull's copy on its way. The bytes of a tile that the layout holds only in part
// have no leaf; the copy goes by the digest that was computed when the part had verified. An access
// to the resume file fails if another process has cut it short. Thread-safe for distinct tiles.
class TileMarks {
 public:
  // `manifest` and `directory` are of the copy and outlive this object. `array_of` returns the
  // bytes of an entry.
  TileMarks(const Manifest& manifest, const std::filesystem::path& directory, ArrayOf array_of);

  // A resume file of this copy is there, from an earlier attempt.
  bool file_matches() const;
  Result<void> open();
  bool is_open() const { return resume_ != nullptr; }
  // Reads the marked tiles again, and clears the marks of those that do not verify.
  Result<void> verify();
  // The tiles that verify() has confirmed.
  const TileSet& verified() const { return verified_; }

  // Keeps what this proof of `box` of a tile tells, where the copy keeps proofs of the tile. To be
  // called for all of the tile's parts before mark().
  void keep_proof(TileIndex tile, const Box& box, std::string_view proof);
  // True: the layout holds the tile only in part.
  bool mark(TileIndex tile);
  // Another process may have written to the files, so the digests of parts may be wrong.
  void distrust_all_parts();
  void distrust_part(TileIndex newest);

  // The digests and kept proofs of parts, for the manifest. No proofs if some are not known.
  struct Parts {
    std::vector<PartDigest> digests;
    std::string proofs;
  };
  Result<Parts> parts() const;
  // kInvalid: tiles of the layout are not marked.
  Result<void> check_complete() const;

 private:
  ResumeIdentity identity() const;
  bool still_verifies(TileIndex tile) const;
  bool proofs_are_right(TileIndex tile) const;
  void forget_digests(std::span<const TileIndex> tiles);
  Error cut_short() const;

  const Manifest& manifest_;
  const std::filesystem::path& directory_;
  const LayoutTiles tiles_;
  const ArrayOf array_of_;
  std::unique_ptr<ResumeFile> resume_;
  TileSet verified_;
  // Parts of one tile share the nodes of their proofs.
  std::mutex proofs_mutex_;
  std::atomic<bool> parts_distrusted_ = false;  // by distrust_part()
};

}  // namespace rekindle::store
