#pragma once

#include "src/base/result.h"

namespace rekindle::cli {

// Part of the command's interface: scripts depend on these (`rekindle --help` lists them).
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitNotFound = 3;
inline constexpr int kExitCorrupt = 4;
inline constexpr int kExitUnavailable = 5;
inline constexpr int kExitExhausted = 6;
inline constexpr int kExitDenied = 7;
inline constexpr int kExitCrashLoop = 8;
// Plus the number of the signal.
inline constexpr int kExitSignal = 128;

int exit_code(ErrorCode code);
const char* exit_code_help();

}  // namespace rekindle::cli
