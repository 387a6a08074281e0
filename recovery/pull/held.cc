// PullJob: while it is held, and what others have written to its copy meanwhile.
#include <algorithm>
#include <span>
#include <utility>

#include "recovery/pull/pull.h"
#include "src/async/offload.h"
#include "src/async/task.h"
#include "src/base/log.h"

namespace rekindle::pull {

namespace {

constexpr std::chrono::milliseconds kLookWhileHeld{20};
constexpr std::size_t kPlacedAtOnce = 512;

}  // namespace

// A pull that is held is no reader of anybody: the coordinator would take its silence for its end.
// False: it was not held at all.
async::Task<bool> PullJob::wait_while_held() {
  const auto held = [this] { return (watch_.held && watch_.held()) || placing_->busy(); };
  const bool waits = held();
  if (waits) co_await finder_.pause();
  while (held() && !co_await async::is_cancelled()) co_await async::sleep_for(kLookWhileHeld);
  auto landed = placing_->close();
  if (!landed.empty()) co_await take_placed(std::move(landed));
  co_return waits;
}

// What others have written counts once it has verified; the rest is fetched.
async::Task<void> PullJob::take_placed(Placing::TileRuns landed) {
  std::vector<TileIndex> tiles;
  const TileSet before = verified_->snapshot();
  for (const auto& [begin, end] : landed) {
    for (TileIndex tile = begin; tile < std::min(end, before.size()); ++tile) {
      if (!before.test(tile)) tiles.push_back(tile);
    }
  }
  enter_phase("verify");
  show({}, "");
  std::size_t good = 0;
  for (std::size_t at = 0; at < tiles.size() && !co_await async::is_cancelled();
       at += kPlacedAtOnce) {
    const auto some =
        std::span<const TileIndex>(tiles).subspan(at, std::min(kPlacedAtOnce, tiles.size() - at));
    auto verify = [this, some] {
      return TileVerifier(std::shared_ptr<store::PendingVersion>(pending_, pending_->get()),
                          verified_)
          .verify_in_place(some, *environment_.digest_pool);
    };
    good += co_await async::offload(*environment_.blocking_pool, std::move(verify));
  }
  log::info("pull.placed", "version", resolved_.id.to_string(), "tiles", tiles.size(), "verified",
            good);
}

}  // namespace rekindle::pull
