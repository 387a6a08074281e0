#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "src/base/digest.h"
#include "src/base/result.h"
#include "src/tensor/tile.h"

namespace rekindle::store {

// The pull of a resume file. A file of another identity is replaced.
struct ResumeIdentity {
  Digest root;
  Digest layout;
  TileIndex tile_count = 0;
  std::span<const TileIndex> partial;  // tiles that the layout holds in part, ascending
};

// rekindle.resume: which tiles of a pull are verified, and the digests of those that the layout
// holds only in part. Mapped shared, so that the marks survive the process. Not synced:
// after a power loss the marked tiles are digested again anyway. Thread-safe for distinct tiles.
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

 private:
  ResumeFile() = default;
  std::uint64_t* word(TileIndex tile) const { return words_ + tile / 64; }
  std::uint64_t* slot(TileIndex tile) const;
  void set_partial_digest(TileIndex tile, const Digest& digest);

  void* data_ = nullptr;
  std::size_t size_ = 0;
  std::uint64_t* words_ = nullptr;    // the bitmap, in the mapping
  std::uint64_t* digests_ = nullptr;  // four words per partial tile, behind it
  TileIndex tile_count_ = 0;
  std::vector<TileIndex> partial_;
};

}  // namespace rekindle::store
