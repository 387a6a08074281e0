#include "src/base/blake3.h"
#include "src/base/version.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/command_line.h"
#include "tools/cli/output.h"

namespace rekindle::cli {

// REKINDLE_… come from tools/cli/CMakeLists.txt.
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

void add_version(Command& app, Session& session) {
  Command sub = app.command("version", "Show the version and the features of this build.");
  sub.runs(session, "version", [&session]() -> Result<int> {
    const BuildInfo info = build_info();
    if (session.settings.json) {
      print_json({{"version", info.version},
                  {"compiler", info.compiler},
                  {"build_type", info.build_type},
                  {"verbs", info.verbs},
                  {"cuda", info.cuda},
                  {"nccl", info.nccl},
                  {"digest_simd", info.digest_simd}});
    } else {
      print_line("rekindle " + info.version);
      print_line(fmt::format("  {}, {}; verbs {}, CUDA {}, NCCL {}; digests use {}", info.compiler,
                             info.build_type, info.verbs ? "on" : "off", info.cuda ? "on" : "off",
                             info.nccl ? "on" : "off", info.digest_simd));
    }
    return kExitOk;
  });
}

}  // namespace rekindle::cli
