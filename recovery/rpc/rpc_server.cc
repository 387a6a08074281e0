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
          shared(std::make_shared<ServerShared>(std::move(on), std::move(identity), limits)) {}

    void add_listener(UniqueFd fd, const std::string& unix_path);
    void on_accept(Socket socket, std::string address, const std::string& unix_path);
    bool drop_oldest_unknown(const char* why);
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

// Connections without a hello go first: they have shown no right to be here.
bool Server::Core::drop_oldest_unknown(const char* why) {
  const auto oldest = std::find_if(connections.begin(), connections.end(),
                                   [](const auto& connection) { return !connection->greeted(); });
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
