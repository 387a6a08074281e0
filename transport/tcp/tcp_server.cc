#include <algorithm>
#include <atomic>
#include <latch>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "transport/tcp/tcp_listener.h"
#include "transport/tcp/tcp_server_loop.h"
#include "transport/tcp/tcp_server_stream.h"
#include "transport/tcp/tcp_socket.h"
#include "transport/tcp/tcp_transport.h"

namespace rekindle::transport::tcp {
namespace {

std::size_t thread_count(std::size_t wanted) {
  if (wanted != 0) return wanted;
  return std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 8);
}

class TcpServerImpl final : public TcpServer {
 public:
  TcpServerImpl(const ServerOptions& options, const SegmentRegistry& registry,
                const Incarnation& incarnation, Listener listener)
      : context_(options, registry, incarnation), listener_(std::move(listener)) {}
  ~TcpServerImpl() override {
    for (auto& loop : loops_) loop->stop();
  }

  Result<void> start() {
    const std::size_t threads = thread_count(context_.options.threads);
    const std::size_t pending =
        std::max<std::size_t>(context_.options.max_pending_hellos / threads, 1);
    for (std::size_t i = 0; i < threads; ++i) {
      loops_.push_back(std::make_unique<ServerLoop>(context_, pending));
    }
    // The listening loop starts last, as it deals connections to the others.
    for (std::size_t i = threads; i-- > 0;) {
      Listener* listener = i == 0 ? &listener_ : nullptr;
      TRY_VOID(loops_[i]->start(static_cast<int>(i), listener, [this](UniqueFd socket) {
        loops_[next_loop_++ % loops_.size()]->adopt(std::move(socket));
      }));
    }
    return {};
  }

  std::string endpoint(std::string_view host) const override {
    return format_endpoint(host, listener_.port());
  }
  std::uint16_t port() const override { return listener_.port(); }

  void drop_session(const SessionToken& token) override {
    std::latch done(static_cast<std::ptrdiff_t>(loops_.size()));
    for (auto& loop : loops_) loop->drop_session(token, done);
    // This is short: loops never block, and a turn is at most a megabyte per connection.
    done.wait();
  }

  ServerStats stats() const override {
    return {.connections = context_.connections,
            .accepted = context_.accepted,
            .shed = context_.shed,
            .ops = context_.ops,
            .bytes_sent = context_.bytes_sent};
  }

 private:
  ServerContext context_;
  Listener listener_;
  std::vector<std::unique_ptr<ServerLoop>> loops_;
  std::size_t next_loop_ = 0;  // used by the listening thread
};

}  // namespace

Result<std::unique_ptr<TcpServer>> TcpServer::create(const ServerOptions& options,
                                                     const SegmentRegistry& registry,
                                                     const Incarnation& incarnation) {
  TRY(Listener listener, Listener::bind(options.listen_host, options.port));
  auto server =
      std::make_unique<TcpServerImpl>(options, registry, incarnation, std::move(listener));
  TRY_VOID(server->start());
  return server;
}

}  // namespace rekindle::transport::tcp
