#include "tests/recovery/coordinator_daemon_fixture.h"

namespace rekindle::coordinator::testing {

std::unique_ptr<Process> CoordinatorDaemon::spawn(std::vector<std::string> extra,
                                                  const std::string& listen) {
  rekindle::testing::Spawn spawn;
  spawn.argv = {COORDINATOR_MAIN, listen, (temp_ / "state").string()};
  spawn.argv.insert(spawn.argv.end(), extra.begin(), extra.end());
  return std::make_unique<Process>(std::move(spawn));
}

}  // namespace rekindle::coordinator::testing
