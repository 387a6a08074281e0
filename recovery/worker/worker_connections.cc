#include "recovery/worker/worker_connections.h"

#include <cerrno>
#include <csignal>
#include <string>
#include <utility>

#include <sys/syscall.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/address.h"
#include "recovery/worker/worker_wire.h"
#include "src/base/duplicate_fd.h"
#include "src/base/log.h"
#include "src/base/protocol_range.h"
#include "src/base/version.h"
#include "src/ipc/unix_socket.h"

namespace rekindle::worker {

namespace asio = boost::asio;

namespace {

constexpr std::size_t kMostClients = 4096;

}  // namespace

Result<std::unique_ptr<WorkerConnections>> WorkerConnections::listen(asio::any_io_executor executor,
                                                                     ConnectionOptions options,
                                                                     ConnectionEvents& events,
                                                                     async::TaskGroup& tasks) {
  std::unique_ptr<WorkerConnections> connections(
      new WorkerConnections(std::move(executor), std::move(options), events, tasks));
  TRY_VOID(connections->start());
  return connections;
}

WorkerConnections::WorkerConnections(asio::any_io_executor executor, ConnectionOptions options,
                                     ConnectionEvents& events, async::TaskGroup& tasks)
    : executor_(std::move(executor)),
      options_(std::move(options)),
      events_(events),
      tasks_(tasks) {}

WorkerConnections::~WorkerConnections() {
  if (listener_ != nullptr) listener_->close();
}

Result<void> WorkerConnections::start() {
  TRY(watch_, ipc::LifeWatch::start([this](const ipc::Death& death) {
        asio::post(executor_, [this, death] { on_death(death); });
      }));
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

void WorkerConnections::close() {
  closing_ = true;
  listener_->close();
  const Error why(ErrorCode::kPeerLost, "the agent of this host stops");
  while (!clients_.empty()) {
    const auto client = clients_.begin()->second;
    drop(client, {why});
    client->close(why);
  }
}

void WorkerConnections::accept(rpc::Socket socket) {
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
  auto channel = ipc::Channel::adopt(std::move(fd), kMostResidentBlocks);
  if (!peer || !channel) {
    const Error why = !peer ? peer.error() : channel.error();
    log::warn("worker.refused", "error", why.message());
    if (!channel) return;
    (void)channel->push(error_frame(0, 0, why).SerializeAsString());
    // A fresh socket has room for it. If not, nobody waits.
    (void)channel->send_some(steady_now());
    return;
  }
  const ClientId id = ++last_client_;
  auto client = std::make_shared<Client>(executor_, id, std::move(*channel), std::move(*peer));
  clients_[id] = client;
  tasks_.spawn("worker.client", serve(std::move(client)));
  events_.on_arrival();
}

async::Task<void> WorkerConnections::serve(ClientPtr client) {
  co_await asio::this_coro::throw_if_cancelled(false);
  // This coroutine keeps the client for as long as the callback may run.
  const Error why = co_await client->run(
      [this, raw = client.get()](proto::WorkerFrame frame, std::vector<UniqueFd> descriptors) {
        on_frame(raw->shared_from_this(), std::move(frame), std::move(descriptors));
      });
  drop(client, {why});
}

// The connection is over, or the worker dead. Only the first call counts.
void WorkerConnections::drop(const ClientPtr& client, const Departure& departure) {
  if (clients_.erase(client->id()) == 0) return;
  watch_->remove(client->id());
  Departure told = departure;
  if (!told.unseen && told.why.code() == ErrorCode::kTimeout) told.unseen = options_.silence;
  // The end of its socket came first: it lived when the watch looked last.
  if (!told.unseen && told.why.code() == ErrorCode::kPeerLost) {
    told.unseen = ipc::kLifeLookInterval;
  }
  events_.on_departure(client, told);
}

void WorkerConnections::on_death(const ipc::Death& death) {
  const auto found = clients_.find(death.worker);
  if (found == clients_.end()) return;
  const ClientPtr client = found->second;
  const Error why(ErrorCode::kPeerLost, fmt::format("died (pid {}, seen by its {})", client->pid(),
                                                    to_string(death.sign)));
  log::warn("worker.died", "pid", client->pid(), "seen_by", to_string(death.sign));
  drop(client, {why, true, death.unseen});
  client->close(why);
}

void WorkerConnections::check(TimePoint now) {
  for (const auto& [id, client] : clients_) client->check(now, options_.silence);
}

void WorkerConnections::excuse(Duration pause) {
  for (const auto& [id, client] : clients_) client->excuse(pause);
}

void WorkerConnections::on_frame(const ClientPtr& client, proto::WorkerFrame frame,
                                 std::vector<UniqueFd> descriptors) {
  if (clients_.count(client->id()) == 0) return;
  if (frame.kind_case() == proto::WorkerFrame::kHello) {
    if (auto greeted = greet(client, frame); !greeted) {
      log::warn("worker.refused", "pid", client->pid(), "error", greeted.error().message());
      client->send(error_frame(frame.call(), 0, greeted.error()));
      client->close(greeted.error());
    }
    return;
  }
  if (!client->greeted) {
    client->send(error_frame(frame.call(), 0, Error(ErrorCode::kInvalid, "say hello first")));
    return client->close(Error(ErrorCode::kInvalid, "did not say hello"));
  }
  events_.on_call(client, std::move(frame), std::move(descriptors));
}

bool WorkerConnections::has(pid_t pid) const {
  return std::ranges::any_of(clients_, [pid](const auto& client) {
    return static_cast<pid_t>(client.second->pid()) == pid;
  });
}

namespace {

// The kernel has no number for a process of a PID namespace that this process does not see. What
// the worker says of itself takes its place, or else its connection.
std::string process_name(const Client& client, const proto::WorkerHello& hello) {
  if (client.pid() != 0) return fmt::format("pid-{}", client.pid());
  if (hello.pid_namespace() == 0) return fmt::format("client-{}", client.id());
  return fmt::format("pid-{}-of-{}", hello.pid(), hello.pid_namespace());
}

}  // namespace

Result<void> WorkerConnections::greet(const ClientPtr& client, const proto::WorkerFrame& frame) {
  const auto& hello = frame.hello();
  if (client->greeted) return fail(ErrorCode::kInvalid, "said hello twice");
  const auto conflict =
      protocol_conflict({fmt::format("the worker's library ({})", hello.software().substr(0, 64)),
                         hello.protocol_min(), hello.protocol_max()},
                        {fmt::format("its agent ({})", software_version()), kProtocol, kProtocol});
  if (conflict) return fail(ErrorCode::kInvalid, "{}", *conflict);
  TRY(auto page, ipc::LifePage::create());
  std::vector<UniqueFd> descriptors(1);
  TRY(descriptors.front(), duplicate(page->fd(), "share a life page"));
  client->greeted = true;
  client->process = process_name(*client, hello);
  TRY_VOID(watch_->add(client->id(), std::move(page), std::move(client->peer())));
  proto::AgentFrame answer;
  answer.set_call(frame.call());
  answer.set_descriptors(1);
  auto& greeting = *answer.mutable_hello();
  greeting.set_protocol(kProtocol);
  greeting.set_incarnation(options_.incarnation.to_bytes());
  greeting.set_client(client->id());
  greeting.set_ping_interval_ms(static_cast<std::uint32_t>(options_.ping_interval.count()));
  greeting.set_silence_ms(static_cast<std::uint32_t>(options_.silence.count()));
  greeting.set_keeps_residents(options_.keeps_residents);
  greeting.set_gives_orders(true);
  client->send(answer, std::move(descriptors));
  return {};
}

namespace {

ipc::FramedSocketOptions client_socket_options() {
  return {.max_queued_bytes = 8u << 20,  // beside one answer
          .at_end = Error(ErrorCode::kPeerLost, "closed its connection (it exited, or was killed)"),
          .not_reading = Error(ErrorCode::kPeerLost, "does not read what it is sent")};
}

}  // namespace

Client::Client(const boost::asio::any_io_executor& executor, ClientId id, ipc::Channel channel,
               ipc::Peer peer)
    : id_(id),
      peer_(std::move(peer)),
      pid_(static_cast<std::uint32_t>(peer_.pid)),
      uid_(peer_.uid),
      pidfd_(duplicate(peer_.pidfd.get(), "keep a pidfd").value_or(UniqueFd())),
      socket_(std::make_shared<ipc::FramedSocket>(executor, std::move(channel),
                                                  client_socket_options())) {}

Result<void> Client::kill() const {
  if (!pidfd_) {
    return fail(ErrorCode::kUnavailable,
                "process {} cannot be killed safely: there is no pidfd of it", pid_);
  }
  if (::syscall(SYS_pidfd_send_signal, pidfd_.get(), SIGKILL, nullptr, 0) == 0) return {};
  return fail_errno(errno, fmt::format("kill process {}", pid_));
}

Result<UniqueFd> Client::pidfd() const {
  if (pidfd_) return duplicate(pidfd_.get(), "keep a pidfd");
  return fail(
      ErrorCode::kUnavailable,
      "there is no pidfd of process {}, so its death would not be seen: the kernel is older "
      "than 6.5, or the process is in another PID namespace",
      pid_);
}

async::Task<Error> Client::run(OnFrame on_frame) {
  const auto self = shared_from_this();
  ipc::FramedSocket::OnFrame parse = [&on_frame](ipc::Frame frame) -> Result<void> {
    proto::WorkerFrame parsed;
    if (!parsed.ParseFromString(frame.body)) {
      return fail(ErrorCode::kInvalid, "sent a malformed frame of {} bytes", frame.body.size());
    }
    on_frame(std::move(parsed), std::move(frame.descriptors));
    return {};
  };
  co_return co_await socket_->run(std::move(parse));
}

void Client::send(const proto::AgentFrame& frame, std::vector<UniqueFd> descriptors) {
  send_encoded(frame.SerializeAsString(), std::move(descriptors));
}

void Client::send_encoded(std::string frame, std::vector<UniqueFd> descriptors) {
  auto sent = socket_->send(std::move(frame), std::move(descriptors));
  if (!sent) close(std::move(sent).error());
}

void Client::check(TimePoint now, std::chrono::milliseconds silence) {
  socket_->check(now);
  if (closed() || now - socket_->last_heard() < silence) return;
  close(Error(ErrorCode::kTimeout,
              fmt::format("has been silent for {} ms: it is stopped, or hangs", silence.count())));
}

}  // namespace rekindle::worker
