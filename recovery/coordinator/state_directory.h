#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "recovery/coordinator/durable_store.h"
#include "src/base/unique_fd.h"

namespace rekindle::coordinator {

// The coordinator's directory: `state`, a log of records, and `lock`, held while this object lives.
// The log begins with all records (a snapshot, which is written aside and renamed over the one
// before); each further frame is one write. A frame that a power loss has cut off at the end was
// acknowledged to nobody and is left out; other damage is an error. Used by one thread at a time.
class StateDirectory : public DurableStore {
 public:
  // Creates the directory (0700). kUnavailable: another coordinator has it, named.
  static Result<StateDirectory> open(const std::filesystem::path& path);

  // None when there is no log yet. kCorrupt for a damaged one, kInvalid for one of an earlier
  // format: it is never reset silently.
  Result<Records> load() override;
  // Appends a frame and syncs it. The first write, one after a failure, and one to a log that has
  // grown to several times its records begin a new log instead: write aside, fsync, rename, fsync
  // the directory.
  Result<void> write(const std::vector<RecordWrite>& writes) override;

 private:
  StateDirectory(std::filesystem::path path, UniqueFd directory, UniqueFd lock)
      : path_(std::move(path)), directory_(std::move(directory)), lock_(std::move(lock)) {}
  Result<void> append(const std::string& frame);
  Result<void> begin_log(const Records& records);

  std::filesystem::path path_;
  UniqueFd directory_;
  UniqueFd lock_;
  UniqueFd log_;                     // open for appending; none: the next write begins a new log
  std::uint64_t next_sequence_ = 1;  // of the next frame
  std::uint64_t log_bytes_ = 0;
  std::uint64_t snapshot_bytes_ = 0;  // of the first frame
  Records records_;                   // what is durable
};

// One frame of the log (docs/coordinator.md), and the records of a whole log. kCorrupt says where
// it is damaged. `torn_at`: where a frame that was cut off begins, when there is one.
std::string encode_frame(std::uint64_t sequence, const std::vector<RecordWrite>& writes);
Result<Records> decode_log(std::string_view bytes, std::optional<std::size_t>* torn_at = nullptr);

}  // namespace rekindle::coordinator
