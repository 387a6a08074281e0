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

// What tells that nobody has written to the files of a copy.
enum class Evidence {
  // A read lease on each, where the kernel grants one; elsewhere the stamps.
  kLeases,
  // The stamps alone: this process itself maps files for writing, as RDMA needs on old kernels.
  kStamps,
};

// What a segment file was at one moment. Every write(), truncation, rename, link and chmod changes
// it. A store through a mapping changes it with the first write fault of a page (on tmpfs not even
// then, where the page was read before); but nobody makes such a mapping while the lease stays.
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
    std::chrono::system_clock::time_point when;  // for people: nothing is decided by it
    TimePoint read;                              // the same moment
    Digest root;                                 // that the tiles were compared with
    Stamps files;                                // what they were then
  };

  Verification(const Digest& root, std::vector<std::shared_ptr<MappedSegment>> segments,
               Evidence evidence);

  // What the files are now. kCorrupt names one that was truncated, or whose name is gone or another
  // file's: this copy will not verify again. kUnavailable names one that somebody may write to now.
  // Any other error says nothing about the copy.
  Result<Stamps> stamp() const;
  // Every tile has matched between `before` and now. False: a file has changed meanwhile, so
  // nothing is recorded.
  bool record(const Stamps& before);
  // Every tile of a verified copy was read again and has matched.
  void confirm();
  // A byte of it is wrong although no file has changed: unverified from here on.
  void doubt();
  // At least one tile does not match: the end of this copy.
  void quarantine(std::string reason);

  // A verified copy of which a file has changed is unverified from here on.
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
