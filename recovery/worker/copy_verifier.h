#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/pull/slice_source.h"
#include "recovery/rpc/rpc.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"

namespace rekindle::worker {

// One verification of a copy that the store calls unverified, because the agent found it at its
// start, or because one of its files has changed. Nobody uses a tile before it has verified here.
struct CopyCheck {
  // kUndecided: `why` says more. The copy stays unverified, and another check follows. Nobody may
  // go on using the tiles that this check has found good.
  enum class State { kWaiting, kRunning, kGood, kBad, kUndecided };

  CopyCheck(const std::shared_ptr<const store::StoredVersion>& of,
            const boost::asio::any_io_executor& executor);
  bool over() const { return state != State::kWaiting && state != State::kRunning; }

  // Only the run keeps the copy alive, so that the memory of a retired copy is free soon.
  const std::weak_ptr<const store::StoredVersion> stored;
  const ModelVersion id;
  const std::shared_ptr<pull::VerifiedTiles> verified;  // grows during the check
  State state = State::kWaiting;
  std::optional<Error> why;  // of kBad: the error of the first bad tile
  // Of kBad: the tiles that do not verify. None: something else is wrong with the copy.
  std::vector<TileIndex> bad;
  TimePoint ended{};                // of kUndecided
  std::atomic<bool> asked = false;  // somebody waits for the check
  // The store does not list the copy any more.
  std::atomic<bool> cancelled = false;
  async::Notifier changed;
};

// Keeps copies out of use until their bytes are known to be right, and verifies them. Every user
// asks it before each use of a copy. Control thread; the digests run on the pools.
class CopyVerifier {
 public:
  struct BadCopy {
    std::vector<TileIndex> tiles;  // ascending; none: a file does not match the layout
    Error why;                     // of the first bad tile
  };
  struct Hooks {
    // A copy may have changed: its readers must not get more of it.
    std::function<void(const std::shared_ptr<const store::StoredVersion>&)> suspect;
    std::function<void()> verified;  // a copy is usable (again)
    // A copy does not verify, so nobody may read it any more. Other copies of its version stay.
    std::function<async::Task<void>(std::shared_ptr<const store::StoredVersion>, BadCopy)> replace;
  };
  CopyVerifier(boost::asio::any_io_executor executor, store::SegmentStore& store,
               WorkerPool& blocking_pool, WorkerPool& digest_pool, Hooks hooks);

  // Looks at all copies every second for changes. Verifies the unverified copies in the background:
  // one after the other, the newest of each model first, on half of the digest threads.
  void start();
  async::Task<bool> close(std::chrono::milliseconds deadline);

  // Returns nullptr for a verified copy. Otherwise returns its check, which waits for its turn, is
  // under way, or has found the copy bad. Two checks run at once; those that somebody asks for
  // begin before the others.
  std::shared_ptr<CopyCheck> check(const std::shared_ptr<const store::StoredVersion>& stored);
  // Waits for the check. kCorrupt: the copy does not verify. kUnavailable: the check did not end
  // within `patience`.
  async::Task<Result<void>> require(std::shared_ptr<const store::StoredVersion> stored,
                                    std::chrono::milliseconds patience);
  // Reads a verified copy again, all of it and at full speed, while others go on using it. A wrong
  // tile makes the copy unverified. Returns as require() does.
  async::Task<Result<void>> read_again(std::shared_ptr<const store::StoredVersion> stored,
                                       std::chrono::milliseconds patience);
  // The fleet knows other bytes under the copy's name. Nobody uses the copy; it stays for its owner
  // to look at or to retire.
  void reject(const std::shared_ptr<const store::StoredVersion>& stored, const std::string& why);
  // Ends the checks of copies that the store does not list any more.
  void let_go_of_unlisted();

 private:
  using CheckPtr = std::shared_ptr<CopyCheck>;
  enum class Asker { kNobody, kUser };
  CheckPtr find_or_make(const std::shared_ptr<const store::StoredVersion>& stored, Asker asker);
  static bool is_due(const CopyCheck& check, const store::StoredVersion& stored, bool asked);
  bool is_listed(const store::StoredVersion& stored) const;
  async::Task<void> watch();
  void look();
  void start_next();
  CheckPtr next() const;
  async::Task<void> run(CheckPtr check);
  static void settle(const CheckPtr& check, CopyCheck::State state, std::optional<Error> why = {});

  const boost::asio::any_io_executor executor_;
  store::SegmentStore& store_;
  WorkerPool& blocking_pool_;
  WorkerPool& digest_pool_;
  const Hooks hooks_;
  // Of the unverified copies in the store; also of removed copies until their run ends.
  std::map<const store::StoredVersion*, CheckPtr> checks_;
  int running_ = 0;
  std::atomic<bool> closing_ = false;  // ends the runs under way early
  async::TaskGroup tasks_;
};

}  // namespace rekindle::worker
