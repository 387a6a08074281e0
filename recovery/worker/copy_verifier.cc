#include "recovery/worker/copy_verifier.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/this_coro.hpp>

#include "src/async/offload.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/tensor/held_tile.h"

namespace rekindle::worker {

namespace {

// Of each thread. Between two pieces, other users of the pool get their turn.
constexpr std::size_t kTilesPerPiece = 32;
constexpr int kMostTries = 3;  // of a copy whose files change while it is read
constexpr int kMostRuns = 2;   // at once
constexpr std::chrono::seconds kStoreInterval{1};
// Of an undecided check that nobody asks for.
constexpr std::chrono::seconds kUndecidedRetry{10};

struct Verdict {
  CopyCheck::State state = CopyCheck::State::kUndecided;
  std::optional<Error> why;
  std::vector<TileIndex> bad;
};

// Tiles that do not match, found by several threads.
class BadTiles {
 public:
  void add(TileIndex tile, Error error) {
    const std::lock_guard lock(mutex_);
    bad_.insert_or_assign(tile, std::move(error));
  }
  // Once the threads are done.
  Verdict verdict() && {
    if (bad_.empty()) return {CopyCheck::State::kGood, std::nullopt, {}};
    Verdict verdict{CopyCheck::State::kBad, bad_.begin()->second, {}};
    for (auto& [tile, error] : bad_) {
      // The tile cannot be read at all, so the right bytes would not help.
      if (error.code() != ErrorCode::kCorrupt) return {verdict.state, std::move(error), {}};
      verdict.bad.push_back(tile);
    }
    return verdict;
  }

 private:
  std::mutex mutex_;
  std::map<TileIndex, Error> bad_;  // guarded by mutex_
};

// The error of Verification::stamp() when another process may write to a file.
bool is_open_for_writing(const Error& error) { return error.code() == ErrorCode::kUnavailable; }

// Blocks; `stop` ends it early. Without `hurry`, which is set when somebody waits, half of the
// threads stay free for others. Calls `good` on any thread.
Verdict verify_tiles(const store::StoredVersion& stored, WorkerPool& pool,
                     const std::function<bool()>& stop, const std::atomic<bool>& hurry,
                     const std::function<void(TileIndex)>& good) {
  const std::vector<TileIndex> tiles =
      tiles_of_layout(*stored.manifest.checkpoint, stored.manifest.layout).held.tiles();
  BadTiles bad;
  std::size_t begin = 0;
  while (begin < tiles.size() && !stop()) {
    const std::size_t all = std::max<std::size_t>(1, pool.thread_count());
    const std::size_t threads = hurry ? all : std::max<std::size_t>(1, all / 2);
    const std::size_t end = std::min(tiles.size(), begin + threads * kTilesPerPiece);
    std::atomic<std::size_t> next = begin;
    pool.parallel_for(threads, [&](std::size_t) {
      while (!stop()) {
        const std::size_t i = next++;
        if (i >= end) return;
        auto verified = store::verify_stored_tile(stored, tiles[i]);
        if (verified) {
          good(tiles[i]);
        } else {
          bad.add(tiles[i], std::move(verified).error());
        }
      }
    });
    begin = end;
  }
  return std::move(bad).verdict();
}

// Records the files as they were before the first byte was read. If somebody may write to the copy,
// wrong tiles can be found, but nothing is recorded. Blocks.
Verdict verify_copy(const store::StoredVersion& stored, WorkerPool& pool,
                    const std::function<bool()>& stop, const CopyCheck& check) {
  using State = CopyCheck::State;
  const auto before = stored.verification->stamp();
  if (!before && !is_open_for_writing(before.error())) {
    const bool bad = before.error().code() == ErrorCode::kCorrupt;
    return {bad ? State::kBad : State::kUndecided, before.error(), {}};
  }
  if (auto headers = store::check_headers(stored); !headers) {
    // kInvalid: the file has no header at all. Other errors come from the system.
    const ErrorCode code = headers.error().code();
    const bool bad = code == ErrorCode::kCorrupt || code == ErrorCode::kInvalid;
    return {bad ? State::kBad : State::kUndecided, std::move(headers).error(), {}};
  }
  auto verdict = verify_tiles(stored, pool, stop, check.asked,
                              [&](TileIndex tile) { check.verified->set(tile); });
  if (verdict.state == State::kBad) return verdict;
  if (stop()) return {State::kUndecided, Error(ErrorCode::kUnavailable, "it is let go of"), {}};
  if (!before) return {State::kUndecided, before.error(), {}};
  if (stored.verification->record(*before)) return verdict;
  return {
      State::kUndecided, Error(ErrorCode::kStale, "a file of it changed while it was read"), {}};
}

}  // namespace

CopyCheck::CopyCheck(const std::shared_ptr<const store::StoredVersion>& of,
                     const boost::asio::any_io_executor& executor)
    : stored(of),
      id(of->manifest.checkpoint->id),
      verified(std::make_shared<pull::VerifiedTiles>(
          TileSet(of->manifest.checkpoint->tiles.tile_count()))),
      changed(executor) {}

CopyVerifier::CopyVerifier(boost::asio::any_io_executor executor, store::SegmentStore& store,
                           WorkerPool& blocking_pool, WorkerPool& digest_pool, Hooks hooks)
    : executor_(std::move(executor)),
      store_(store),
      blocking_pool_(blocking_pool),
      digest_pool_(digest_pool),
      hooks_(std::move(hooks)),
      tasks_(executor_) {}

void CopyVerifier::start() { tasks_.spawn("copies.watch", watch()); }

async::Task<bool> CopyVerifier::close(std::chrono::milliseconds deadline) {
  closing_ = true;
  return tasks_.close(deadline);
}

// Reads no bytes, and so sees a change of any copy while other copies are verified.
async::Task<void> CopyVerifier::watch() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  while (true) {
    const bool cancelled = co_await async::is_cancelled();
    if (cancelled) co_return;
    look();
    co_await async::sleep_for(kStoreInterval);
  }
}

void CopyVerifier::look() {
  for (const auto& stored : store_.versions()) {
    if (stored->verification->state() == store::CopyState::kVerified) continue;
    find_or_make(stored, Asker::kNobody);
  }
  let_go_of_unlisted();
  start_next();
}

bool CopyVerifier::is_listed(const store::StoredVersion& stored) const {
  const auto listed = store_.find(stored.manifest.checkpoint->id);
  return std::ranges::any_of(listed, [&](const auto& copy) { return copy.get() == &stored; });
}

void CopyVerifier::let_go_of_unlisted() {
  const auto listed = store_.versions();
  std::set<const store::StoredVersion*> there;
  for (const auto& stored : listed) there.insert(stored.get());
  std::vector<CheckPtr> gone;
  for (const auto& [stored, check] : checks_) {
    if (!there.contains(stored)) gone.push_back(check);
  }
  for (const CheckPtr& check : gone) {
    check->cancelled = true;
    if (check->state == CopyCheck::State::kRunning) continue;  // run() settles it
    const bool waits = check->state == CopyCheck::State::kWaiting;
    if (waits) {
      settle(check, CopyCheck::State::kUndecided, Error(ErrorCode::kStale, "it is let go of"));
    }
    std::erase_if(checks_, [&](const auto& entry) { return entry.second == check; });
  }
}

// Whether an undecided check is worth another run. A copy that somebody may write to was read as a
// whole. As long as somebody may, reading it again decides nothing.
bool CopyVerifier::is_due(const CopyCheck& check, const store::StoredVersion& stored, bool asked) {
  const bool was_open = check.why && is_open_for_writing(*check.why);
  if (was_open) {
    const auto now = stored.verification->stamp();
    if (!now && is_open_for_writing(now.error())) return false;
  }
  return asked || was_open || steady_now() - check.ended >= kUndecidedRetry;
}

CopyVerifier::CheckPtr CopyVerifier::find_or_make(
    const std::shared_ptr<const store::StoredVersion>& stored, Asker asker) {
  using State = CopyCheck::State;
  const bool asked = asker == Asker::kUser;
  if (const auto found = checks_.find(stored.get()); found != checks_.end()) {
    const CheckPtr& check = found->second;
    const bool again = check->state == State::kUndecided && is_due(*check, *stored, asked);
    if (check->stored.lock() == stored && !again) {
      if (asked) check->asked = true;
      return check;
    }
  }
  const auto check = std::make_shared<CopyCheck>(stored, executor_);
  check->asked = asked;
  checks_[stored.get()] = check;
  if (stored->verification->state() == store::CopyState::kQuarantined) {
    settle(check, State::kBad, Error(ErrorCode::kCorrupt, stored->verification->why_quarantined()));
  } else if (hooks_.suspect) {
    hooks_.suspect(stored);
  }
  return check;
}

std::shared_ptr<CopyCheck> CopyVerifier::check(
    const std::shared_ptr<const store::StoredVersion>& stored) {
  if (stored->verification->state() == store::CopyState::kVerified) return nullptr;
  const CheckPtr check = find_or_make(stored, Asker::kUser);
  start_next();
  return check;
}

async::Task<Result<void>> CopyVerifier::require(std::shared_ptr<const store::StoredVersion> stored,
                                                std::chrono::milliseconds patience) {
  const std::weak_ptr<const store::StoredVersion> copy = stored;
  auto check = this->check(stored);
  const auto tiles = stored->manifest.checkpoint->tiles.tile_count();
  stored.reset();  // waiting here does not keep a retired copy alive
  const auto give_up = steady_now() + patience;
  for (int tries = 1; check != nullptr; ++tries) {
    while (!check->over()) {
      const auto now = steady_now();
      const bool cancelled = co_await async::is_cancelled();
      if (now >= give_up || cancelled) {
        co_return fail(ErrorCode::kUnavailable,
                       "{} is being verified here, {} of {} tiles so far: try another source, or "
                       "again later",
                       check->id.to_string(), check->verified->count(), tiles);
      }
      co_await check->changed.wait_until(give_up);
    }
    if (check->state == CopyCheck::State::kGood) break;
    if (check->state == CopyCheck::State::kBad) {
      co_return fail(ErrorCode::kCorrupt, "{} does not verify here: {}", check->id.to_string(),
                     check->why->message());
    }
    const auto again = copy.lock();
    if (again == nullptr || check->cancelled || tries == kMostTries || steady_now() >= give_up) {
      co_return fail(ErrorCode::kUnavailable,
                     "{} could not be verified here: {}; try another source, or again later",
                     check->id.to_string(), check->why->message());
    }
    check = this->check(again);
  }
  co_return Result<void>();
}

void CopyVerifier::reject(const std::shared_ptr<const store::StoredVersion>& stored,
                          const std::string& why) {
  if (stored->verification->state() == store::CopyState::kQuarantined) return;
  log::error("copy.rejected", "directory", stored->directory.string(), "why", why, "action",
             "it is not used; retire it here, or keep it under another version");
  stored->verification->quarantine(why);
  const CheckPtr check = find_or_make(stored, Asker::kNobody);
  if (!check->over()) settle(check, CopyCheck::State::kBad, Error(ErrorCode::kCorrupt, why));
  if (hooks_.suspect) hooks_.suspect(stored);
}

async::Task<Result<void>> CopyVerifier::read_again(
    std::shared_ptr<const store::StoredVersion> stored, std::chrono::milliseconds patience) {
  if (stored->verification->state() == store::CopyState::kVerified) {
    const auto work = [this, stored] {
      const std::atomic<bool> hurry = true;
      const auto stop = [this] { return closing_.load(); };
      auto verdict = verify_tiles(*stored, digest_pool_, stop, hurry, [](TileIndex) {});
      if (verdict.state == CopyCheck::State::kGood && !stop()) stored->verification->confirm();
      return verdict;
    };
    const auto verdict = co_await async::offload(blocking_pool_, work);
    if (verdict.state == CopyCheck::State::kBad) stored->verification->doubt();
  }
  co_return co_await require(std::move(stored), patience);
}

// The background verifies one copy at a time. A copy that somebody asks for does not wait for it.
CopyVerifier::CheckPtr CopyVerifier::next() const {
  std::map<std::string, std::uint64_t> newest;
  for (const auto& stored : store_.versions()) {
    const ModelVersion& id = stored->manifest.checkpoint->id;
    newest[id.model] = std::max(newest[id.model], id.version);
  }
  const auto rank = [&](const CopyCheck& check) {
    const auto found = newest.find(check.id.model);
    const bool is_newest = found != newest.end() && found->second == check.id.version;
    return std::tuple(check.asked.load(), is_newest, check.id.version);
  };
  CheckPtr best;
  for (const auto& [stored, check] : checks_) {
    if (check->state != CopyCheck::State::kWaiting || (!check->asked && running_ > 0)) continue;
    if (best == nullptr || rank(*check) > rank(*best)) best = check;
  }
  return best;
}

void CopyVerifier::start_next() {
  while (!closing_ && running_ < kMostRuns) {
    const CheckPtr check = next();
    if (check == nullptr) return;
    check->state = CopyCheck::State::kRunning;
    ++running_;
    tasks_.spawn("copies.verify", run(check));
  }
}

void CopyVerifier::settle(const CheckPtr& check, CopyCheck::State state, std::optional<Error> why) {
  check->state = state;
  check->why = std::move(why);
  check->ended = steady_now();
  check->changed.notify();
}

async::Task<void> CopyVerifier::run(CheckPtr check) {
  using State = CopyCheck::State;
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const auto forget = [this, &check] {
    std::erase_if(checks_, [&](const auto& entry) { return entry.second == check; });
  };
  const auto stored = check->stored.lock();
  Verdict verdict{State::kUndecided, Error(ErrorCode::kStale, "it is let go of"), {}};
  if (stored != nullptr && is_listed(*stored)) {
    const auto work = [this, check, stored] {
      const auto stop = [this, &check] { return closing_ || check->cancelled; };
      return verify_copy(*stored, digest_pool_, stop, *check);
    };
    verdict = co_await async::offload(blocking_pool_, work);
  }
  --running_;
  const bool listed = stored != nullptr && is_listed(*stored);
  const std::string id = check->id.to_string();
  check->bad = verdict.bad;
  if (verdict.state == State::kGood) {
    forget();
    log::info("copy.verified", "version", id, "bytes", stored->manifest.layout.payload_bytes());
    settle(check, State::kGood);
    if (hooks_.verified) hooks_.verified();
  } else if (closing_ || !listed) {
    forget();
    settle(check, State::kUndecided, std::move(verdict.why));
  } else if (verdict.state == State::kUndecided) {
    log::warn("copy.undecided", "version", id, "directory", stored->directory.string(), "error",
              verdict.why->message(), "action", "it is not used and verified again");
    settle(check, State::kUndecided, std::move(verdict.why));
  } else {
    stored->verification->quarantine(verdict.why->message());
    log::error("copy.quarantined", "version", id, "directory", stored->directory.string(), "tiles",
               verdict.bad.size(), "error", verdict.why->message());
    settle(check, State::kBad, std::move(verdict.why));
  }
  start_next();
  if (check->state != State::kBad) co_return;
  BadCopy bad{check->bad, *check->why};
  co_await hooks_.replace(stored, std::move(bad));
  // The check of a bad copy stays for as long as the store lists the copy.
  if (!is_listed(*stored)) forget();
}

}  // namespace rekindle::worker
