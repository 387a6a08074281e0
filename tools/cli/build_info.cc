#include "tools/cli/build_info.h"

#include "src/base/blake3.h"
#include "src/base/version.h"

// REKINDLE_… come from tools/cli/CMakeLists.txt.
namespace rekindle::cli {

BuildInfo build_info() {
  BuildInfo info;
  info.version = version();
  info.compiler = REKINDLE_COMPILER;
  info.build_type = REKINDLE_BUILD_TYPE;
  info.verbs = REKINDLE_WITH_VERBS != 0;
  info.cuda = REKINDLE_WITH_CUDA != 0;
  info.nccl = REKINDLE_WITH_NCCL != 0;
  info.digest_simd = blake3_simd_level();
  return info;
}

}  // namespace rekindle::cli
