#include "recovery/joint/shared_tiles.h"

#include <algorithm>
#include <map>
#include <span>
#include <string>

#include <boost/asio/this_coro.hpp>

#include "src/async/offload.h"
#include "src/async/task_group.h"
#include "src/base/units.h"

namespace rekindle::joint {

using async::Task;

namespace {

// Of shared tiles whose pieces are sent at once. The pieces of a tile have at most its bytes, and
// usually a hundredth.
constexpr std::size_t kLeastRound = 8;
constexpr std::size_t kMostRound = 4096;
constexpr std::uint64_t kRoundBytes = 4 * kMiB;

}  // namespace

SharedTiles::SharedTiles(Pools pools, const Roster& roster, Course& course,
                         std::shared_ptr<const JointPlan> plan, std::vector<TileIndex> finished)
    : pools_(pools),
      roster_(roster),
      course_(course),
      plan_(plan),
      finisher_(roster.id, std::move(plan), std::move(finished)) {}

// Sends tiles in ascending order, and those of one round to all finishers at once. So a finisher
// always gets the pieces of its lowest incomplete tile, for which it has room, and no host waits
// for a host that waits for it.
Task<Result<void>> SharedTiles::send(const PartReader& part) {
  const std::span<const TileIndex> shared = part.tiles().shared;
  std::size_t round = kLeastRound;
  for (std::size_t i = 0; i < shared.size();) {
    const auto tiles = shared.subspan(i, std::min(round, shared.size() - i));
    const auto read = [&part, tiles] { return part.pieces(tiles); };
    CO_TRY(auto pieces, co_await async::offload(pools_.blocking, read));
    i += tiles.size();
    std::uint64_t bytes = 1;
    for (const std::string& piece : pieces) bytes += piece.size();
    round = std::clamp<std::size_t>(tiles.size() * kRoundBytes / bytes, kLeastRound,
                                    std::min(kMostRound, 2 * round));
    std::map<std::uint32_t, proto::JointPieces> by_finisher;
    for (std::size_t k = 0; k < tiles.size(); ++k) {
      auto& piece = *by_finisher[plan_->finisher(tiles[k])].add_pieces();
      piece.set_tile(tiles[k]);
      piece.set_data(std::move(pieces[k]));
    }
    std::vector<Task<void>> sending;
    std::optional<Error> failed;
    for (auto& [to, its_pieces] : by_finisher) {
      sending.push_back(send_round(to, std::move(its_pieces), failed));
    }
    co_await async::run_all(std::move(sending));
    if (failed) co_return fail(*std::move(failed));
  }
  co_return Result<void>();
}

Task<void> SharedTiles::send_round(std::uint32_t to, proto::JointPieces pieces,
                                   std::optional<Error>& failed) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  while (pieces.pieces_size() > 0 && !failed) {
    proto::JointRequest request = roster_.request();
    *request.mutable_pieces() = pieces;
    auto answer = co_await roster_.hosts[to].peer->call(std::move(request));
    if (answer && course_.error()) answer = fail(*course_.error());
    if (!answer) {
      failed = std::move(answer).error();
      co_return;
    }
    const int taken = std::min(static_cast<int>(answer->taken()), pieces.pieces_size());
    pieces.mutable_pieces()->DeleteSubrange(0, taken);
    if (taken == 0) co_await async::sleep_for(Course::kTick);
  }
}

Task<Result<std::uint32_t>> SharedTiles::take(std::uint32_t from, proto::JointPieces pieces,
                                              TimePoint until) {
  std::uint32_t taken = 0;
  for (const auto& piece : pieces.pieces()) {
    const auto has_room = [this, &piece] { return finisher_.has_room_for(piece.tile()); };
    // Those that were taken are acknowledged at once.
    CO_TRY(const bool room, co_await course_.wait_for(has_room, taken > 0 ? TimePoint() : until));
    if (!room) break;
    CO_TRY_VOID(course_.check());
    if (auto added = finisher_.add(from, piece.tile(), piece.data()); !added) {
      course_.end(added.error());
      co_return fail(std::move(added).error());
    }
    ++taken;
    if (finisher_.has_gathered()) course_.notify();
  }
  co_return taken;
}

Task<Result<SharedTiles::Leaves>> SharedTiles::next_leaves() {
  const auto ready = [this] { return finisher_.has_gathered() || finisher_.complete(); };
  CO_TRY_VOID(co_await course_.wait_for(ready));
  auto gathered = finisher_.take_gathered();
  std::ranges::sort(gathered, {}, &TileFinisher::Gathered::tile);
  Leaves leaves;
  leaves.digests.resize(gathered.size());
  std::vector<Result<void>> done(gathered.size());
  const auto digest = [&](std::size_t i) {
    auto leaf = finisher_.leaf(gathered[i]);
    if (leaf) {
      leaves.digests[i] = *leaf;
    } else {
      done[i] = fail(std::move(leaf).error());
    }
  };
  // parallel_for() waits, so another pool calls it.
  const auto digest_all = [&] {
    pools_.digests.parallel_for(gathered.size(), digest);
    return true;
  };
  if (!gathered.empty()) co_await async::offload(pools_.blocking, digest_all);
  for (std::size_t i = 0; i < gathered.size(); ++i) {
    finisher_.digested(gathered[i]);
    CO_TRY_VOID(std::move(done[i]));
    leaves.tiles.push_back(gathered[i].tile);
  }
  // There may be room again.
  course_.notify();
  co_return leaves;
}

}  // namespace rekindle::joint
