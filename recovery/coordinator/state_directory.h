#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "recovery/coordinator/durable_store.h"
#include "src/base/unique_fd.h"

namespace rekindle::coordinator {

// The coordinator's directory: `state` (epoch and version table; replaced as a whole) and `lock`,
// held while this object lives. Used from one thread.
class StateDirectory : public DurableStore {
 public:
  // Creates the directory (0700). kUnavailable: another coordinator has it, named.
  static Result<StateDirectory> open(const std::filesystem::path& path);

  // An empty state when there is none yet. kCorrupt for a damaged one: it is never reset silently.
  Result<DurableState> load() override;
  // Write aside, fsync, rename, fsync the directory. After an error the old or the new state is
  // there, whole.
  Result<void> save(const DurableState& state) override;

 private:
  StateDirectory(std::filesystem::path path, UniqueFd directory, UniqueFd lock)
      : path_(std::move(path)), directory_(std::move(directory)), lock_(std::move(lock)) {}

  std::filesystem::path path_;
  UniqueFd directory_;
  UniqueFd lock_;
};

// The bytes of `state`: magic, length and XXH3-128 of a proto::CoordinatorState
// (docs/coordinator.md).
std::string encode_state(const DurableState& state);
Result<DurableState> decode_state(std::string_view bytes);

}  // namespace rekindle::coordinator
