#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "transport/path.h"
#include "transport/registry.h"

// Reads over TCP. Streams are striped; the server sends straight from the segment, and the client
// receives straight into the destination. docs/reference/wire-tcp.md has the format.
namespace rekindle::transport::tcp {

struct ServerOptions {
  // The address to listen on. Empty: every address, IPv6 and IPv4. Port 0: the kernel chooses.
  std::string listen_host;
  std::uint16_t port = 0;
  // The congestion control of its connections, such as "cubic". Empty: the host's.
  std::string congestion;
  std::size_t threads = 0;  // 0: as many as cores, at most 8
  std::size_t max_connections = 4096;
  // Connections without a hello, over all threads. Beyond that the oldest ones are closed.
  std::size_t max_pending_hellos = 256;
  std::size_t max_streams_per_session = 64;
  std::chrono::milliseconds hello_timeout{5000};
  // Streams without TLS are refused.
  bool require_encryption = false;
  // A peer is dropped when it takes no byte for this long while an answer waits for it.
  std::chrono::milliseconds stall_timeout{30'000};
};

struct ServerStats {
  std::uint64_t connections = 0;  // open now
  std::uint64_t accepted = 0;
  std::uint64_t shed = 0;  // closed at once: caps, no descriptors, no hello
  // Streams with TLS so far, and those of them whose records the kernel makes.
  std::uint64_t encrypted = 0;
  std::uint64_t encrypted_by_kernel = 0;
  std::uint64_t ops = 0;
  // Payload bytes: those over TLS, and all.
  std::uint64_t bytes_sent_encrypted = 0;
  std::uint64_t bytes_sent = 0;
};

class TcpServer : public Server {
 public:
  // kInvalid: no such congestion control. kUnavailable: the address is in use; the message names
  // it. `registry` outlives the server.
  static Result<std::unique_ptr<TcpServer>> create(const ServerOptions& options,
                                                   const SegmentRegistry& registry,
                                                   const Incarnation& incarnation);
  std::string_view transport() const override { return "tcp"; }
  virtual std::uint16_t port() const = 0;
  virtual ServerStats stats() const = 0;
};

// The congestion control that new sockets of this host have; "" where the kernel has no answer.
std::string host_congestion_control();
// kInvalid: this host cannot use `name`; the message lists what it can. "" is always good.
Result<void> check_congestion_control(const std::string& name);

// Endpoints are "HOST:PORT". connect(): kPeerLost (refused, closed), kTimeout, kDenied, kStale,
// kUnavailable (too many streams), kNotFound (name), kInvalid (`congestion`, as for ServerOptions,
// cannot be used).
enum class Encryption { kWhereDemanded, kAlways };
std::unique_ptr<Connector> make_connector(std::string congestion = {},
                                          Encryption encryption = Encryption::kWhereDemanded);

}  // namespace rekindle::transport::tcp
