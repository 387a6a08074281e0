#include "recovery/worker/version_watch.h"

#include <algorithm>
#include <set>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"
#include "recovery/worker/worker_wire.h"
#include "src/async/task.h"

namespace rekindle::worker {

namespace {

constexpr std::size_t kMostWatchers = 4096;
constexpr std::chrono::milliseconds kNewestInterval{500};

}  // namespace

Result<void> VersionWatch::watch(const std::shared_ptr<Client>& client,
                                 const proto::WorkerFrame& frame) {
  if (watchers_.size() >= kMostWatchers) {
    return fail(ErrorCode::kExhausted, "too many workers watch for versions");
  }
  TRY(auto have, rpc::from_proto(frame.watch().have()));
  const std::chrono::milliseconds asked(frame.deadline_ms());
  forget(frame.session());
  watchers_.push_back({client, frame.call(), frame.session(), std::move(have),
                       asked.count() > 0 ? steady_now() + asked : TimePoint::max()});
  answer({});  // an update may have begun, or have been, while the session did not watch
  if (!std::exchange(running_, true)) tasks_.spawn("worker.watch", run());
  return {};
}

void VersionWatch::forget(SessionId session) {
  std::erase_if(watchers_, [&](const Watcher& watcher) { return watcher.session == session; });
}

// One question per model, however many sessions watch it.
async::Task<VersionWatch::Newest> VersionWatch::ask_for_newest() {
  std::set<std::string> models;
  for (const auto& watcher : watchers_) {
    if (!rounds_.rounds().is_member(watcher.session)) models.insert(watcher.have.model);
  }
  Newest newest;
  for (const auto& model : models) {
    if (auto id = co_await host_.newest(model)) newest[model] = std::move(*id);
  }
  co_return newest;
}

async::Task<void> VersionWatch::run() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  TimePoint ask_at{};
  while (!watchers_.empty() && !co_await async::is_cancelled()) {
    Newest newest;
    if (steady_now() >= ask_at) {
      newest = co_await ask_for_newest();
      ask_at = steady_now() + kNewestInterval;
    }
    answer(newest);
    if (watchers_.empty()) break;
    TimePoint next = ask_at;
    for (const auto& watcher : watchers_) next = std::min(next, watcher.deadline);
    co_await rounds_.orders_changed().wait_until(next);
  }
  running_ = false;
}

std::optional<ModelVersion> VersionWatch::news_for(const Watcher& watcher,
                                                   const Newest& newest) const {
  if (rounds_.rounds().is_member(watcher.session)) {
    const auto version = rounds_.rounds().news_for(watcher.session, watcher.have);
    if (!version) return std::nullopt;
    return ModelVersion{watcher.have.model, *version};
  }
  const auto found = newest.find(watcher.have.model);
  if (found == newest.end() || found->second.version <= watcher.have.version) return std::nullopt;
  return found->second;
}

void VersionWatch::answer(const Newest& newest) {
  const auto now = steady_now();
  std::erase_if(watchers_, [&](const Watcher& watcher) {
    const auto client = watcher.client.lock();
    if (client == nullptr || client->closed()) return true;
    if (const auto news = news_for(watcher, newest)) {
      proto::AgentFrame answer;
      answer.set_call(watcher.call);
      answer.set_session(watcher.session);
      *answer.mutable_new_version()->mutable_id() = rpc::to_proto(*news);
      client->send(answer);
      return true;
    }
    if (now < watcher.deadline) return false;
    client->send(error_frame(
        watcher.call, watcher.session,
        Error(ErrorCode::kTimeout,
              fmt::format("there is nothing newer than {} yet", watcher.have.to_string()))));
    return true;
  });
}

}  // namespace rekindle::worker
