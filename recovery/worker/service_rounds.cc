// Broadcast rounds: what becomes of sessions in them, the reports to the coordinator, and updates
// that a worker asks for.
#include <algorithm>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"
#include "recovery/worker/service.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::worker {

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kOrdersWait{1000};
constexpr std::chrono::milliseconds kAskAgain{250};
constexpr std::chrono::milliseconds kLook{250};
constexpr std::chrono::milliseconds kStatusWait{1000};
constexpr std::chrono::milliseconds kDefaultUpdate{600'000};

// It may answer later.
bool is_away(const Error& error) {
  return error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kPeerLost ||
         error.code() == ErrorCode::kTimeout;
}

}  // namespace

// A worker without a named instance is known by its process and device: it attaches anew in a
// round.
Rounds::Origin WorkerService::origin_of(const Session& session,
                                        const Instances::Entry& entry) const {
  std::string instance = session.instance;
  if (!entry.named) {
    instance = fmt::format("pid-{}-{}", session.client->pid(), session.device);
    std::ranges::replace(instance, ':', '-');
  }
  return {session.group, std::move(instance), session.rank, session.wanted.model, session.device};
}

void WorkerService::device_joined(const device::DeviceJoined& joined) {
  const auto found = sessions_.find(joined.session);
  const auto owns = [](const Session& session) {
    return session.state.is_complete() && (session.held == nullptr || !session.held->suspect());
  };
  const bool owner = found != sessions_.end() && owns(*found->second);
  rounds_.joined(joined, owner);
  if (found != sessions_.end()) note(*found->second, "joined");
  rounds_changed();
}

void WorkerService::spread_progress(std::uint64_t session, std::uint64_t bytes) {
  rounds_.progress(session, bytes);
  rounds_changed();
}

void WorkerService::spread_over(const device::SpreadOver& over) {
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
    const auto found = sessions_.find(over.session);
    if (found != sessions_.end()) found->second->brought_by_round = true;
  }
  end_keeping(over);
  rounds_.spread_over(over, steady_now());
  rounds_changed();
}

void WorkerService::meeting_id(std::uint64_t number, const Result<std::string>& id) {
  rounds_.meeting_id(number, id);
  rounds_changed();
}

void WorkerService::spread(const device::SpreadOrder& order) {
  const auto found = sessions_.find(order.session);
  if (found != sessions_.end()) note(*found->second, "spreading");
  device::SpreadOrder ordered = order;
  if (!begin_keeping(order)) ordered.keep_index = ordered.keep_count = 0;
  host_.spread_device(ordered);
}

// What passes by is written to the copy that arrives here, as long as nothing is fetched for it.
bool WorkerService::begin_keeping(const device::SpreadOrder& order) {
  const auto found = sessions_.find(order.session);
  if (order.keep_count == 0 || found == sessions_.end() || keepers_.contains(order.session)) {
    return false;
  }
  const auto supply = found->second->held;
  auto writing = supply != nullptr ? supply->write() : Lease();
  if (!writing) return false;
  keepers_[order.session] = {supply, std::move(writing), order.communicator};
  return true;
}

// Its device writes no more, or its process was reaped: however long that takes, the copy is not
// fetched before.
void WorkerService::end_keeping(const device::SpreadOver& over) {
  const auto node = keepers_.extract(over.session);
  if (!node.empty()) node.mapped().supply->landed(node.mapped().party, over.kept);
}

void WorkerService::stop_spread(SessionId session, const std::string& why) {
  host_.stop_spread(session, why);
}

void WorkerService::make_meeting_id(std::uint64_t number) { host_.make_meeting_id(number); }

// What it was not given comes from the copy here, now; else the copy may be completed for others.
void WorkerService::left_round(SessionId id, bool all, const std::string& why) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  const SessionPtr kept = found->second;
  Session& session = *kept;
  session.state.leave_round(steady_now(), all);
  if (session.held != nullptr && !all) session.held->want_now();
  session.hold.reset();
  session.held.reset();
  note(session, all ? "spread" : "alone", why);
  note_phase(session);
  log::info("worker.left_round", "session", id, "instance", session.instance, "rank", session.rank,
            "all", all, "why", why);
  retry_loaded(session);
}

// Keeps the worker's word until retry_loaded() finds that its time has come.
void WorkerService::loaded_early(Session& session, const proto::WorkerFrame& frame) {
  if (session.early_loaded) {
    refuse(session.client, session.early_loaded->call(), session.state.id(),
           Error(ErrorCode::kStale, "was asked again"));
  }
  session.early_loaded = frame;
}

void WorkerService::retry_loaded(Session& session) {
  if (!session.early_loaded || is_loaded_early(session)) return;
  const ClientPtr client = session.client;
  const auto frame = *std::exchange(session.early_loaded, std::nullopt);
  if (auto taken = loaded(client, frame); !taken) {
    refuse(client, frame.call(), frame.session(), taken.error());
  }
}

void WorkerService::rounds_changed() {
  round_news_.notify();
  const bool anything = rounds_.has_members() || rounds_.due();
  if (!anything || !host_.has_fleet() || std::exchange(reporting_rounds_, true)) return;
  tasks_.spawn("worker.rounds", report_rounds());
}

// While there are members: a question that waits for orders, and on every change one beside it.
async::Task<void> WorkerService::report_rounds() {
  co_await asio::this_coro::throw_if_cancelled(false);
  while (!co_await async::is_cancelled()) {
    const auto now = steady_now();
    rounds_.check(now);
    const auto due = rounds_.due();
    const bool news = due && *due <= now;
    const bool under_way = polling_rounds_ || asking_rounds_;
    if (!rounds_.has_members() && !due && !under_way) break;
    if (now >= ask_rounds_after_) {
      if (!polling_rounds_ && (rounds_.has_members() || news)) {
        polling_rounds_ = true;
        tasks_.spawn("worker.orders", ask_for_orders(true));
      } else if (!asking_rounds_ && news) {
        asking_rounds_ = true;
        tasks_.spawn("worker.orders", ask_for_orders(false));
      }
    }
    auto next = now + kLook;
    if (now < ask_rounds_after_) next = std::min(next, ask_rounds_after_);
    if (due && *due > now) next = std::min(next, *due);
    co_await round_news_.wait_until(next);
  }
  rounds_.forget_orders();  // who comes later hears of what runs then
  reporting_rounds_ = false;
}

async::Task<void> WorkerService::ask_for_orders(bool wait) {
  co_await asio::this_coro::throw_if_cancelled(false);
  const auto longest = wait ? kOrdersWait : std::chrono::milliseconds(0);
  auto report = rounds_.report(host_.device_life(), longest, steady_now());
  const std::uint64_t sequence = report.sequence();
  const auto orders = co_await host_.report_rounds(std::move(report));
  bool& under_way = wait ? polling_rounds_ : asking_rounds_;
  under_way = false;
  if (orders) {
    rounds_.obey(*orders, sequence, steady_now());
    answer_watchers({});
  } else {
    rounds_.unanswered();
    ask_rounds_after_ = steady_now() + kAskAgain;
  }
  rounds_changed();
}

async::Task<void> WorkerService::update(ClientPtr client, proto::WorkerFrame frame) {
  co_await asio::this_coro::throw_if_cancelled(false);
  const std::chrono::milliseconds asked(frame.deadline_ms());
  const auto give_up = steady_now() + (asked.count() > 0 ? asked : kDefaultUpdate);
  auto order = from_proto(frame.update());
  if (!order) co_return refuse(client, frame.call(), 0, order.error());
  ++client->calls;
  auto running = update_and_wait(client, std::move(*order), give_up);
  const auto updated = co_await std::move(running);
  --client->calls;
  if (!updated) co_return refuse(client, frame.call(), 0, updated.error());
  proto::AgentFrame answer;
  answer.set_call(frame.call());
  *answer.mutable_updated() = *updated;
  client->send(answer);
}

// Once it has begun it goes on whatever becomes of who asked.
async::Task<Result<proto::Updated>> WorkerService::update_and_wait(ClientPtr client,
                                                                   UpdateOrder order,
                                                                   TimePoint give_up) {
  CO_TRY(const std::uint64_t round,
         co_await host_.begin_update(order.id, order.group, order.gather));
  while (!client->closed() && !co_await async::is_cancelled()) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(give_up - steady_now());
    if (left.count() <= 0) {
      co_return fail(ErrorCode::kTimeout, "the update to {} goes on; see `rekindle status`",
                     order.id.to_string());
    }
    const auto status = co_await host_.update_status(round, std::min(left, kStatusWait));
    if (status) {
      if (status->phase() == "over") co_return updated_from(*status);
      continue;
    }
    if (!is_away(status.error())) {  // another coordinator, which knows nothing of it
      co_return fail(ErrorCode::kUnavailable,
                     "what became of the update to {} is unknown: {}; see `rekindle status`",
                     order.id.to_string(), status.error().message());
    }
    co_await async::sleep_for(kAskAgain);
  }
  co_return fail(ErrorCode::kPeerLost, "nobody waits for the update to {} any more",
                 order.id.to_string());
}

}  // namespace rekindle::worker
