#include "tools/cli/exit_code.h"

namespace rekindle::cli {

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalid:
      return kExitUsage;
    case ErrorCode::kNotFound:
      return kExitNotFound;
    case ErrorCode::kCorrupt:
      return kExitCorrupt;
    case ErrorCode::kTimeout:
    case ErrorCode::kPeerLost:
    case ErrorCode::kStale:
    case ErrorCode::kUnavailable:
      return kExitUnavailable;
    case ErrorCode::kExhausted:
      return kExitExhausted;
    case ErrorCode::kDenied:
      return kExitDenied;
    case ErrorCode::kInternal:
      return kExitFailed;
  }
  return kExitFailed;
}

const char* exit_code_help() {
  return "Exit codes:\n"
         "  0  done\n"
         "  1  failed: a check of `doctor`, a file or device of this host, or a bug\n"
         "  2  wrong arguments or input: fix them, do not retry\n"
         "  3  not found: no such file, model or version, or no source holds it\n"
         "  4  corrupt: bytes do not match their digests\n"
         "  5  unreachable or timed out, or `update` left out workers or some failed: retry later\n"
         "  6  out of memory, space or quota\n"
         "  7  not allowed: rights or secrets\n"
         "  8  crash loop: the worker of `run` failed too often in a row\n"
         "  130, 143  interrupted (SIGINT, SIGTERM): a pull keeps its verified bytes\n";
}

}  // namespace rekindle::cli
