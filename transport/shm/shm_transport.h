#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "transport/path.h"
#include "transport/registry.h"

// Reads from a process on the same host. The source hands out read-only descriptors of its segments
// over a unix socket. The reader maps them and copies with threads of its own, one per path. The
// bytes never pass through the source, which may even be stopped.
//
// The socket is abstract: it works across mount namespaces (containers) of one network namespace.
// Both ends must have the same uid. A region without a file cannot be read this way (kFault).
namespace rekindle::transport::shm {

struct ServerOptions {
  std::size_t max_connections = 1024;
  std::chrono::milliseconds hello_timeout{5000};
  // How long drop_session() waits for a reader to let go. A mapping cannot be taken away: a stopped
  // reader keeps its (immutable) pages until it runs again or dies.
  std::chrono::milliseconds drop_timeout{1000};
};

class ShmServer : public Server {
 public:
  // `registry` outlives the server.
  static Result<std::unique_ptr<ShmServer>> create(const ServerOptions& options,
                                                   const SegmentRegistry& registry,
                                                   const Incarnation& incarnation);
  std::string_view transport() const override { return "shm"; }
};

// The format of ShmServer::endpoint(): the host and the socket.
struct Endpoint {
  std::string boot_id;  // of the running kernel
  std::string socket_name;

  std::string to_string() const;
  static Result<Endpoint> parse(std::string_view text);
};
Result<std::string> host_boot_id();

class ShmPath : public Path {
 public:
  std::string_view transport() const override { return "shm"; }
  // The region itself, for consumers that need no copy. It is valid as long as this path. Blocks
  // for one exchange with the peer. The bytes of a truncated file fault on access: use
  // src/store/fault_guard.h.
  virtual Result<std::span<const std::byte>> map(RegionKey key, TimePoint deadline) = 0;
};

// connect(): kUnavailable when the peer is not on this host (or not in this network namespace),
// kDenied, kStale, kTimeout. Paths are ShmPaths.
std::unique_ptr<Connector> make_connector();

}  // namespace rekindle::transport::shm
