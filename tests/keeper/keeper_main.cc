// `rekindle keeper` without the command around it.
#include <cstdlib>
#include <string_view>

#include "recovery/keeper/keeper.h"
#include "src/base/log.h"

int main(int argc, char** argv) {
  using namespace rekindle;
  keeper::KeeperOptions options;
  for (int i = 1; i + 1 < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--directory") options.directory = argv[i + 1];
    if (argument == "--idle") options.idle = std::chrono::seconds(std::atoi(argv[i + 1]));
  }
  const auto ran = keeper::run_keeper(options);
  if (!ran) log::error("keeper.failed", "why", ran.error());
  return ran ? 0 : 1;
}
