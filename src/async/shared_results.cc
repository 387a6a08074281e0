#include "src/async/shared_results.h"

namespace rekindle::async {

Task<Result<void>> wait_for_end(std::shared_ptr<Computation> computation, TimePoint give_up) {
  while (!computation->ended) {
    const bool cancelled = co_await is_cancelled();
    if (cancelled) co_return fail(ErrorCode::kUnavailable, "cancelled");
    if (steady_now() >= give_up) {
      co_return fail(ErrorCode::kTimeout, "the threads of this host are too busy to compute it");
    }
    co_await computation->changed.wait_until(give_up);
  }
  co_return Result<void>();
}

}  // namespace rekindle::async
