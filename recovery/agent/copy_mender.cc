#include "recovery/agent/copy_mender.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"
#include "src/async/offload.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::agent {

using async::Task;

namespace {

constexpr std::chrono::seconds kRetry{30};
// A device or a reader may still have the files open for a moment after its session has ended.
constexpr int kSetAsideTries = 10;
constexpr std::chrono::milliseconds kSetAsideDelay{100};
constexpr std::size_t kMostNamed = 3;

// "2 tiles of w, 1 tile of v and 7 of 3 other tensors".
std::string describe(const Checkpoint& checkpoint, const std::vector<TileIndex>& bad) {
  std::map<TensorIndex, std::size_t> by_tensor;
  for (const TileIndex tile : bad) ++by_tensor[checkpoint.tiles.tensor_of(tile)];
  std::string text;
  std::size_t named = 0;
  std::size_t rest = 0;
  for (const auto& [tensor, count] : by_tensor) {
    if (named == kMostNamed) {
      rest += count;
      continue;
    }
    text += fmt::format("{}{} {} of {}", text.empty() ? "" : ", ", count,
                        count == 1 ? "tile" : "tiles", checkpoint.tensors[tensor].name);
    ++named;
  }
  if (rest > 0) {
    text += fmt::format(" and {} of {} other tensors", rest, by_tensor.size() - named);
  }
  return text;
}

}  // namespace

// CopyStatus::state of a copy that is off the list.
std::string_view CopyMender::word_for(Case::State state) {
  switch (state) {
    case Case::State::kMending:
      return "mending";
    case Case::State::kWaiting:
      return "quarantined";
    case Case::State::kLost:
    // Mended, and retired since.
    case Case::State::kMended:
      return "lost";
  }
  return "?";
}

CopyMender::CopyMender(boost::asio::any_io_executor executor, store::SegmentStore& store,
                       WorkerPool& blocking_pool, Hooks hooks)
    : executor_(std::move(executor)),
      store_(store),
      blocking_pool_(blocking_pool),
      hooks_(std::move(hooks)),
      changed_(executor_),
      hurry_(executor_),
      tasks_(executor_) {}

Task<bool> CopyMender::close(std::chrono::milliseconds deadline) { return tasks_.close(deadline); }

Task<void> CopyMender::replace(std::shared_ptr<const store::StoredVersion> copy,
                               worker::CopyVerifier::BadCopy bad) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const CopyKey key = key_of(copy->manifest);
  const auto one = std::make_shared<Case>();
  if (const auto before = cases_.find(key); before != cases_.end()) {
    one->times = before->second->times;
  }
  ++one->times;
  one->directory = copy->directory.string();
  one->bytes = copy->manifest.layout.payload_bytes();
  one->found = bad.tiles.empty()
                   ? bad.why.message()
                   : fmt::format("{} wrong: {}", describe(*copy->manifest.checkpoint, bad.tiles),
                                 bad.why.message());
  cases_[key] = one;
  hooks_.event("copy_rotten", key.id, one->found);
  co_await hooks_.hide(key);

  Result<store::SetAside> rest = fail(ErrorCode::kUnavailable, "its bytes cannot be read");
  const bool in_place = !bad.tiles.empty() && one->times == 1;
  if (!bad.tiles.empty()) {
    rest = co_await async::offload(blocking_pool_, [&] { return store::describe_copy(*copy); });
  }
  if (rest && in_place) {
    if (auto aside = co_await set_aside(copy, bad.tiles); aside) {
      copy.reset();
      tasks_.spawn("copies.mend",
                   mend(key, one, std::make_shared<store::SetAside>(*aside), Kept::kAside));
      co_return;
    }
  }
  const auto freed = co_await hooks_.drop(std::move(copy));
  if (!freed) log::error("copy.drop", "version", key.id.to_string(), "error", freed.error());
  if (!rest) {
    settle_as(key, *one, Case::State::kLost,
              "the copy was dropped; whoever needs the version fetches it anew");
    co_return;
  }
  tasks_.spawn("copies.mend",
               mend(key, one, std::make_shared<store::SetAside>(std::move(*rest)), Kept::kNothing));
}

Task<Result<store::SetAside>> CopyMender::set_aside(
    std::shared_ptr<const store::StoredVersion> copy, std::vector<TileIndex> bad) {
  for (int tries = 1;; ++tries) {
    auto aside =
        co_await async::offload(blocking_pool_, [&] { return store_.set_aside(*copy, bad); });
    const bool cancelled = co_await async::is_cancelled();
    const bool again = !aside && aside.error().code() == ErrorCode::kUnavailable;
    if (!again || cancelled || tries == kSetAsideTries) {
      if (!aside) log::info("copy.not_set_aside", "why", aside.error());
      co_return aside;
    }
    co_await async::sleep_for(kSetAsideDelay);
  }
}

Task<void> CopyMender::mend(CopyKey key, CasePtr one, std::shared_ptr<const store::SetAside> rest,
                            Kept kept) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  while (true) {
    one->state = Case::State::kMending;
    pull::PullRequest request;
    request.ref = {key.id.model, key.id.version};
    request.mend = rest;
    const auto done = co_await hooks_.pull(std::move(request));
    const bool cancelled = co_await async::is_cancelled();
    ++one->tries;
    if (done) {
      settle_as(key, *one, Case::State::kMended, "mended from peers");
      co_return;
    }
    if (cancelled) {
      one->state = Case::State::kWaiting;
      changed_.notify();
      co_return;
    }
    // Somebody has published or pulled it again.
    if (store_.find(key.id, key.layout) != nullptr) {
      settle_as(key, *one, Case::State::kMended, "replaced by another copy");
      co_return;
    }
    if (!store_.is_left_over(key.id, key.layout)) {
      // The version was retired.
      if (kept == Kept::kAside) {
        cases_.erase(key);
        changed_.notify();
        co_return;
      }
      settle_as(
          key, *one, Case::State::kLost,
          fmt::format("the copy was dropped and not fetched anew: {}", done.error().message()));
      co_return;
    }
    settle_as(key, *one, Case::State::kWaiting,
              fmt::format("not mended: {}; the rest of the copy is kept aside and tried again: "
                          "start a node that holds the version, or publish it again",
                          done.error().message()));
    // Ends with the retirement of the version or with the agent. Each try is a pull with its own
    // deadlines; a try without a source reads nothing.
    co_await hurry_.wait_until(steady_now() + kRetry);
    const bool stopped = co_await async::is_cancelled();
    if (stopped) co_return;
  }
}

void CopyMender::settle_as(const CopyKey& key, Case& one, Case::State state, std::string outcome) {
  const bool mended = state == Case::State::kMended;
  const bool told = one.outcome == outcome;
  one.state = state;
  one.outcome = std::move(outcome);
  changed_.notify();
  if (told) return;
  const std::string why = one.found + "; " + one.outcome;
  hooks_.event(mended ? "copy_mended" : "copy_lost", key.id, why);
  if (mended) {
    log::info("copy.mended", "version", key.id.to_string(), "directory", one.directory, "found",
              one.found, "outcome", one.outcome);
  } else {
    log::error("copy.lost", "version", key.id.to_string(), "directory", one.directory, "found",
               one.found, "outcome", one.outcome);
  }
}

Task<void> CopyMender::settle(ModelVersion id) {
  std::map<const Case*, std::uint32_t> tries_before;
  for (const auto& [key, one] : cases_) {
    if (key.id == id) tries_before[one.get()] = one->tries;
  }
  hurry_.notify();
  while (true) {
    const bool busy = std::ranges::any_of(cases_, [&](const auto& entry) {
      const Case& one = *entry.second;
      if (entry.first.id != id) return false;
      const auto before = tries_before.find(&one);
      const bool tried = before == tries_before.end() || one.tries > before->second;
      return one.state == Case::State::kMending || (one.state == Case::State::kWaiting && !tried);
    });
    const bool cancelled = co_await async::is_cancelled();
    if (!busy || cancelled) co_return;
    co_await changed_.wait_until(TimePoint::max());
  }
}

void CopyMender::add_status(std::vector<proto::CopyStatus>& copies) const {
  for (const auto& [key, one] : cases_) {
    const std::string found = one->outcome.empty() ? one->found : one->found + "; " + one->outcome;
    const auto layout = rpc::to_proto(key.layout);
    const auto listed = std::ranges::find_if(
        copies, [&](const proto::CopyStatus& copy) { return copy.directory() == one->directory; });
    if (listed != copies.end()) {
      listed->set_found(found);
      continue;
    }
    // It was mended, and retired since.
    if (one->state == Case::State::kMended) continue;
    proto::CopyStatus& copy = copies.emplace_back();
    *copy.mutable_id() = rpc::to_proto(key.id);
    *copy.mutable_layout() = layout;
    copy.set_directory(one->directory);
    copy.set_bytes(one->bytes);
    copy.set_state(std::string(word_for(one->state)));
    copy.set_found(found);
  }
}

}  // namespace rekindle::agent
