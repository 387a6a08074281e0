#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <google/protobuf/message_lite.h>

#include "proto/frame.pb.h"
#include "recovery/rpc/method_limits.h"
#include "recovery/trace/tracer.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/crypto/secret_memory.h"
#include "src/crypto/signing_key.h"

// Framed protobuf over TCP or unix sockets (docs/reference/wire.md): 4-byte length, 16 MiB cap
// checked before allocating, TLS where the ends have a secret or certificates, a signed hello from
// both ends, then calls with deadlines. Everything of one connection runs on one executor; all
// waits have deadlines.
namespace rekindle::rpc {

inline constexpr std::uint32_t kMaxFrameBytes = 16u << 20;
// A frame that has begun must end within this time.
inline constexpr std::chrono::milliseconds kFrameDeadline{5000};

class Credentials;

// The identity of this process, the same for all its connections.
struct Identity {
  proto::Role role = proto::ROLE_CLIENT;
  std::string node_id;
  // incarnation_of(key), where there is a key.
  Incarnation incarnation;
  // Made when the process starts, and known to it alone. It proves that a connection belongs to
  // this incarnation, and signs grants.
  std::shared_ptr<const crypto::SigningKey> key = {};
  // The first cluster secret when the process began; empty for none.
  crypto::Secret secret;
  // What it proves on TCP connections, and demands from peers. nullptr: nothing.
  std::shared_ptr<Credentials> credentials = {};
  // Returns the highest epoch of a coordinator that this process has heard of; may be empty.
  std::function<std::uint64_t()> epoch;
  // Receives the epoch of each accepted hello of an agent or a coordinator; may be empty.
  std::function<void(std::uint64_t epoch)> heard_epoch = {};
};

// Makes a key, and the incarnation of it.
Identity make_identity(proto::Role role, std::string node_id,
                       std::shared_ptr<Credentials> credentials = {});
// The incarnation of the process that has this key. Nobody else can prove to be it.
Incarnation incarnation_of(std::string_view public_key);

// How a peer has shown who it is.
enum class Proof : std::uint8_t { kNone, kLocalUser, kSecret, kCertificate };

// The process at the other end, from its hello.
struct Peer {
  proto::Role role = proto::ROLE_UNKNOWN;
  std::string node_id;
  Incarnation incarnation;
  std::uint64_t epoch = 0;
  // "10.0.0.3:51234" or "unix".
  std::string address;
  // The peer is on a unix socket and has our uid.
  bool local_user = false;
  Proof proof = Proof::kNone;
  // The names that the proof gives, the most specific first. Of a certificate its subject
  // alternative names: "spiffe://example.org/rekindle/agent/gpu-7", "dns:gpu-7.example.org". Of a
  // secret "secret:" and its key id. Of a local user "uid:1000". Empty without a proof.
  std::vector<std::string> principals = {};
  // The connection is encrypted.
  bool encrypted = false;
  // The key of its incarnation; "": a release before protocol 3.
  std::string public_key = {};
  // Of the call that is being served: the parent of the operations that it causes.
  trace::Context trace = {};
};

// Sends the events of a streaming call. Drops an event when the connection is slower than the
// events.
class EventSink {
 public:
  virtual ~EventSink() = default;
  virtual void send(const google::protobuf::MessageLite& body) = 0;
  // The caller has cancelled the call, or has gone.
  virtual bool cancelled() const = 0;
};

// Answers a call: parses the body, runs as a coroutine on the server's executor and returns the
// serialized response. methods.h has typed handlers.
using Handler = std::function<async::Task<Result<std::string>>(const Peer& peer, std::string body,
                                                               std::shared_ptr<EventSink> events)>;

// Answers at once, without waiting, events and cancellation. Costs a fraction of a coroutine.
using InstantHandler =
    std::function<Result<std::string>(const Peer& peer, const std::string& body)>;

// A quarter of the connections is for agents alone. Processes on the unix socket are not counted.
// A full server makes room for a peer with less than an equal part: the peer with most connections
// loses its quietest one without an open call.
struct ServerLimits {
  std::size_t max_connections = 4096;
  // Of one peer: of one address, and of one certificate. Connections of an address that have no
  // accepted hello make room for its next ones, and so do those without a request for
  // `quiet_before_drop`.
  std::size_t max_connections_per_peer = 1024;
  std::chrono::milliseconds quiet_before_drop{15000};
  std::size_t max_calls_per_connection = 64;
  std::chrono::milliseconds idle_timeout{60000};
};

// Decides which calls run; see method_rules.h.
class CallGuard;

class RpcServer {
 public:
  virtual ~RpcServer() = default;
  // Before listen(). `local_only`: only processes of our uid on a unix socket may call it.
  virtual void handle(proto::Method method, Handler handler, bool local_only = false) = 0;
  virtual void handle_at_once(proto::Method method, InstantHandler handler) = 0;
  // "host:port" or "[v6]:port"; port 0: any. Returns the address in use. kUnavailable: another
  // process uses the port.
  virtual Result<std::string> listen(const std::string& address) = 0;
  // In a directory of mode 0700 that we own. Replaces a dead socket file; a live one is an error.
  virtual Result<void> listen_unix(const std::string& path) = 0;
  // Before listen(). Called when a connection whose hello was accepted has ended.
  virtual void on_peer_closed(std::function<void(const Peer& peer)> callback) = 0;
  // Before listen(). Called when a call was answered. A call that its caller has cancelled counts,
  // too; calls of unknown methods do not.
  virtual void on_call_ended(
      std::function<void(proto::Method method, bool failed, Duration took)> callback) = 0;
  // Before listen(). Each call that belongs to a trace becomes a span. The tracer outlives the
  // server's close().
  virtual void trace_calls(trace::Tracer& tracer) = 0;
  // Before listen(). Asked about each call whose method needs a right or is audited. Without one
  // the roles alone decide. It outlives the server.
  virtual void guard_calls(CallGuard& guard) = 0;
  virtual std::size_t connection_count() const = 0;
  // Stops accepting, cancels handlers and waits until all have ended, at most until the deadline.
  virtual async::Task<void> close(std::chrono::milliseconds deadline) = 0;

  static std::unique_ptr<RpcServer> create(boost::asio::any_io_executor executor, Identity identity,
                                           ServerLimits limits = {});
};

// A connection for any number of calls at once. When it breaks, every open call ends with
// kPeerLost.
class RpcClient {
 public:
  virtual ~RpcClient() = default;
  virtual const Peer& peer() const = 0;
  virtual bool connected() const = 0;
  // kTimeout after `deadline`; the server is told to cancel. `on_event` is for streaming calls.
  // `parent`: the span that the call belongs to.
  virtual async::Task<Result<std::string>> call_raw(
      proto::Method method, std::string body, std::chrono::milliseconds deadline,
      std::function<void(std::string body)> on_event = {}, trace::Context parent = {}) = 0;
  virtual void close() = 0;

  // DNS, connect and hello together within `deadline`. `address`: "host:port" or "unix:/path".
  // kStale: another incarnation than `expected` answers. kDenied: the ends do not accept each
  // other, or the certificate of the server is for another role than `wanted`.
  static async::Task<Result<std::shared_ptr<RpcClient>>> connect(
      std::string address, Identity identity, std::chrono::milliseconds deadline,
      std::optional<Incarnation> expected = {}, proto::Role wanted = proto::ROLE_UNKNOWN);
};

// A body that has few bytes takes little memory (check_parsed_size).
template <typename Message>
Result<Message> parse_body(std::string_view body) {
  if (body.size() > kCheckParsedBytes) TRY_VOID(check_parsed_size(*Message::descriptor(), body));
  Message message;
  if (!message.ParseFromArray(body.data(), static_cast<int>(body.size()))) {
    return fail(ErrorCode::kInvalid, "malformed {} of {} bytes", message.GetTypeName(),
                body.size());
  }
  return message;
}

}  // namespace rekindle::rpc
