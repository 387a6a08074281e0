#include "recovery/worker/round_driver.h"

#include <algorithm>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "src/async/task.h"
#include "src/base/log.h"

namespace rekindle::worker {

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kOrdersWait{1000};
constexpr std::chrono::milliseconds kOrdersRetry{250};
constexpr std::chrono::milliseconds kDeadlineCheck{250};
constexpr std::chrono::milliseconds kShareInterval{20};

}  // namespace

RoundDriver::RoundDriver(FleetHost& fleet, DeviceHost& devices, RoundSessions& sessions,
                         async::TaskGroup& tasks, asio::any_io_executor executor, bool broadcasts)
    : fleet_(fleet),
      devices_(devices),
      sessions_(sessions),
      tasks_(tasks),
      rounds_(*this, broadcasts),
      news_(executor),
      orders_changed_(executor) {}

void RoundDriver::attach(SessionId session, HostRounds::Origin origin) {
  rounds_.attach(session, std::move(origin));
  changed();
}

void RoundDriver::choose(SessionId session, const ModelVersion& id,
                         const std::shared_ptr<VersionFeed>& feed) {
  if (!rounds_.choose(session, id)) return feed->want_now();
  paused_[session] = {feed, feed->pause()};
  changed();
}

bool RoundDriver::enters(SessionId session, VersionFeed& feed) {
  if (rounds_.enters(session)) return true;
  feed.want_now();
  paused_.erase(session);
  return false;
}

void RoundDriver::hand_over(SessionId session, const VersionFeed::View& view,
                            std::optional<std::string> alone) {
  rounds_.want(session, view.portion->contents, view.portion->payload_bytes,
               WantedPieces(view.portion, &view.portion->pieces));
  rounds_.hand_over(session, view.checkpoint->root, std::move(alone));
  changed();
}

void RoundDriver::have_all(SessionId session, const ModelVersion& id) {
  rounds_.have_all(session, id);
  changed();
}

void RoundDriver::commit(SessionId session) {
  rounds_.commit(session);
  changed();
}

void RoundDriver::report_phases(SessionId session, const rpc::PhaseTimes& phases) {
  rounds_.report_phases(session, phases, steady_now());
  changed();
}

void RoundDriver::fail(SessionId session, const std::string& why) {
  paused_.erase(session);
  rounds_.fail(session, why, steady_now());
  changed();
}

void RoundDriver::detach(SessionId session) {
  paused_.erase(session);
  rounds_.detach(session, steady_now());
  changed();
}

void RoundDriver::device_joined(const device::DeviceJoined& joined) {
  const auto paused = paused_.find(joined.session);
  const bool waits = paused != paused_.end();
  const bool suspect = waits && paused->second.feed->suspect();
  auto here = RoundMember::Bytes::kNone;
  if (sessions_.has_complete_copy(joined.session) && !suspect) {
    here = RoundMember::Bytes::kAll;
  } else if (waits && paused->second.feed->can_fetch_now()) {
    here = RoundMember::Bytes::kFetchable;
  }
  rounds_.joined(joined, here);
  sessions_.note_round_event(joined.session, "joined");
  changed();
}

void RoundDriver::share_wanted(const device::ShareWanted& wanted) {
  take_share(wanted.session, wanted.tiles);
}

void RoundDriver::spread_progress(SessionId session, std::uint64_t bytes) {
  rounds_.progress(session, bytes);
  changed();
}

void RoundDriver::spread_over(const device::SpreadOver& over) {
  if (over.error) {
    log::warn("worker.spread_failed", "session", over.session, "buckets", over.buckets, "why",
              over.error->message());
  } else if (over.worker_lost) {
    log::warn("worker.spread_discarded", "session", over.session, "bytes", over.bytes, "why",
              over.worker_lost->message(), "kept_bytes", over.kept_bytes);
  } else {
    log::info("worker.spread", "session", over.session, "buckets", over.buckets, "bytes",
              over.bytes, "us", over.elapsed.count(), "meet_us", over.meet.count(), "kept_bytes",
              over.kept_bytes);
    if (!over.more) sessions_.receive_broadcast(over.session);
  }
  take_share(over.session, {});
  fetching_.erase(over.session);
  end_keeping(over);
  rounds_.spread_over(over, steady_now());
  changed();
}

void RoundDriver::device_over(const device::DeviceOver& over) {
  rounds_.device_over(over, steady_now());
  changed();
}

void RoundDriver::meeting_id(std::uint64_t number, const Result<std::string>& id) {
  rounds_.meeting_id(number, id);
  changed();
}

void RoundDriver::spread(const device::SpreadOrder& order) {
  sessions_.note_round_event(order.session, "spreading");
  device::SpreadOrder ordered = order;
  if (!begin_keeping(order)) ordered.keep_index = ordered.keep_count = 0;
  devices_.spread_device(ordered);
  await_share(order);
}

// Orders of a party come together, before any device answers.
void RoundDriver::await_share(const device::SpreadOrder& order) {
  const auto is_own = [&](std::uint32_t share) { return order.owners[share] == order.rank; };
  if (std::ranges::none_of(order.fetched, is_own)) return;
  const auto paused = paused_.find(order.session);
  if (paused == paused_.end()) {
    return devices_.stop_spread(order.session, "this host does not fetch its share any more");
  }
  const auto& feed = paused->second.feed;
  // The shares of two parties would come one after the other, and one would keep what the other
  // fetches.
  const bool busy = std::ranges::any_of(fetching_, [&](const auto& item) {
    return item.second.feed == feed && item.second.party != order.communicator;
  });
  if (busy) {
    return devices_.stop_spread(order.session,
                                "this host fetches the share of another party in the same copy");
  }
  fetching_[order.session] = {feed, order.communicator};
  tasks_.spawn("worker.share", tell_share(order.session, feed));
  Shares& shares = shares_[{order.communicator, feed.get()}];
  shares.sessions.push_back(order.session);
  shares.awaited.insert(order.session);
}

// Also of a rank that names no tiles, because its spread has ended.
void RoundDriver::take_share(SessionId session, TileRuns tiles) {
  const auto party = std::ranges::find_if(
      shares_, [&](const auto& item) { return item.second.awaited.contains(session); });
  if (party == shares_.end()) return;
  Shares& shares = party->second;
  shares.awaited.erase(session);
  if (!tiles.empty()) shares.lists.push_back(std::move(tiles));
  if (!shares.awaited.empty()) return;
  // Nobody else has these shares, so the party ends. Then the copy here fetches everything.
  const auto stop = [this, alive = std::weak_ptr(alive_),
                     sessions = std::move(shares.sessions)](const Error& why) {
    if (alive.expired()) return;
    for (const SessionId each : sessions) {
      devices_.stop_spread(each, "this host cannot fetch its share: " + why.message());
    }
  };
  auto lists = std::move(shares.lists);
  const auto fetching = fetching_.find(session);
  shares_.erase(party);
  if (fetching != fetching_.end()) fetching->second.feed->fetch_now(std::move(lists), stop);
}

// Tells the device of tiles that have verified, also when its worker is gone: others wait for them.
async::Task<void> RoundDriver::tell_share(SessionId session, std::shared_ptr<VersionFeed> feed) {
  co_await asio::this_coro::throw_if_cancelled(false);
  TileSet told;
  bool cancelled = false;
  while (fetching_.contains(session) && !cancelled) {
    const TileSet verified = feed->verified();
    if (told.size() != verified.size()) told = TileSet(verified.size());
    TileSet fresh = verified;
    for (std::size_t i = 0; i < fresh.words().size(); ++i) fresh.words()[i] &= ~told.words()[i];
    const bool complete = feed->complete();
    if (fresh.count() > 0 || complete) devices_.tell_device(session, fresh.ranges(), complete);
    if (complete || feed->failed()) break;
    told = verified;
    co_await feed->changed.wait_until(steady_now() + kShareInterval);
    cancelled = co_await async::is_cancelled();
  }
}

// The device writes passing buckets to the copy that waits here, unless the feed fetches.
bool RoundDriver::begin_keeping(const device::SpreadOrder& order) {
  const auto paused = paused_.find(order.session);
  if (order.keep_count == 0 || paused == paused_.end() || keepers_.contains(order.session)) {
    return false;
  }
  const auto& feed = paused->second.feed;
  auto writing = feed->write();
  if (!writing) return false;
  keepers_[order.session] = {feed, std::move(writing), order.communicator};
  return true;
}

// The device writes no more, or its process was reaped. Until then the feed does not fetch, however
// long that takes.
void RoundDriver::end_keeping(const device::SpreadOver& over) {
  const auto node = keepers_.extract(over.session);
  if (!node.empty()) node.mapped().feed->landed(node.mapped().party, over.kept);
}

void RoundDriver::stop_spread(SessionId session, const std::string& why) {
  devices_.stop_spread(session, why);
}

void RoundDriver::make_meeting_id(std::uint64_t number) { devices_.make_meeting_id(number); }

// Bytes that the round did not bring come from the feed now. If it brought all of them, the copy
// here may still be completed for other users.
void RoundDriver::left_round(SessionId session, bool all, const std::string& why) {
  const auto node = paused_.extract(session);
  if (!node.empty() && !all) node.mapped().feed->want_now();
  sessions_.leave_round(session, all, why);
}

void RoundDriver::changed() {
  news_.notify();
  const bool anything = rounds_.has_members() || rounds_.due();
  if (!anything || !fleet_.has_fleet() || std::exchange(running_, true)) return;
  tasks_.spawn("worker.rounds", run());
}

// While there are members, one question waits for orders. Each change is reported at once beside
// it.
async::Task<void> RoundDriver::run() {
  co_await asio::this_coro::throw_if_cancelled(false);
  while (!co_await async::is_cancelled()) {
    const auto now = steady_now();
    rounds_.check(now);
    const auto due = rounds_.due();
    const bool news = due && *due <= now;
    const bool asking = waiting_question_ || prompt_question_;
    if (!rounds_.has_members() && !due && !asking) break;
    if (now >= ask_after_) {
      if (!waiting_question_ && (rounds_.has_members() || news)) {
        waiting_question_ = true;
        tasks_.spawn("worker.orders", ask_for_orders(true));
      } else if (!prompt_question_ && news) {
        prompt_question_ = true;
        tasks_.spawn("worker.orders", ask_for_orders(false));
      }
    }
    auto next = now + kDeadlineCheck;
    if (now < ask_after_) next = std::min(next, ask_after_);
    if (due && *due > now) next = std::min(next, *due);
    co_await news_.wait_until(next);
  }
  rounds_.forget_orders();  // later members hear of the rounds that run then
  running_ = false;
}

async::Task<void> RoundDriver::ask_for_orders(bool wait) {
  co_await asio::this_coro::throw_if_cancelled(false);
  const auto longest = wait ? kOrdersWait : std::chrono::milliseconds(0);
  auto report = rounds_.report(devices_.device_life(), longest, steady_now());
  const std::uint64_t sequence = report.sequence();
  const auto orders = co_await fleet_.report_rounds(std::move(report));
  (wait ? waiting_question_ : prompt_question_) = false;
  if (orders) {
    rounds_.obey(*orders, sequence, steady_now());
    orders_changed_.notify();
  } else {
    rounds_.unanswered();
    ask_after_ = steady_now() + kOrdersRetry;
  }
  changed();
}

}  // namespace rekindle::worker
