#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "recovery/pull/tile_verifier.h"
#include "src/async/task.h"
#include "src/base/lease.h"
#include "src/store/segment_store.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/layout.h"

// Access to a pull's copy for code that reads it while it is filled, or writes to it before the
// pull does.
namespace rekindle::pull {

// Tiles of a copy that another writer places before the pull fetches the rest: a device keeps them
// when a broadcast brings them. Control thread only.
class Placing {
 public:
  using TileRuns = std::vector<std::pair<TileIndex, TileIndex>>;

  // `on_change` runs when nobody writes any more, and when the pull has tiles to fetch at once.
  explicit Placing(std::function<void()> on_change = {})
      : on_change_(std::move(on_change)), writers_([this] { changed(); }) {}

  // The pull fetches nothing while the lease is held. The lease is empty if the pull has begun to
  // fetch.
  Lease begin() { return closed_ ? Lease() : writers_.grant(); }
  // Whole tiles that nobody writes again. Called before their writer lets go.
  void landed(const TileRuns& runs) { landed_.insert(landed_.end(), runs.begin(), runs.end()); }

  using OnFailure = std::function<void(const Error&)>;
  // The pull fetches these tiles at once, although it is held: others wait for them. Nobody else
  // writes them. Each list is in the order in which they are wanted; lists come side by side.
  // `on_failure`: the pull cannot get them now. They come with the rest.
  void fetch_now(std::vector<TileRuns> lists, OnFailure on_failure) {
    std::erase_if(lists, [](const TileRuns& runs) { return runs.empty(); });
    if (closed_ || lists.empty()) return;
    wanted_now_.insert(wanted_now_.end(), lists.begin(), lists.end());
    on_failure_ = std::move(on_failure);
    changed();
  }

  bool busy() const { return writers_.held(); }
  // The pull fetches everything.
  bool closed() const { return closed_; }
  bool wants_now() const { return !wanted_now_.empty(); }
  std::vector<TileRuns> take_wanted_now() { return std::exchange(wanted_now_, {}); }
  void fail_wanted(const Error& why) {
    if (const auto on_failure = std::exchange(on_failure_, nullptr)) on_failure(why);
  }
  // From here on the pull writes itself. Returns the tiles that have landed, right or wrong.
  TileRuns close() {
    closed_ = true;
    return std::exchange(landed_, {});
  }

 private:
  void changed() const {
    if (on_change_) on_change_();
  }

  const std::function<void()> on_change_;
  LeaseGrantor writers_;
  bool closed_ = false;
  TileRuns landed_;
  std::vector<TileRuns> wanted_now_;
  OnFailure on_failure_;
};

// A pull's copy once it has its place. A commit renames its files and changes nothing in them.
// Tiles in `verified` do not change any more.
struct Arriving {
  std::shared_ptr<const Checkpoint> checkpoint;
  std::shared_ptr<const Layout> layout;
  std::shared_ptr<const VerifiedTiles> verified;
  std::vector<std::shared_ptr<const store::MappedSegment>> segments;  // as in the layout
  std::shared_ptr<Placing> placing = {};
};

class DirectReads;

// All of it is called on the control thread.
struct PullWatch {
  std::function<void(Arriving)> on_begun;
  // Whether to wait, between on_begun and the first byte that is fetched, without a place at the
  // sources. Empty: no. The pull waits for writers (Arriving::placing) in any case.
  std::function<bool()> held;
  // Notified when the answer of `held` may have changed.
  std::shared_ptr<async::Notifier> held_changed = {};
  // The pull is about to fail because another pull fills the same files. It may be tried again when
  // that one has ended.
  std::function<void()> on_place_taken;
  // A session whose buckets are read straight into GPU memory, before the pull fetches anything.
  // Null: none.
  std::shared_ptr<DirectReads> direct = {};
};

}  // namespace rekindle::pull
