#include "tests/transport/path_conformance.h"
#include "transport/shm/shm_transport.h"

namespace rekindle::transport::testing {
namespace {

struct ShmSource : TestSource<shm::ShmServer, shm::ServerOptions> {
  ShmSource() : TestSource(shm::make_connector(), {}) {}
};

INSTANTIATE_TEST_SUITE_P(Shm, PathConformance,
                         ::testing::Values(PathBackend{
                             "Shm", [] { return std::make_unique<SourceFixture<ShmSource>>(); }}),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace rekindle::transport::testing
