#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"

namespace rekindle::rpc {

// One line of the audit log.
struct AuditEntry {
  // "retire", "rights_reloaded"
  std::string act;
  // "ok", or why not.
  std::string result = "ok";
  // Of a version or node; may be empty.
  std::string object = {};
  std::vector<std::string> principals = {};
  std::string role = {};
  std::string node = {};
  std::string address = {};
};

// Says who has changed what, one JSON document a line. Each line has the SHA-256 of the line before
// it, so an edit, a gap, or another order shows (`rekindle audit verify`). A restart continues the
// chain of the file. A thread brings the lines to the disk or to syslog, many at a time. Otherwise
// on one thread.
class AuditLog {
 public:
  // A file, "syslog", or "syslog:SOCKET". kInvalid: the last line of the file is none of this log.
  static Result<std::unique_ptr<AuditLog>> open(const std::string& target);
  ~AuditLog();

  // A line that cannot be written counts as lost, and the next one says how many were.
  void write(const AuditEntry& entry);
  // The same for what strangers can cause: at most some lines a second; the next one counts the
  // rest.
  void write_some(AuditEntry entry, TimePoint now);
  // Called on another thread once all lines that were written before are on the disk, or with the
  // daemon of syslog, or are lost.
  void when_on_disk(std::function<void(Result<void>)> then);
  // The error of the last write, once a further try has failed too. Who cannot write down what
  // happens should not let it happen.
  Result<void> check();
  // After a rotation. The chain goes on in the new file.
  Result<void> reopen();

  class Sink;

 private:
  struct Delivery;

  explicit AuditLog(std::string target);
  Result<void> put(const AuditEntry& entry);

  const std::string target_;
  std::unique_ptr<Delivery> delivery_;
  std::uint64_t next_ = 1;
  // Of the line before, in hex.
  std::string hash_;
  std::uint64_t lost_ = 0;
  std::uint64_t skipped_ = 0;
  std::uint32_t recent_ = 0;
  TimePoint second_{};
};

struct AuditChain {
  std::uint64_t lines = 0;
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  std::uint64_t lost = 0;
  // Of the last line, to keep elsewhere: what was cut off the end does not show otherwise.
  std::string hash;
};
// Reads the files in order, the oldest first. kCorrupt: names the first line that does not follow
// the one before it.
Result<AuditChain> verify_audit(const std::vector<std::filesystem::path>& files);

}  // namespace rekindle::rpc
