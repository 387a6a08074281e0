#pragma once

#include <string>

#include "src/base/result.h"

namespace CLI {
class App;
}

namespace rekindle::cli {

// Fills options of `app` and its chosen subcommand that neither the command line nor the
// environment has set, from a TOML file: top-level keys are for every daemon, [agent] and
// [coordinator] for one. Keys are the long option names. kInvalid names the file and the key for
// what is unknown or wrong.
Result<void> apply_config_file(CLI::App& app, CLI::App& chosen, const std::string& path);

}  // namespace rekindle::cli
