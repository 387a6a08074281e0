#include <algorithm>
#include <list>
#include <utility>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/rpc/address.h"
#include "recovery/rpc/rpc.h"
#include "recovery/rpc/rpc_listener.h"
#include "recovery/rpc/rpc_server_connection.h"
#include "src/base/log.h"

namespace rekindle::rpc {

namespace asio = boost::asio;

namespace {

class Server final : public RpcServer {
 public:
  Server(asio::any_io_executor executor, Identity identity, ServerLimits limits)
      : core_(std::make_shared<Core>(std::move(executor), std::move(identity), limits)) {}
  ~Server() override {
    core_->stop();
    // Connections may end after the objects that the callback captured.
    core_->shared->on_peer_closed = {};
    core_->shared->on_call_ended = {};
    core_->shared->tracer = nullptr;
    core_->shared->guard = nullptr;
  }

  void handle(proto::Method method, Handler handler, bool local_only) override {
    core_->shared->methods[static_cast<std::uint32_t>(method)] = {
        std::move(handler), {}, local_only};
  }
  void handle_at_once(proto::Method method, InstantHandler handler) override {
    core_->shared->methods[static_cast<std::uint32_t>(method)] = {{}, std::move(handler), false};
  }
  void on_peer_closed(std::function<void(const Peer&)> callback) override {
    core_->shared->on_peer_closed = std::move(callback);
  }
  void on_call_ended(std::function<void(proto::Method, bool, Duration)> callback) override {
    core_->shared->on_call_ended = std::move(callback);
  }
  void trace_calls(trace::Tracer& tracer) override { core_->shared->tracer = &tracer; }
  void guard_calls(CallGuard& guard) override { core_->shared->guard = &guard; }
  Result<std::string> listen(const std::string& address) override {
    std::string bound;
    TRY(UniqueFd fd, listen_tcp(address, bound));
    core_->add_listener(std::move(fd), "");
    return bound;
  }
  Result<void> listen_unix(const std::string& path) override {
    TRY(UniqueFd fd, listen_unix_socket(path));
    core_->add_listener(std::move(fd), path);
    return {};
  }
  std::size_t connection_count() const override { return core_->connections.size(); }
  async::Task<void> close(std::chrono::milliseconds deadline) override {
    const auto core = core_;
    core->stop();
    const bool ended = co_await core->shared->tasks.close(deadline);
    if (!ended) log::warn("rpc.close_late", "still_running", core->shared->tasks.size());
  }

 private:
  // Outlives the Server while its coroutines end.
  struct Core : std::enable_shared_from_this<Core> {
    Core(asio::any_io_executor on, Identity identity, ServerLimits limits)
        : executor(on),
          shared(std::make_shared<ServerShared>(std::move(on), std::move(identity), limits)) {
      shared->admit = [this](const Peer& peer) { return admit(peer); };
    }
    ~Core() { shared->admit = {}; }

    void add_listener(UniqueFd fd, const std::string& unix_path);
    void on_accept(Socket socket, std::string address, const std::string& unix_path);
    // Has this address room for one more? Drops its oldest unknown one where that helps.
    Result<void> make_room_of(const std::string& host);
    // The connection of `peer` is about to be accepted.
    Result<void> admit(const Peer& peer) const;
    // `host`: of this address only. Empty: of any.
    bool drop_oldest_unknown(const char* why, std::string_view host = {});
    void stop();

    asio::any_io_executor executor;
    std::shared_ptr<ServerShared> shared;
    std::list<std::shared_ptr<Listener>> listeners;
    // The oldest first.
    std::list<std::shared_ptr<ServerConnection>> connections;
    bool stopped = false;
  };

  std::shared_ptr<Core> core_;
};

void Server::Core::add_listener(UniqueFd fd, const std::string& unix_path) {
  const auto weak = weak_from_this();
  auto listener = std::make_shared<Listener>(
      executor, std::move(fd), unix_path,
      [weak, unix_path](Socket socket, std::string address) {
        if (const auto core = weak.lock()) {
          core->on_accept(std::move(socket), std::move(address), unix_path);
        }
      },
      [weak] {
        if (const auto core = weak.lock()) core->drop_oldest_unknown("out of descriptors");
      });
  listener->start();
  listeners.push_back(std::move(listener));
}

void Server::Core::on_accept(Socket socket, std::string address, const std::string& unix_path) {
  auto connection =
      std::make_shared<ServerConnection>(shared, std::move(socket), std::move(address), unix_path);
  if (stopped) return connection->close({ErrorCode::kUnavailable, "shutting down"});
  if (!connection->is_unix()) {
    if (const auto room = make_room_of(connection->host()); !room) {
      return connection->refuse_now(room.error());
    }
  }
  if (connections.size() >= shared->limits.max_connections &&
      !drop_oldest_unknown("over the connection cap")) {
    return connection->refuse_now(
        {ErrorCode::kExhausted,
         fmt::format("this server has its {} connections; try again later", connections.size())});
  }
  connections.push_back(connection);
  shared->tasks.spawn("rpc.connection",
                      ServerConnection::serve(connection, [weak = weak_from_this(), connection] {
                        if (const auto core = weak.lock()) core->connections.remove(connection);
                      }));
}

Result<void> Server::Core::make_room_of(const std::string& host) {
  // Peers with certificates have budgets of their own. Many of them may come through one translator
  // of addresses.
  const auto of_host = std::ranges::count_if(connections, [&](const auto& connection) {
    return connection->host() == host &&
           (!connection->greeted() || connection->budget_key() == host);
  });
  if (static_cast<std::size_t>(of_host) < shared->limits.max_connections_per_peer) return {};
  if (drop_oldest_unknown("over the connections of one address", host)) return {};
  return fail(ErrorCode::kExhausted,
              "{} has {} connections to this server, as many as one address may have; close some",
              host, of_host);
}

Result<void> Server::Core::admit(const Peer& peer) const {
  if (peer.local_user) return {};
  const ServerLimits& limits = shared->limits;
  const std::string key = rpc::budget_key(peer);
  std::size_t same = 0;
  std::size_t others_than_agents = 0;
  for (const auto& connection : connections) {
    if (!connection->greeted() || connection->is_unix()) continue;
    if (connection->peer().role != proto::ROLE_AGENT) ++others_than_agents;
    if (connection->budget_key() == key) ++same;
  }
  if (same >= limits.max_connections_per_peer) {
    return fail(ErrorCode::kExhausted,
                "{} has {} connections to this server, as many as one peer may have; close some",
                key, same);
  }
  const std::size_t for_others = limits.max_connections - limits.max_connections / 4;
  if (peer.role != proto::ROLE_AGENT && others_than_agents >= for_others) {
    return fail(ErrorCode::kExhausted,
                "this server has {} connections of pullers and commands, and keeps the others for "
                "agents; try again later",
                others_than_agents);
  }
  return {};
}

// Connections without a hello go first: they have shown no right to be here.
bool Server::Core::drop_oldest_unknown(const char* why, std::string_view host) {
  const auto oldest =
      std::find_if(connections.begin(), connections.end(), [&](const auto& connection) {
        return !connection->greeted() && (host.empty() || connection->host() == host);
      });
  if (oldest == connections.end()) return false;
  const auto dropped = *oldest;
  connections.erase(oldest);
  dropped->refuse_now({ErrorCode::kExhausted, why});
  return true;
}

void Server::Core::stop() {
  stopped = true;
  for (const auto& listener : listeners) listener->close();
  listeners.clear();
  const auto open = connections;
  for (const auto& connection : open) {
    connection->cancel_calls();
    connection->close({ErrorCode::kUnavailable, "shutting down"});
  }
}

}  // namespace

std::unique_ptr<RpcServer> RpcServer::create(asio::any_io_executor executor, Identity identity,
                                             ServerLimits limits) {
  return std::make_unique<Server>(std::move(executor), std::move(identity), limits);
}

}  // namespace rekindle::rpc
