#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <google/protobuf/message_lite.h>

#include "proto/frame.pb.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"

// Framed protobuf over TCP or unix sockets (docs/reference/wire.md): 4-byte length, 16 MiB cap
// checked before allocating, a hello from both ends (and an HMAC challenge when a cluster secret is
// set), then calls with deadlines. Everything of one connection runs on one executor; all waits
// have deadlines.
namespace rekindle::rpc {

inline constexpr std::uint32_t kMaxFrameBytes = 16u << 20;
inline constexpr std::chrono::milliseconds kFrameDeadline{5000};  // a frame that has begun must end

// Who this process is; the same for all its connections.
struct Identity {
  proto::Role role = proto::ROLE_CLIENT;
  std::string node_id;
  Incarnation incarnation;
  std::string secret;                    // cluster secret; "" = none
  std::function<std::uint64_t()> epoch;  // highest coordinator epoch seen; may be empty
  // Told the epoch of each hello that was accepted; may be empty.
  std::function<void(std::uint64_t epoch)> heard_epoch = {};
};

// Who is at the other end, from its hello.
struct Peer {
  proto::Role role = proto::ROLE_UNKNOWN;
  std::string node_id;
  Incarnation incarnation;
  std::uint64_t epoch = 0;
  std::string address;      // "10.0.0.3:51234" or "unix"
  bool local_user = false;  // a unix socket whose peer has our uid
};

// Sends an Event of a streaming call; drops it when the connection is slower than the events.
class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void send(const google::protobuf::MessageLite& body) = 0;
  virtual bool cancelled() const = 0;  // caller went away or cancelled
};

// Serves calls. A handler parses its body itself (see parse_body), runs as a coroutine on the
// server's executor and returns the serialized response.
using Handler = std::function<async::Task<Result<std::string>>(const Peer& peer, std::string body,
                                                               std::shared_ptr<EventSink> events)>;

// Has its answer at once: no waiting, no events, nothing to cancel. Costs a fraction of a
// coroutine.
using InstantHandler =
    std::function<Result<std::string>(const Peer& peer, const std::string& body)>;

struct ServerLimits {
  std::size_t max_connections = 4096;
  std::size_t max_calls_per_connection = 64;
  std::chrono::milliseconds idle_timeout{60000};
};

class RpcServer {
 public:
  virtual ~RpcServer() = default;
  // Before listen(). allowed: roles that may call it (0 = any); local_only: unix socket of our uid.
  virtual void handle(proto::Method method, Handler handler, bool local_only = false) = 0;
  virtual void handle_at_once(proto::Method method, InstantHandler handler) = 0;
  // "host:port", "[v6]:port", port 0 = any; returns the address in use. kUnavailable names a port
  // in use.
  virtual Result<std::string> listen(const std::string& address) = 0;
  // In a directory of mode 0700 that we own; a dead socket file is replaced, a live one is an
  // error.
  virtual Result<void> listen_unix(const std::string& path) = 0;
  // Before listen(). Called when a connection whose hello was accepted has ended.
  virtual void on_peer_closed(std::function<void(const Peer& peer)> callback) = 0;
  virtual std::size_t connection_count() const = 0;
  // Stops accepting, cancels handlers, waits until all have ended (bounded by deadline).
  virtual async::Task<void> close(std::chrono::milliseconds deadline) = 0;

  static std::unique_ptr<RpcServer> create(boost::asio::any_io_executor executor, Identity identity,
                                           ServerLimits limits = {});
};

// A connection that makes calls; multiplexes. When it breaks every open call ends with kPeerLost.
class RpcClient {
 public:
  virtual ~RpcClient() = default;
  virtual const Peer& peer() const = 0;
  virtual bool connected() const = 0;
  // kTimeout after `deadline` (the server is told to cancel). on_event: for streaming calls.
  virtual async::Task<Result<std::string>> call_raw(
      proto::Method method, std::string body, std::chrono::milliseconds deadline,
      std::function<void(std::string body)> on_event = {}) = 0;
  virtual void close() = 0;

  // DNS, connect and hello together within `deadline`. `expected`: kStale when another incarnation
  // answers. address: "host:port" or "unix:/path".
  static async::Task<Result<std::shared_ptr<RpcClient>>> connect(
      std::string address, Identity identity, std::chrono::milliseconds deadline,
      std::optional<Incarnation> expected = {});
};

template <typename Message>
Result<Message> parse_body(std::string_view body) {
  Message message;
  if (!message.ParseFromArray(body.data(), static_cast<int>(body.size()))) {
    return fail(ErrorCode::kInvalid, "malformed {} of {} bytes", message.GetTypeName(),
                body.size());
  }
  return message;
}

template <typename Response, typename Request>
async::Task<Result<Response>> call(std::shared_ptr<RpcClient> client, proto::Method method,
                                   Request request, std::chrono::milliseconds deadline) {
  CO_TRY(const std::string body,
         co_await client->call_raw(method, request.SerializeAsString(), deadline));
  co_return parse_body<Response>(body);
}

}  // namespace rekindle::rpc
