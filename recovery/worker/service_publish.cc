// What workers do with versions: watch for newer ones, make new ones.
#include <algorithm>
#include <set>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"
#include "recovery/worker/service.h"
#include "src/async/offload.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::worker {

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kLook{500};

}  // namespace

void WorkerService::watch(const ClientPtr& client, const proto::WorkerFrame& frame) {
  const auto id = rpc::from_proto(frame.watch().have());
  if (!id) return refuse(client, frame.call(), frame.session(), id.error());
  const std::chrono::milliseconds asked(frame.deadline_ms());
  // Asked anew, the last question counts.
  std::erase_if(watchers_, [&](const Watcher& old) {
    return old.client.lock() == client && old.session == frame.session();
  });
  watchers_.push_back({client, frame.call(), frame.session(), *id,
                       asked.count() > 0 ? steady_now() + asked : TimePoint::max()});
  answer_watchers({});  // an update may have begun, or have been, while it did not watch
  if (!std::exchange(watching_, true)) tasks_.spawn("worker.watch", watch_versions());
}

void WorkerService::forget_watch(SessionId session) {
  std::erase_if(watchers_, [&](const Watcher& old) { return old.session == session; });
}

// One question per model and look, however many watch it.
async::Task<void> WorkerService::watch_versions() {
  co_await asio::this_coro::throw_if_cancelled(false);
  while (!watchers_.empty() && !co_await async::is_cancelled()) {
    std::set<std::string> models;
    for (const auto& watcher : watchers_) {
      if (!rounds_.is_member(watcher.session)) models.insert(watcher.have.model);
    }
    Newest newest;
    for (const auto& model : models) {
      if (auto id = co_await host_.newest(model)) newest[model] = std::move(*id);
    }
    answer_watchers(newest);
    TimePoint next = steady_now() + kLook;
    for (const auto& watcher : watchers_) next = std::min(next, watcher.deadline);
    if (!watchers_.empty()) {
      co_await async::sleep_for(
          std::max(std::chrono::milliseconds(1),
                   std::chrono::duration_cast<std::chrono::milliseconds>(next - steady_now())));
    }
  }
  watching_ = false;
}

// Members of a group hear of updates, the others of what is READY.
void WorkerService::answer_watchers(const Newest& newest) {
  const auto now = steady_now();
  const auto news_for = [&](const Watcher& watcher) -> std::optional<ModelVersion> {
    if (rounds_.is_member(watcher.session)) {
      const auto version = rounds_.news_for(watcher.session, watcher.have);
      if (!version) return std::nullopt;
      return ModelVersion{watcher.have.model, *version};
    }
    const auto found = newest.find(watcher.have.model);
    if (found == newest.end() || found->second.version <= watcher.have.version) return std::nullopt;
    return found->second;
  };
  std::erase_if(watchers_, [&](const Watcher& watcher) {
    const auto client = watcher.client.lock();
    if (client == nullptr || client->closed()) return true;
    if (const auto news = news_for(watcher)) {
      proto::AgentFrame answer;
      answer.set_call(watcher.call);
      answer.set_session(watcher.session);
      *answer.mutable_new_version()->mutable_id() = rpc::to_proto(*news);
      client->send(answer);
      return true;
    }
    if (now < watcher.deadline) return false;
    refuse(client, watcher.call, watcher.session,
           Error(ErrorCode::kTimeout,
                 fmt::format("there is nothing newer than {} yet", watcher.have.to_string())));
    return true;
  });
}

async::Task<void> WorkerService::begin_publish(ClientPtr client, proto::WorkerFrame frame) {
  co_await asio::this_coro::throw_if_cancelled(false);
  ++client->calls;
  using Begun = Result<std::shared_ptr<std::unique_ptr<Publication>>>;
  const auto work = [this, &frame]() -> Begun {
    TRY(auto id, rpc::from_proto(frame.publish_begin().id()));
    TRY(const auto tensors, tensors_from(frame.publish_begin()));
    TRY(auto publication,
        Publication::begin(host_.store(), options_.directory / "publish", std::move(id), tensors));
    return std::make_shared<std::unique_ptr<Publication>>(std::move(publication));
  };
  auto begun = co_await async::offload(host_.blocking_pool(), work);
  --client->calls;
  if (!begun) {
    --client->publications;
    co_return refuse(client, frame.call(), 0, std::move(begun).error().with_context("publish"));
  }
  std::unique_ptr<Publication> publication = std::move(**begun);
  if (client->closed()) {
    auto over = discard(std::move(publication));
    co_return co_await std::move(over);
  }
  auto segments = publication->open_segments();
  if (!segments) {
    auto over = discard(std::move(publication));
    co_await std::move(over);
    --client->publications;
    co_return refuse(client, frame.call(), 0, segments.error());
  }
  const SessionId number = ++last_number_;
  proto::AgentFrame answer;
  answer.set_call(frame.call());
  answer.set_session(number);
  answer.set_descriptors(static_cast<std::uint32_t>(segments->size()));
  auto& body = *answer.mutable_publish_begun();
  body.set_layout(publication->layout().serialize());
  for (const auto& segment : publication->layout().segments()) {
    body.add_segment_bytes(segment.size_bytes);
  }
  publications_[number] = {client->id(), std::move(publication)};
  client->send(answer, std::move(*segments));
}

Result<std::unique_ptr<Publication>> WorkerService::take_publication(const ClientPtr& client,
                                                                     SessionId session) {
  const auto found = publications_.find(session);
  if (found == publications_.end() || found->second.client != client->id()) {
    return fail(ErrorCode::kStale, "publication {} is over; begin anew", session);
  }
  auto publication = std::move(found->second.publication);
  publications_.erase(found);
  return publication;
}

async::Task<void> WorkerService::commit_publish(ClientPtr client, std::uint64_t call,
                                                SessionId session) {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto publication = take_publication(client, session);
  if (!publication) co_return refuse(client, call, session, publication.error());
  ++client->calls;
  const ModelVersion id = (*publication)->id();
  auto filled = (*publication)->filled();
  auto root = co_await host_.publish(id, std::move(filled));
  auto over = discard(std::move(*publication));
  co_await std::move(over);
  --client->calls;
  --client->publications;
  if (!root) co_return refuse(client, call, session, root.error());
  proto::AgentFrame answer;
  answer.set_call(call);
  answer.set_session(session);
  *answer.mutable_published()->mutable_id() = rpc::to_proto(id);
  *answer.mutable_published()->mutable_root() = rpc::to_proto(*root);
  client->send(answer);
}

// Its files are gone when the answer is there.
async::Task<void> WorkerService::abandon_publish(ClientPtr client, std::uint64_t call,
                                                 SessionId session) {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto publication = take_publication(client, session);
  if (!publication) co_return refuse(client, call, session, publication.error());
  ++client->calls;
  auto over = discard(std::move(*publication));
  co_await std::move(over);
  --client->calls;
  --client->publications;
  proto::AgentFrame answer;
  answer.set_call(call);
  answer.mutable_done();
  client->send(answer);
}

// To free many GiB of pages takes seconds: not on this thread.
async::Task<void> WorkerService::discard(std::unique_ptr<Publication> publication) {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto work = [doomed = std::move(publication)]() mutable {
    doomed.reset();
    return true;
  };
  auto freed = async::offload(host_.blocking_pool(), std::move(work));
  (void)co_await std::move(freed);
}

}  // namespace rekindle::worker
