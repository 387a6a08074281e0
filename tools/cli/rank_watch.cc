#include "tools/cli/rank_watch.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#include <sys/eventfd.h>
#include <unistd.h>

#include "recovery/agent/local_agent.h"
#include "recovery/rpc/address.h"
#include "src/base/clock.h"
#include "src/base/worker_pool.h"
#include "src/ipc/unix_socket.h"

namespace rekindle::cli {
namespace {

constexpr std::uint32_t kLongPollMs = 4000;
constexpr std::chrono::milliseconds kVisibleDeadline{200};
constexpr std::chrono::milliseconds kAgentRetry{250};
// An agent that hangs holds the supervisor up no longer.
constexpr std::chrono::milliseconds kCatchUpDeadline{1'000};

}  // namespace

Result<std::unique_ptr<RankWatch>> RankWatch::create(const Settings& settings, RankPlace place) {
  TRY(auto agent, Remote::create(settings, "unix:" + agent::agent_socket(settings.store).string()));
  return std::unique_ptr<RankWatch>(new RankWatch(std::move(agent), std::move(place)));
}

RankWatch::~RankWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Result<void> RankWatch::start() {
  if (thread_.joinable()) return {};
  woken_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!woken_) return fail_errno(errno, "create an eventfd");
  // The thread of the supervisor deals with signals.
  const SignalsBlocked blocked;
  try {
    thread_ = std::thread([this] { ask_agent(); });
  } catch (const std::system_error& error) {
    return fail(ErrorCode::kExhausted, "start a thread: {}", error.what());
  }
  return {};
}

// --- the thread that asks

// After a restart of the agent its events begin anew.
Result<proto::AgentEventsResponse> RankWatch::next_events(std::uint32_t wait_ms) {
  proto::AgentStatusRequest request;
  request.mutable_events()->set_after(after_);
  request.mutable_events()->set_wait_ms(wait_ms);
  TRY(auto status, (agent_->call<proto::AGENT_STATUS>(request)));
  if (!status.has_events()) {
    return fail(ErrorCode::kUnavailable, "the agent at {} is older and reports no events",
                agent_->address());
  }
  proto::AgentEventsResponse response = std::move(*status.mutable_events());
  if (response.incarnation() != std::exchange(asked_incarnation_, response.incarnation()) &&
      std::exchange(after_, 0) > 0) {
    return next_events(0);
  }
  if (response.events_size() > 0) after_ = response.events().rbegin()->number();
  return response;
}

void RankWatch::ask_agent() {
  std::uint64_t question = 0;
  bool failed = false;
  // A call that waits for events gives way to a newer question.
  agent_->while_waiting([this, &question] {
    const std::lock_guard lock(mutex_);
    return !stopping_ && asked_ == question;
  });
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    question = asked_;
    // A restarted agent counts its events anew, and would wait for one after the last known number.
    const std::uint32_t wait_ms = question == answered_ && !failed ? kLongPollMs : 0;
    lock.unlock();
    auto answer = next_events(wait_ms);
    lock.lock();
    const bool reached = answer.has_value();
    const bool history = learned_ < begun_;
    if (reached) learned_ = question;
    if (reached && answer->events_size() > 0) {
      news_.push_back({*std::move(answer), history});
      const std::uint64_t one = 1;
      (void)!::write(woken_.get(), &one, sizeof one);
    }
    const bool gave_way = !reached && asked_ != question;
    if (reached || gave_way) failed = false;
    const bool failed_again = !reached && !gave_way && std::exchange(failed, true);
    // The connection may have been one to a former agent, or one that was closed to give way.
    if (!reached && !gave_way && !failed_again) continue;
    answered_ = question;
    changed_.notify_all();
    if (!failed_again) continue;
    changed_.wait_for(lock, kAgentRetry, [&] { return stopping_ || asked_ != question; });
  }
}

void RankWatch::catch_up() {
  std::unique_lock lock(mutex_);
  const std::uint64_t question = ++asked_;
  changed_.notify_all();
  (void)changed_.wait_for(lock, kCatchUpDeadline, [&] { return answered_ >= question; });
}

// --- the supervisor's thread

void RankWatch::begin() {
  followed_ = 0;
  {
    const std::lock_guard lock(mutex_);
    begun_ = asked_ + 1;
  }
  catch_up();
  take_news();
  for (auto& [session, attached] : attached_) attached.ours = false;
}

// The worker may have had ranks, and lost them, before its supervisor comes here. That news waits
// for look().
void RankWatch::follow(pid_t process) {
  followed_ = process;
  death_.clear();
  ranks_.clear();
  for (const auto& [session, attached] : attached_) attach(session, attached);
}

void RankWatch::watch(std::vector<pollfd>& entries) const {
  entries.push_back({woken_.get(), POLLIN, 0});
  for (const Rank& rank : ranks_) entries.push_back({rank.process.pidfd.get(), POLLIN, 0});
}

void RankWatch::look() {
  take_news();
  const auto is_over = [](const Rank& rank) { return rank.process.has_ended(); };
  // It may have detached just before.
  if (std::ranges::any_of(ranks_, is_over)) look_again();
}

void RankWatch::look_again() {
  catch_up();
  take_news();
  std::erase_if(ranks_, [this](const Rank& rank) {
    const bool over = rank.process.has_ended();
    if (over) died(rank.rank, rank.process.pid);
    return over;
  });
  // The agent may yet have to notice a death.
  for (const auto& [session, attached] : attached_) {
    if (attached.ours && attached.pid != followed_ && has_ended(attached.pid)) {
      died(attached.rank, attached.pid);
    }
  }
}

std::vector<HeldProcess> RankWatch::take_survivors() {
  std::vector<HeldProcess> survivors;
  for (Rank& rank : ranks_) survivors.push_back(std::move(rank.process));
  ranks_.clear();
  return survivors;
}

void RankWatch::take_news() {
  std::uint64_t count = 0;
  (void)!::read(woken_.get(), &count, sizeof count);
  std::vector<News> news;
  {
    const std::lock_guard lock(mutex_);
    news.swap(news_);
  }
  for (const auto& [response, history] : news) {
    if (response.incarnation() != incarnation_) {
      // The agent has restarted. Its workers live, and attach again.
      incarnation_ = response.incarnation();
      visible_ = agent_is_visible();
      attached_.clear();
      for (Rank& rank : ranks_) rank.sessions.clear();
    }
    for (const auto& event : response.events()) take(event, history);
  }
}

void RankWatch::take(const proto::AgentEvent& event, bool history) {
  if (!visible_) return;
  const std::string& kind = event.kind();
  if (kind == "attach") {
    const Attached attached{static_cast<pid_t>(event.pid()), event.rank(),
                            !history && is_ours(event)};
    attached_[event.session()] = attached;
    attach(event.session(), attached);
  } else if (kind == "detached" || kind == "died" || kind == "failed" || kind == "no_resident") {
    ended(event.session(), kind);
  }
}

// The kernel has no number for a process of a PID namespace that this one does not see. An agent
// there reports numbers that mean other processes here.
bool RankWatch::agent_is_visible() const {
  const std::string path = agent_->address().substr(rpc::kUnixPrefix.size());
  const auto socket = ipc::connect_unix_socket(path, steady_now() + kVisibleDeadline);
  // An agent that has just answered may be too busy to take another connection.
  if (!socket) return true;
  const auto peer = ipc::peer_of(socket->get());
  return !peer || peer->pid > 0;
}

bool RankWatch::is_ours(const proto::AgentEvent& event) const {
  if (followed_ == 0 || place_.instance.empty() || event.instance() != place_.instance)
    return false;
  return place_.world == 1 || event.rank() == place_.rank;
}

// waitpid() tells the end of the followed process itself.
void RankWatch::attach(std::uint64_t session, const Attached& attached) {
  if (followed_ == 0 || attached.pid == followed_ || attached.pid <= 0) return;
  const auto known = std::ranges::find_if(ranks_, [&](const Rank& rank) {
    return rank.process.pid == attached.pid && !rank.process.has_ended();
  });
  if (known != ranks_.end()) {
    known->sessions.insert(session);
    return;
  }
  HeldProcess process = hold_below(attached.pid, followed_);
  if (process.pidfd) ranks_.push_back({std::move(process), attached.rank, {session}});
}

void RankWatch::ended(std::uint64_t session, const std::string& kind) {
  const auto node = attached_.extract(session);
  const auto found = std::ranges::find_if(
      ranks_, [&](const Rank& rank) { return rank.sessions.contains(session); });
  if (!node.empty() && node.mapped().pid != followed_) {
    const Attached& rank = node.mapped();
    const bool held = found != ranks_.end();
    // A rank without a pidfd may have died before this process could look at it. Its agent may have
    // seen no more than a connection that broke.
    const bool gone = kind == "died" || (!held && kind != "detached" && has_ended(rank.pid));
    if (gone && (held || rank.ours)) died(rank.rank, rank.pid);
  }
  if (found == ranks_.end()) return;
  found->sessions.erase(session);
  // After a failed session the process attaches again, or its end is a failure.
  const bool over = kind == "died" || (kind == "detached" && found->sessions.empty());
  if (over) ranks_.erase(found);
}

void RankWatch::died(std::uint32_t rank, pid_t pid) {
  if (death_.empty()) death_ = fmt::format("rank {} (pid {})", rank, pid);
}

}  // namespace rekindle::cli
