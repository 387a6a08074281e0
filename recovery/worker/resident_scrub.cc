#include "recovery/worker/resident_scrub.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <boost/asio/this_coro.hpp>

namespace rekindle::worker {

namespace {

// Between two looks for copies, if there are none. A pass of an idle host costs nothing.
constexpr std::chrono::milliseconds kLook{1000};
// Between two tries to read a piece while the device process starts.
constexpr std::chrono::milliseconds kReadAgain{1000};
// Then the pass goes on: the GPU of the piece is gone, and others may be there.
constexpr int kMostTries = 30;

}  // namespace

ResidentScrub::ResidentScrub(Residents& residents, async::TaskGroup& tasks,
                             boost::asio::any_io_executor executor, std::chrono::milliseconds every)
    : residents_(residents), tasks_(tasks), every_(every), changed_(std::move(executor)) {}

void ResidentScrub::start() { tasks_.spawn("worker.resident_scrub", run()); }

void ResidentScrub::set_interval(std::chrono::milliseconds every) {
  every_ = every;
  changed_.notify();
}

async::Task<void> ResidentScrub::run() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  while (!co_await async::is_cancelled()) {
    const TimePoint begun = steady_now();
    if (every_.count() > 0) {
      auto passing = pass();
      co_await std::move(passing);
    }
    // Also bounds how often an idle host looks.
    const auto look = every_.count() > 0 ? std::min(every_, kLook) : kLook;
    if (steady_now() < begun + look) co_await changed_.wait_until(begun + look);
  }
}

// A copy that comes meanwhile is read in the next pass.
async::Task<void> ResidentScrub::pass() {
  auto opening = residents_.scrub_pieces();
  const std::vector<Residents::Piece> pieces = co_await std::move(opening);
  for (const Residents::Piece& piece : pieces) {
    const TimePoint begun = steady_now();
    for (int tries = 0; tries < kMostTries; ++tries) {
      auto scrubbing = residents_.scrub(piece);
      const bool done = co_await std::move(scrubbing);
      const bool cancelled = co_await async::is_cancelled();
      if (cancelled || every_.count() == 0) co_return;
      if (done) break;
      co_await changed_.wait_until(steady_now() + kReadAgain);
    }
    auto resting = rest(begun, pieces.size());
    const bool goes_on = co_await std::move(resting);
    if (!goes_on) co_return;
  }
  if (!pieces.empty()) residents_.scrubbed(pieces);
}

// Returns when the next of so many pieces is due. False: the scrub ends, or was turned off.
async::Task<bool> ResidentScrub::rest(TimePoint since, std::size_t pieces) {
  for (;;) {
    const bool cancelled = co_await async::is_cancelled();
    if (cancelled || every_.count() == 0) co_return false;
    const Duration due = Duration(every_) / static_cast<Duration::rep>(pieces);
    if (steady_now() >= since + due) co_return true;
    co_await changed_.wait_until(since + due);
  }
}

}  // namespace rekindle::worker
