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
#include "src/async/notifier.h"
#include "src/async/task_group.h"
#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"

namespace rekindle::worker {

// One verification of a copy that the store calls unverified: it was found at the agent's start, or
// one of its files has changed. Nobody uses a tile of it before that tile has verified here.
struct CopyCheck {
  // kUndecided: see `why`. The copy stays unverified and gets another check later; nobody may go on
  // using the tiles that this one has found good.
  enum class State { kWaiting, kRunning, kGood, kBad, kUndecided };

  CopyCheck(const std::shared_ptr<const store::StoredVersion>& of,
            const boost::asio::any_io_executor& executor);
  bool over() const { return state != State::kWaiting && state != State::kRunning; }

  // Only its run keeps the copy: memory of one that is let go of is free when its users are gone.
  const std::weak_ptr<const store::StoredVersion> stored;
  const ModelVersion id;
  const std::shared_ptr<pull::VerifiedTiles> verified;  // tiles, as they come
  State state = State::kWaiting;
  std::optional<Error> why;         // of kBad: the first tile that does not verify
  std::vector<TileIndex> bad;       // of kBad: all tiles that do not; none: it is not their fault
  TimePoint ended{};                // of kUndecided
  std::atomic<bool> asked = false;  // somebody waits for it
  std::atomic<bool> cancelled = false;  // the store does not list the copy any more
  async::Notifier changed;
};

// Keeps copies out of use that are not known to be right, and finds out whether they are. Every
// user asks it, each time, before it uses a copy. Control thread; the digests run on the pools.
class CopyVerifier {
 public:
  struct BadCopy {
    std::vector<TileIndex> tiles;  // ascending; none: a file is not what the layout says
    Error why;                     // the first of them
  };
  struct Hooks {
    // A copy may not be what it was: its readers must not get more of it.
    std::function<void(const std::shared_ptr<const store::StoredVersion>&)> suspect;
    std::function<void()> verified;  // a copy is usable (again)
    // It does not verify: nobody shall read it any more. Other copies of its version stay.
    std::function<async::Task<void>(std::shared_ptr<const store::StoredVersion>, BadCopy)> replace;
  };
  CopyVerifier(boost::asio::any_io_executor executor, store::SegmentStore& store,
               WorkerPool& blocking_pool, WorkerPool& digest_pool, Hooks hooks);

  // From here on all copies are looked at every second for changes, and those that are not verified
  // are in the background: one after the other, the newest of each model first, by half of the
  // digest threads.
  void start();
  async::Task<bool> close(std::chrono::milliseconds deadline);

  // nullptr: it is verified. Otherwise its check, which waits for its turn, is under way, or has
  // found it bad. Two run at once; those that somebody asks for begin before the others.
  std::shared_ptr<CopyCheck> check(const std::shared_ptr<const store::StoredVersion>& stored);
  // Waits for the check. kCorrupt: it does not verify. kUnavailable: not within `patience`.
  async::Task<Result<void>> require(std::shared_ptr<const store::StoredVersion> stored,
                                    std::chrono::milliseconds patience);
  // Reads a verified copy again, all of it and at full speed, while others go on using it. What is
  // found wrong makes it unverified; the result is as that of require().
  async::Task<Result<void>> read_again(std::shared_ptr<const store::StoredVersion> stored,
                                       std::chrono::milliseconds patience);
  // The fleet says that it is not the version that its name says: nobody uses it, and it stays for
  // its owner to look at or to retire.
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
  // Of copies that are not verified and that the store lists; of others until their run ends.
  std::map<const store::StoredVersion*, CheckPtr> checks_;
  int running_ = 0;
  std::atomic<bool> closing_ = false;  // verifications under way end early
  async::TaskGroup tasks_;
};

}  // namespace rekindle::worker
