#include "tools/bench/bench_digest.h"

namespace rekindle::bench {

Result<GpuDigestTimes> measure_gpu_digests(std::uint64_t, std::size_t) {
  return fail(ErrorCode::kUnavailable, "this build has no CUDA");
}

}  // namespace rekindle::bench
