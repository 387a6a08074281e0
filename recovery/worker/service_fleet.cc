// Instances whose ranks live on several hosts: the coordinator is told of those here, and has the
// last word.
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/worker/service.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::worker {

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kReport{500};
constexpr std::chrono::milliseconds kAskAgain{200};

// It could be asked, and this is no rank of that instance.
bool is_refusal(const Error& error) {
  return error.code() == ErrorCode::kStale || error.code() == ErrorCode::kDenied ||
         error.code() == ErrorCode::kInvalid;
}

}  // namespace

bool WorkerService::spans(const Instances::Entry& entry) const {
  return entry.named && entry.state.world() > 1 && host_.has_fleet();
}

void WorkerService::ranks_changed(Instances::Entry& entry) {
  entry.changes = ++last_change_;
  if (!spans(entry)) return;
  ranks_changed_ = true;
  news_.notify();
  if (!std::exchange(reporting_, true)) tasks_.spawn("worker.report", report_ranks());
}

RankWord WorkerService::word_of(const Instances::Entry& entry, const Instance::RankView& rank) {
  RankWord word;
  word.instance = entry.state.name();
  word.generation = entry.state.generation();
  word.rank = rank.rank;
  word.world = entry.state.world();
  word.model = entry.state.model();
  word.version = entry.version;
  word.has = entry.state.version();
  word.state = rank.left     ? RankWord::State::kGone
               : !rank.here  ? RankWord::State::kFailed
               : rank.loaded ? RankWord::State::kLoaded
                             : RankWord::State::kAttached;
  word.sequence = ++last_report_;
  word.why = rank.why;
  return word;
}

// The newest version: the coordinator's word for all ranks of the generation, when there may be
// others elsewhere; else, and when it is away, as the host knows it.
async::Task<Result<ModelVersion>> WorkerService::newest_for(SessionPtr session) {
  while (!session->state.ended() && !co_await async::is_cancelled()) {
    const auto* const entry = entry_of(*session);
    if (entry == nullptr || !spans(*entry)) break;
    auto word = word_of(*entry, {session->rank, true, false, false, ""});
    word.version.reset();
    auto answer = co_await host_.report(std::move(word));
    if (answer) co_return std::move(answer->id);
    const ErrorCode code = answer.error().code();
    if (is_refusal(answer.error()) || code == ErrorCode::kNotFound) {
      co_return fail(std::move(answer).error());
    }
    if (code != ErrorCode::kUnavailable) break;
    // It has just started: what this host knows may be older. The attach's deadline ends this.
    session->held_up = answer.error();
    co_await async::sleep_for(kAskAgain);
  }
  session->held_up.reset();
  co_return co_await host_.newest(session->wanted.model);
}

// While there are such instances: on every change, and twice a second.
async::Task<void> WorkerService::report_ranks() {
  co_await asio::this_coro::throw_if_cancelled(false);
  while (!co_await async::is_cancelled()) {
    std::vector<std::string> names;
    for (const auto& [name, entry] : instances_.all()) {
      // A rank that nobody is here for any more is said to have failed once, not for ever.
      const bool news = entry->state.has_sessions() || entry->changes != entry->reported;
      if (spans(*entry) && news) names.push_back(name);
    }
    if (names.empty()) break;
    ranks_changed_ = false;
    for (const auto& name : names) co_await report_instance(name);
    if (!ranks_changed_) co_await news_.wait_until(steady_now() + kReport);
  }
  reporting_ = false;
}

async::Task<void> WorkerService::report_instance(std::string name) {
  const auto found = instances_.all().find(name);
  if (found == instances_.all().end()) co_return;
  const Instances::Entry& entry = *found->second;
  const std::uint64_t changes = entry.changes;
  // Before its version is known newest_for() speaks for it.
  if (!entry.version && !entry.state.version()) co_return;
  std::vector<RankWord> words;
  for (const auto& rank : entry.state.ranks()) words.push_back(word_of(entry, rank));
  std::optional<Result<FleetWord>> answer;
  Refusals refused;
  for (auto& word : words) {
    const bool here =
        word.state == RankWord::State::kAttached || word.state == RankWord::State::kLoaded;
    const std::uint32_t rank = word.rank;
    auto said = co_await host_.report(std::move(word));
    // No matter of the other ranks; one that has failed here may live elsewhere by now.
    if (!said && is_refusal(said.error())) {
      if (here) refused.emplace(rank, std::move(said).error());
      continue;
    }
    answer = std::move(said);
    if (!*answer) break;
  }
  obey(name, changes, refused, answer);
}

async::Task<void> WorkerService::report_once(RankWord word) {
  co_await asio::this_coro::throw_if_cancelled(false);
  (void)co_await host_.report(std::move(word));
}

// One that has just begun its term hears of the ranks one by one: until it has said COMMITTED, or
// was given the time to, its LOADING takes back nothing.
bool WorkerService::has_heard_all(Instances::Entry& entry, std::uint64_t term) const {
  if (term == entry.committed_in) return true;
  const auto now = steady_now();
  if (std::exchange(entry.loading_in, term) != term) entry.loading_since = now;
  return now - entry.loading_since >= options_.hear_ranks;
}

void WorkerService::obey(const std::string& name, std::uint64_t changes, const Refusals& refused,
                         const std::optional<Result<FleetWord>>& last) {
  const auto found = instances_.all().find(name);
  // What has changed since is reported anew: this answer knows nothing of it.
  if (found == instances_.all().end() || found->second->changes != changes) return;
  Instances::Entry& entry = *found->second;
  std::vector<std::pair<SessionPtr, Error>> over;
  for (const auto& [id, session] : sessions_) {
    if (session->instance != name) continue;
    if (const auto why = refused.find(session->rank); why != refused.end()) {
      over.emplace_back(session, why->second);
    }
  }
  for (const auto& [session, why] : over) fail_session(session, why);
  if (!over.empty() || !last || !*last) return;  // without its word nothing changes
  const Result<FleetWord>& answer = *last;
  entry.reported = changes;
  if (entry.state.version() && answer->id != *entry.state.version()) {
    const Error stale(
        ErrorCode::kStale,
        fmt::format("instance {} is at {} in the fleet, at {} here; attach again", name,
                    answer->id.to_string(), entry.state.version()->to_string()));
    for (const auto& [id, session] : sessions_) {
      if (session->instance == name) over.emplace_back(session, stale);
    }
    for (const auto& [session, why] : over) fail_session(session, why);
    return;
  }
  switch (answer->state) {
    case FleetWord::State::kCommitted:
      entry.committed_in = answer->term;
      return apply(entry, entry.state.others_loaded());
    case FleetWord::State::kUnfit:
      return apply(entry, entry.state.others_failed(answer->why));
    case FleetWord::State::kLoading:
      if (has_heard_all(entry, answer->term)) apply(entry, entry.state.others_loading());
  }
}

}  // namespace rekindle::worker
