#include "recovery/worker/service.h"

#include <algorithm>
#include <utility>

#include <fcntl.h>

#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/unix_socket.h"
#include "recovery/worker/wire.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/base/version.h"
#include "src/ipc/unix_socket.h"

namespace rekindle::worker {

namespace asio = boost::asio;

namespace {

constexpr std::size_t kMostClients = 4096;
constexpr std::size_t kMostCalls = 256;       // of one client, answered later
constexpr std::size_t kMostSessions = 256;    // of one client
constexpr std::size_t kMostPublications = 4;  // of one client; their memory is there at once
constexpr std::chrono::milliseconds kSweep{50};
constexpr std::chrono::milliseconds kIdleSweep{250};
constexpr std::chrono::milliseconds kPause{400};

}  // namespace

Result<std::unique_ptr<WorkerService>> WorkerService::start(Host& host,
                                                            asio::any_io_executor executor,
                                                            ServiceOptions options) {
  TRY(auto files, ReadyFiles::open(options.directory / "ready"));
  std::error_code ignored;  // what a last life was given to write
  std::filesystem::remove_all(options.directory / "publish", ignored);
  std::unique_ptr<WorkerService> service(
      new WorkerService(host, std::move(executor), std::move(options), std::move(files)));
  TRY(service->watch_, ipc::LifeWatch::start([raw = service.get()](const ipc::Death& death) {
        asio::post(raw->executor_, [raw, death] { raw->on_death(death); });
      }));
  TRY_VOID(service->listen());
  return service;
}

WorkerService::WorkerService(Host& host, asio::any_io_executor executor, ServiceOptions options,
                             ReadyFiles files)
    : host_(host),
      executor_(std::move(executor)),
      options_(std::move(options)),
      events_(executor_),
      instances_(std::move(files), events_),
      supplies_(host, executor_),
      rounds_(*this),
      changed_(executor_),
      news_(executor_),
      round_news_(executor_),
      tasks_(executor_) {}

WorkerService::~WorkerService() {
  if (listener_ != nullptr) listener_->close();
}

Result<void> WorkerService::listen() {
  const std::string path = (options_.directory / "worker.sock").string();
  TRY(auto fd, rpc::listen_unix_socket(path));
  const std::vector<std::string> directories{options_.directory.parent_path().string(),
                                             options_.directory.string()};
  TRY_VOID(options_.allowed_uids.empty() ? ipc::close_to_others(directories)
                                         : ipc::open_to_others(path, directories));
  listener_ = std::make_shared<rpc::Listener>(
      executor_, std::move(fd), path,
      [this](rpc::Socket socket, const std::string&) { accept(std::move(socket)); }, [] {});
  listener_->start();
  return {};
}

async::Task<void> WorkerService::close(std::chrono::milliseconds deadline) {
  closing_ = true;
  listener_->close();
  const Error why(ErrorCode::kPeerLost, "the agent of this host stops");
  while (!clients_.empty()) {
    const auto client = clients_.begin()->second;
    drop(client, why);
    client->close(why);
  }
  co_await supplies_.close(deadline);
  (void)co_await tasks_.close(deadline);
}

void WorkerService::accept(rpc::Socket socket) {
  UniqueFd fd(socket.release());
  const std::string path = listener_->unix_path();
  auto peer = ipc::peer_of(fd.get());
  if (peer) {
    if (auto allowed = ipc::check_peer(*peer, options_.allowed_uids, path); !allowed) {
      peer = fail(std::move(allowed).error());
    } else if (clients_.size() >= kMostClients || closing_) {
      peer = fail(ErrorCode::kExhausted, "{} workers are connected; no more are taken",
                  clients_.size());
    }
  }
  auto channel = ipc::Channel::adopt(std::move(fd), 0);
  if (!peer || !channel) {
    const Error why = !peer ? peer.error() : channel.error();
    log::warn("worker.refused", "error", why.message());
    if (!channel) return;
    (void)channel->push(error_frame(0, 0, why).SerializeAsString());
    (void)channel->send_some(steady_now());  // it fits a fresh socket, or is not worth waiting for
    return;
  }
  const ClientId id = ++last_number_;
  auto client = std::make_shared<Client>(executor_, id, std::move(*channel), std::move(*peer));
  clients_[id] = client;
  tasks_.spawn("worker.client", serve(std::move(client)));
  if (!std::exchange(sweeping_, true)) tasks_.spawn("worker.sweep", sweep());
}

async::Task<void> WorkerService::serve(ClientPtr client) {
  co_await asio::this_coro::throw_if_cancelled(false);
  // The client is held here for as long as the callback may run.
  const Error why = co_await client->run(
      [this, raw = client.get()](proto::WorkerFrame frame, std::vector<UniqueFd>) {
        on_frame(raw->shared_from_this(), std::move(frame));
      });
  drop(client, why);
}

// The connection is over, or the worker dead: everything that it had ends. Again is fine.
void WorkerService::drop(const ClientPtr& client, const Error& why, const char* kind) {
  if (clients_.erase(client->id()) == 0) return;
  watch_->remove(client->id());
  if (why.code() == ErrorCode::kTimeout) detected(client, options_.silence);
  // The end of its socket came first: at the watch's last look it lived.
  if (why.code() == ErrorCode::kPeerLost && !client->dead) {
    detected(client, ipc::kLifeLookInterval);
  }
  std::vector<SessionPtr> mine;
  for (const auto& [id, session] : sessions_) {
    if (session->client == client) mine.push_back(session);
  }
  for (const auto& session : mine) fail_session(session, why, kind);
  for (auto it = publications_.begin(); it != publications_.end();) {
    if (it->second.client != client->id()) {
      ++it;
      continue;
    }
    // Also of a dead one: its device may write there for a while.
    it->second.publication->left_mapped();
    tasks_.spawn("worker.discard", discard(std::move(it->second.publication)));
    it = publications_.erase(it);
  }
}

// The first phase of those that come to take its place.
void WorkerService::detected(const ClientPtr& client, Duration took) {
  for (const auto& [id, session] : sessions_) {
    if (session->client != client) continue;
    if (auto* const entry = entry_of(*session)) entry->detections[session->rank] = took;
  }
}

void WorkerService::on_death(const ipc::Death& death) {
  const auto found = clients_.find(death.worker);
  if (found == clients_.end()) return;
  const ClientPtr client = found->second;
  const auto sign = death.sign;
  client->dead = true;
  detected(client, death.unseen);
  const Error why(ErrorCode::kPeerLost,
                  fmt::format("died (pid {}, seen by its {})", client->pid(), to_string(sign)));
  log::warn("worker.died", "pid", client->pid(), "seen_by", to_string(sign), "sessions",
            client->sessions);
  drop(client, why, "died");
  client->close(why);
}

void WorkerService::refuse(const ClientPtr& client, std::uint64_t call, SessionId session,
                           const Error& error) {
  client->send(error_frame(call, session, error));
}

void WorkerService::on_frame(const ClientPtr& client, proto::WorkerFrame frame) {
  if (clients_.count(client->id()) == 0) return;
  const auto kind = frame.kind_case();
  if (kind == proto::WorkerFrame::kHello) return greet(client, frame);
  if (!client->greeted) {
    refuse(client, frame.call(), 0, Error(ErrorCode::kInvalid, "say hello first"));
    return client->close(Error(ErrorCode::kInvalid, "did not say hello"));
  }
  if (auto begun = begin_call(client, frame); !begun) {
    refuse(client, frame.call(), frame.session(), begun.error());
  }
}

Result<void> WorkerService::begin_call(const ClientPtr& client, const proto::WorkerFrame& frame) {
  if (frame.call() == 0) return fail(ErrorCode::kInvalid, "a call has a number above 0");
  switch (frame.kind_case()) {
    case proto::WorkerFrame::kPing: {
      proto::AgentFrame answer;
      answer.set_call(frame.call());
      answer.mutable_pong();
      client->send(answer);
      return {};
    }
    case proto::WorkerFrame::kAttach:
      if (client->sessions >= kMostSessions) {
        return fail(ErrorCode::kExhausted, "this worker has {} sessions", client->sessions);
      }
      return begin_attach(client, frame);
    case proto::WorkerFrame::kLoaded:
      return loaded(client, frame);
    case proto::WorkerFrame::kDetach:
      return detach(client, frame);
    case proto::WorkerFrame::kWatch:
      TRY_VOID(session_of(client, frame));  // one watch each, so a client has no more than sessions
      if (watchers_.size() >= kMostClients) {
        return fail(ErrorCode::kExhausted, "too many workers watch for versions");
      }
      watch(client, frame);
      return {};
    case proto::WorkerFrame::kPublishBegin:
    case proto::WorkerFrame::kPublishCommit:
    case proto::WorkerFrame::kPublishAbandon:
      if (client->calls >= kMostCalls) {
        return fail(ErrorCode::kExhausted, "this worker has {} calls under way", client->calls);
      }
      return begin_publish_call(client, frame);
    case proto::WorkerFrame::kUpdate:
      if (client->calls >= kMostCalls) {
        return fail(ErrorCode::kExhausted, "this worker has {} calls under way", client->calls);
      }
      tasks_.spawn("worker.update", update(client, frame));
      return {};
    default:
      return fail(ErrorCode::kInvalid, "this agent does not know that call; is it older?");
  }
}

Result<void> WorkerService::begin_publish_call(const ClientPtr& client,
                                               const proto::WorkerFrame& frame) {
  if (frame.kind_case() == proto::WorkerFrame::kPublishCommit) {
    tasks_.spawn("worker.publish", commit_publish(client, frame.call(), frame.session()));
  } else if (frame.kind_case() == proto::WorkerFrame::kPublishAbandon) {
    tasks_.spawn("worker.publish", abandon_publish(client, frame.call(), frame.session()));
  } else if (client->publications >= kMostPublications) {
    return fail(ErrorCode::kExhausted,
                "this worker has {} publications under way; commit or abandon one",
                client->publications);
  } else {
    ++client->publications;
    tasks_.spawn("worker.publish", begin_publish(client, frame));
  }
  return {};
}

void WorkerService::greet(const ClientPtr& client, const proto::WorkerFrame& frame) {
  const auto& hello = frame.hello();
  const auto refuse_and_close = [&](const Error& why) {
    log::warn("worker.refused", "pid", client->pid(), "error", why.message());
    refuse(client, frame.call(), 0, why);
    client->close(why);
  };
  if (client->greeted) return refuse_and_close(Error(ErrorCode::kInvalid, "said hello twice"));
  if (hello.protocol_min() > kProtocol || hello.protocol_max() < kProtocol) {
    return refuse_and_close(
        Error(ErrorCode::kInvalid,
              fmt::format("the worker's library speaks protocol {} to {}, this agent {}: install "
                          "the same release of both",
                          hello.protocol_min(), hello.protocol_max(), kProtocol)));
  }
  auto page = ipc::LifePage::create();
  if (!page) return refuse_and_close(page.error());
  std::vector<UniqueFd> descriptors;
  descriptors.emplace_back(::fcntl((*page)->fd(), F_DUPFD_CLOEXEC, 0));
  if (!descriptors.front()) return refuse_and_close(errno_error(errno, "share a life page"));
  client->greeted = true;
  if (auto added = watch_->add(client->id(), std::move(*page), std::move(client->peer())); !added) {
    return refuse_and_close(added.error());
  }
  proto::AgentFrame answer;
  answer.set_call(frame.call());
  answer.set_descriptors(1);
  auto& greeting = *answer.mutable_hello();
  greeting.set_protocol(kProtocol);
  greeting.set_incarnation(options_.incarnation.to_bytes());
  greeting.set_client(client->id());
  greeting.set_ping_interval_ms(static_cast<std::uint32_t>(options_.ping_interval.count()));
  greeting.set_silence_ms(static_cast<std::uint32_t>(options_.silence.count()));
  client->send(answer, std::move(descriptors));
}

// Deadlines, while there are clients or instances that wait for theirs.
async::Task<void> WorkerService::sweep() {
  co_await asio::this_coro::throw_if_cancelled(false);
  while ((!clients_.empty() || instances_.any_idle()) && !co_await async::is_cancelled()) {
    const auto pause = clients_.empty() ? kIdleSweep : kSweep;
    const auto due = steady_now() + pause;
    co_await async::sleep_for(pause);
    const auto now = steady_now();
    if (now - due > kPause) {  // we were stopped, or starved
      for (const auto& [id, client] : clients_) client->excuse(now - due);
      for (const auto& [id, session] : sessions_) session->state.excuse(now - due);
      continue;
    }
    for (const auto& [id, client] : clients_) client->check(now, options_.silence);
    std::vector<std::pair<SessionPtr, Error>> overdue;
    for (const auto& [id, session] : sessions_) {
      auto why = session->state.overdue(now);
      if (why && !session->attached && session->held_up) {
        why = Error(ErrorCode::kTimeout, session->held_up->message());
      }
      if (why) overdue.emplace_back(session, std::move(*why));
    }
    for (const auto& [session, why] : overdue) fail_session(session, why);
    for (const auto& [id, session] : sessions_) time_out_waiting(*session, now);
    instances_.forget_idle(now, options_.forget_after);
  }
  sweeping_ = false;
}

}  // namespace rekindle::worker
