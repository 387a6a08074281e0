#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>

#include "src/base/result.h"

namespace rekindle::keeper {

inline constexpr const char* kKeeperSocket = "keeper.sock";
// proto/keeper.proto
inline constexpr std::uint32_t kKeeperProtocol = 1;

struct KeeperOptions {
  // DIR/agent of the agent that it serves. Made if it is missing.
  std::filesystem::path directory;
  // The keeper ends when it has held nothing and no agent was connected for so long. nullopt: it
  // stays.
  std::optional<std::chrono::milliseconds> idle;
};

// Holds resident copies (docs/internals/resident.md) until SIGTERM, SIGINT, or `idle`.
// kUnavailable: another keeper serves this directory.
Result<void> run_keeper(const KeeperOptions& options);

}  // namespace rekindle::keeper
