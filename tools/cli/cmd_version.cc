#include "tools/cli/build_info.h"
#include "tools/cli/command_line.h"
#include "tools/cli/exit_code.h"
#include "tools/cli/output.h"

namespace rekindle::cli {

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
