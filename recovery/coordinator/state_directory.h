#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "recovery/coordinator/state_records.h"
#include "src/base/unique_fd.h"

namespace rekindle::coordinator {

// The coordinator's directory: `state`, a log of records, and `lock`, held while this object lives.
// The log begins with a snapshot of all records, which is written aside and renamed over the last
// log; each further frame is one write. A power loss may cut off the last frame. Nobody was told
// that it is durable, so it is left out; other damage is an error. One thread at a time.
class StateDirectory : public DurableStore {
 public:
  // Creates the directory (0700). kUnavailable: another coordinator has it, named.
  static Result<StateDirectory> open(const std::filesystem::path& path);

  std::string place() const override { return (path_ / "state").string(); }
  // Empty when there is no log yet. kCorrupt: it is damaged. kInvalid: it is of another format.
  // It is never reset silently.
  Result<Records> load() override;
  // Appends a frame and syncs it. A new log is begun instead (write aside, fsync, rename, fsync the
  // directory) by the first write, after a failed one, and when the log has grown to several times
  // its records.
  Result<void> write(const std::vector<RecordWrite>& writes) override;

 private:
  StateDirectory(std::filesystem::path path, UniqueFd directory, UniqueFd lock)
      : path_(std::move(path)), directory_(std::move(directory)), lock_(std::move(lock)) {}
  Result<void> append(const std::string& frame);
  Result<void> begin_log(const Records& records);

  std::filesystem::path path_;
  UniqueFd directory_;
  UniqueFd lock_;
  // Open for appending; none: the next write begins a new log.
  UniqueFd log_;
  // Of the next frame.
  std::uint64_t next_sequence_ = 1;
  std::uint64_t log_bytes_ = 0;
  // Of the first frame.
  std::uint64_t snapshot_bytes_ = 0;
  // The durable records.
  Records records_;
};

// Encodes one frame of the log (docs/internals/coordinator.md).
std::string encode_frame(std::uint64_t sequence, const std::vector<RecordWrite>& writes);
// Returns the records of a whole log. kCorrupt says where it is damaged. `torn_at`: the beginning
// of the last frame, if that was cut off.
Result<Records> decode_log(std::string_view bytes, std::optional<std::size_t>* torn_at = nullptr);

}  // namespace rekindle::coordinator
