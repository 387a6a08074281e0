#include "tools/bench/bench_run.h"
#include "tools/bench/bench_verbs.h"

namespace rekindle::bench {
namespace {

Error not_here() { return {ErrorCode::kUnavailable, "this build has no RDMA backend"}; }

}  // namespace

Result<std::unique_ptr<VerbsSource>> VerbsSource::create(const transport::verbs::FabricOptions&,
                                                         transport::SegmentRegistry&,
                                                         const Incarnation&) {
  return fail(not_here());
}
void answer_handshakes(transport::Server&, const SessionToken&, int) {}
Result<std::unique_ptr<VerbsPuller>> VerbsPuller::create(const transport::verbs::FabricOptions&,
                                                         const Pool&, std::size_t) {
  return fail(not_here());
}
Result<Measured> measure_plain_reads(const Setup&, bool) { return fail(not_here()); }

}  // namespace rekindle::bench
