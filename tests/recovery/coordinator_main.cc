// A coordinator for tests: coordinator_main LISTEN STATE_DIR [--secret FILE] [--failpoints SPEC]
// [--dead-after MS] [--rights FILE] [--audit FILE]
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "recovery/coordinator/coordinator.h"
#include "recovery/rpc/rights.h"
#include "src/base/failpoint.h"

namespace {

using rekindle::coordinator::CoordinatorOptions;

rekindle::Result<CoordinatorOptions> reread(const std::string& file, CoordinatorOptions options) {
  TRY(auto rights, rekindle::rpc::Rights::read(file));
  options.rights = std::make_shared<const rekindle::rpc::Rights>(std::move(rights));
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc % 2 == 0) return 2;
  rekindle::coordinator::CoordinatorOptions options;
  options.listen = argv[1];
  options.state_directory = argv[2];
  for (int i = 3; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--secret") options.credentials.secret_file = argv[i + 1];
    if (name == "--rights") {
      auto rights = rekindle::rpc::Rights::read(argv[i + 1]);
      if (!rights) return 2;
      options.rights = std::make_shared<const rekindle::rpc::Rights>(*std::move(rights));
      options.reread = [file = std::string(argv[i + 1]), options] { return reread(file, options); };
    }
    if (name == "--audit") options.audit = argv[i + 1];
    if (name == "--dead-after") {
      options.dead_after = std::chrono::milliseconds(std::stoul(argv[i + 1]));
      options.suspect_after = options.dead_after / 2;
    }
    if (name == "--failpoints") {
      if (!rekindle::arm_failpoints(argv[i + 1])) return 2;
    }
  }
  options.on_ready = [](const rekindle::coordinator::CoordinatorOptions::Listening& at) {
    fmt::print("ready {}\n", at.control);
    std::fflush(stdout);
  };
  const auto done = rekindle::coordinator::run_coordinator(options);
  if (!done) fmt::print(stderr, "{}\n", done.error().message());
  return done ? 0 : 1;
}
