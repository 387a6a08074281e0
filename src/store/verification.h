#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <sys/stat.h>

#include "src/base/clock.h"
#include "src/base/digest.h"
#include "src/base/result.h"

namespace rekindle::store {

class MappedSegment;

// docs/internals/integrity.md, "States of a copy".
enum class CopyState { kUnverified, kVerified, kQuarantined };

// The evidence that no process has written to the files of a copy.
enum class Evidence {
  // A read lease on each file for which the kernel grants one; for the others the stamps.
  kLeases,
  // The stamps alone: this process itself maps files for writing, as RDMA needs on old kernels.
  kStamps,
};

// The state of a segment file at one moment. Every write(), truncation, rename, link and chmod
// changes it. A store through a mapping changes it at the first write fault of a page (on tmpfs not
// even then if the page was read before); but no process gets such a mapping while the lease is
// held.
struct FileStamp {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::uint64_t size_bytes = 0;
  std::int64_t changed_ns = 0;  // ctime
  std::uint64_t lease = 0;      // MappedSegment::lease()

  static FileStamp of(const struct stat& status);
  auto operator<=>(const FileStamp&) const = default;
};

// The state of one committed copy and the evidence for it. Thread-safe; every call stats the files.
class Verification {
 public:
  using Stamps = std::vector<FileStamp>;  // one per segment
  struct Record {
    std::chrono::system_clock::time_point when;  // only to be shown
    TimePoint read;                              // the same moment
    Digest root;                                 // the tiles agreed with it
    Stamps files;                                // at that moment
  };

  Verification(const Digest& root, std::vector<std::shared_ptr<MappedSegment>> segments,
               Evidence evidence);

  // The state of the files now. kCorrupt: a file was truncated, removed or replaced, so this copy
  // never verifies again. kUnavailable: some process may write to a file now. Both name the file.
  // Any other error says nothing about the copy.
  Result<Stamps> stamp() const;
  // Every tile has matched between `before` and now. False: a file has changed meanwhile, so
  // nothing is recorded.
  bool record(const Stamps& before);
  // Every tile of a verified copy was read again and has matched.
  void confirm();
  // A byte of it is wrong although no file has changed: it becomes unverified.
  void doubt();
  // At least one tile does not match: this copy is never used again.
  void quarantine(std::string reason);

  // A verified copy becomes unverified when one of its files has changed.
  CopyState state();
  std::optional<Record> record() const;  // of a verified copy
  std::string why_quarantined() const;   // "" when it is not

 private:
  const Digest root_;
  const std::vector<std::shared_ptr<MappedSegment>> segments_;
  const Evidence evidence_;
  mutable std::mutex mutex_;  // guards all below
  CopyState state_ = CopyState::kUnverified;
  std::optional<Record> record_;  // of kVerified
  std::string reason_;            // of kQuarantined
};

}  // namespace rekindle::store
