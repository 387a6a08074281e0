#include "tests/proc/worker_fixture.h"

namespace rekindle::testing {

std::string worker_program() { return WORKER_MAIN; }
std::string rekindle_program() { return REKINDLE_BINARY; }

}  // namespace rekindle::testing
