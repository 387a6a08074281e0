#include <algorithm>
#include <list>
#include <map>
#include <numeric>
#include <utility>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/rpc/address.h"
#include "recovery/rpc/rpc.h"
#include "recovery/rpc/rpc_listener.h"
#include "recovery/rpc/rpc_server_connection.h"
#include "src/base/fair_places.h"
#include "src/base/log.h"

namespace rekindle::rpc {

namespace asio = boost::asio;

namespace {

// How many connections there are by a name. A place counts while it lives.
class Places {
 public:
  std::size_t of(const std::string& name) const {
    const auto found = taken_->find(name);
    return found == taken_->end() ? 0 : found->second;
  }
  std::size_t all() const {
    return std::accumulate(taken_->begin(), taken_->end(), std::size_t{0},
                           [](std::size_t sum, const auto& entry) { return sum + entry.second; });
  }
  // The name that has most.
  std::string largest() const {
    const auto found = std::ranges::max_element(*taken_, {}, &PlacesTaken::value_type::second);
    return found == taken_->end() ? std::string() : found->first;
  }
  const PlacesTaken& taken() const { return *taken_; }
  std::shared_ptr<const void> take(const std::string& name) {
    ++(*taken_)[name];
    return {taken_.get(), [taken = taken_, name](const void*) {
              if (--(*taken)[name] == 0) taken->erase(name);
            }};
  }

 private:
  std::shared_ptr<PlacesTaken> taken_ = std::make_shared<PlacesTaken>();
};

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
    // Has this address room for one more? Drops its oldest unknown one, or its quietest, where that
    // helps.
    Result<void> make_room_of(const std::string& host);
    // The connection of `peer` is about to be accepted.
    Result<std::shared_ptr<const void>> admit(const Peer& peer);
    // `host`: of this address only. Empty: of any.
    bool drop_oldest_unknown(const char* why, std::string_view host = {});
    // Makes room for one more of `newcomer`, who has less than an equal part of `most` places.
    bool make_room_for(const std::string& newcomer, std::size_t most, const Places& places);
    // Ends the connection of `peer` that has been quiet for longest, of those without an open call.
    bool drop_quietest(const std::string& peer, bool agents_too, std::chrono::milliseconds quiet);
    void stop();

    asio::any_io_executor executor;
    std::shared_ptr<ServerShared> shared;
    std::list<std::shared_ptr<Listener>> listeners;
    // The oldest first.
    std::map<std::uint64_t, std::shared_ptr<ServerConnection>> connections;
    std::uint64_t next_connection = 1;
    // All that came by TCP, by address. Peers with certificates have budgets of their own: many of
    // them may come through one translator of addresses.
    Places of_host;
    // Those that have shown a right to be here, by budget_key().
    Places of_peer;
    // Of these, those of pullers and commands.
    Places of_others;
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
  const std::size_t most = shared->limits.max_connections;
  if (connections.size() >= most && !drop_oldest_unknown("over the connection cap") &&
      !make_room_for(connection->host(), most, of_peer)) {
    return connection->refuse_now(
        {ErrorCode::kExhausted,
         fmt::format("this server has its {} connections; try again later", connections.size())});
  }
  const std::uint64_t number = next_connection++;
  connections.emplace(number, connection);
  if (!connection->is_unix()) connection->hold(of_host.take(connection->host()));
  shared->tasks.spawn("rpc.connection",
                      ServerConnection::serve(connection, [weak = weak_from_this(), number] {
                        if (const auto core = weak.lock()) core->connections.erase(number);
                      }));
}

Result<void> Server::Core::make_room_of(const std::string& host) {
  const std::size_t same = of_host.of(host);
  if (same < shared->limits.max_connections_per_peer) return {};
  if (drop_oldest_unknown("over the connections of one address", host) ||
      drop_quietest(host, /*agents_too=*/true, shared->limits.quiet_before_drop)) {
    return {};
  }
  return fail(ErrorCode::kExhausted,
              "{} has {} connections to this server, as many as one address may have; close some",
              host, same);
}

Result<std::shared_ptr<const void>> Server::Core::admit(const Peer& peer) {
  if (peer.local_user) return nullptr;
  const ServerLimits& limits = shared->limits;
  const std::string key = rpc::budget_key(peer);
  const std::size_t same = of_peer.of(key);
  if (same >= limits.max_connections_per_peer &&
      !drop_quietest(key, /*agents_too=*/true, limits.quiet_before_drop)) {
    return fail(ErrorCode::kExhausted,
                "{} has {} connections to this server, as many as one peer may have; close some",
                key, same);
  }
  const std::size_t for_others = limits.max_connections - limits.max_connections / 4;
  const bool is_agent = peer.role == proto::ROLE_AGENT;
  if (!is_agent && of_others.all() >= for_others && !make_room_for(key, for_others, of_others)) {
    return fail(ErrorCode::kExhausted,
                "this server has {} connections of pullers and commands, and keeps the others for "
                "agents; try again later",
                of_others.all());
  }
  auto places = std::make_pair(of_peer.take(key), is_agent ? nullptr : of_others.take(key));
  return std::make_shared<decltype(places)>(std::move(places));
}

// Connections without a hello go first: they have shown no right to be here.
bool Server::Core::drop_oldest_unknown(const char* why, std::string_view host) {
  const auto oldest = std::ranges::find_if(connections, [&](const auto& entry) {
    const ServerConnection& connection = *entry.second;
    return !connection.greeted() && (host.empty() || connection.host() == host);
  });
  if (oldest == connections.end()) return false;
  const auto dropped = oldest->second;
  connections.erase(oldest);
  dropped->refuse_now({ErrorCode::kExhausted, why});
  return true;
}

bool Server::Core::make_room_for(const std::string& newcomer, std::size_t most,
                                 const Places& places) {
  if (places_left(most, places.taken(), newcomer) == 0) return false;
  const bool agents_too = &places == &of_peer;
  return drop_quietest(places.largest(), agents_too, std::chrono::milliseconds(0));
}

bool Server::Core::drop_quietest(const std::string& peer, bool agents_too,
                                 std::chrono::milliseconds quiet) {
  const TimePoint latest = steady_now() - quiet;
  auto quietest = connections.end();
  TimePoint since = TimePoint::max();
  for (auto it = connections.begin(); it != connections.end(); ++it) {
    const ServerConnection& connection = *it->second;
    if (!connection.greeted() || connection.budget_key() != peer) continue;
    if (!agents_too && connection.peer().role == proto::ROLE_AGENT) continue;
    const auto quiet_since = connection.quiet_since();
    if (!quiet_since || *quiet_since > latest || *quiet_since >= since) continue;
    quietest = it;
    since = *quiet_since;
  }
  if (quietest == connections.end()) return false;
  const auto dropped = quietest->second;
  connections.erase(quietest);
  dropped->make_way({ErrorCode::kExhausted, "quiet, and the server needs room; connect again"});
  return true;
}

void Server::Core::stop() {
  stopped = true;
  for (const auto& listener : listeners) listener->close();
  listeners.clear();
  const auto open = connections;
  for (const auto& [number, connection] : open) {
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
