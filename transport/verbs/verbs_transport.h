#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "transport/path.h"
#include "transport/registry.h"
#include "transport/verbs/device/fabric.h"
#include "transport/verbs/memory/memory_registrar.h"

// The two ends of the RDMA transport (docs/internals/verbs.md).
namespace rekindle::transport::verbs {

struct VerbsServerOptions {
  std::size_t max_queue_pairs = 8;  // per link
  std::size_t max_links_per_session = 64;
  // Links of one session between the same two rails. A further one ends the oldest, which nobody
  // uses any more.
  std::size_t max_links_per_rail_pair = 4;
  // A handshake waits this long for regions that are being registered. Then the puller is told to
  // come again, and uses another transport meanwhile.
  std::chrono::milliseconds registration_patience{200};
  // The staging window, registered at start with each device. It serves regions that cannot be
  // registered whole. 0: no window.
  std::uint64_t staging_bytes = 8 << 20;
  // The blocks of a link that was idle for this long may be lent to another.
  std::chrono::milliseconds staging_idle_limit{10'000};
};

class VerbsServer : public Server {
 public:
  // The arguments outlive the server. It registers the registry's regions in the background from
  // now on.
  static std::unique_ptr<VerbsServer> create(Fabric& fabric, MemoryRegistrar& registrar,
                                             SegmentRegistry& registry,
                                             const Incarnation& incarnation,
                                             const VerbsServerOptions& options);
  std::string_view transport() const override { return "verbs"; }
  // Why some regions are not wholly registered: the bytes needed, the limit, and the remedy.
  virtual std::vector<Error> registration_problems() const = 0;
  virtual std::size_t link_count() const = 0;
};

struct VerbsConnectorOptions {
  std::size_t queue_pairs = 2;  // per link
  std::uint32_t send_depth = 128;
  std::uint32_t request_bytes = 1 << 20;  // per work request at most
  std::uint64_t bounce_bytes = 8 << 20;   // per device
  // For the first read over a new link.
  std::chrono::milliseconds probe_deadline{500};
};

// Both outlive the connector, which outlives its paths.
std::unique_ptr<HandshakeConnector> make_connector(Fabric& fabric, MemoryRegistrar& registrar,
                                                   const VerbsConnectorOptions& options);

}  // namespace rekindle::transport::verbs
