#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "src/base/result.h"

namespace rekindle::store {

// While a read lease is held, no process has the file open or mapped for writing (fcntl(2),
// F_SETLEASE); otherwise the kernel does not grant it. A process that opens the file for writing
// waits until a thread of this process has ended the lease, at once. Thread-safe.
class ReadLease {
 public:
  // `fd` must be open for reading only, and stay open as long as the lease lives. kUnavailable:
  // some process has the file open or mapped for writing. kInvalid: this cannot be known, because
  // the file belongs to another user, or its file system has no reliable leases, or they are
  // switched off.
  static Result<std::unique_ptr<ReadLease>> take(int fd);
  ~ReadLease();
  ReadLease(const ReadLease&) = delete;
  ReadLease& operator=(const ReadLease&) = delete;

  // No process has opened the file for writing since take().
  bool held() const;
  // No other lease of this process has it. Never 0.
  std::uint64_t number() const { return number_; }

 private:
  friend class LeaseWatch;
  explicit ReadLease(int fd);

  const int fd_;
  const std::uint64_t number_;
  std::atomic<bool> broken_ = false;
};

// Whether files in this directory can be leased; the error says why not.
Result<void> check_read_leases(const std::filesystem::path& directory);

}  // namespace rekindle::store
