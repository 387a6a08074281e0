#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/unique_fd.h"
#include "transport/registry.h"
#include "transport/tcp/data_tls.h"
#include "transport/tcp/sender.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/tcp/tcp_wire.h"

namespace rekindle::transport::tcp {

// The shared state of one session's streams: their number and their egress cap.
struct SessionShare {
  explicit SessionShare(std::uint64_t bytes_per_second) : limiter(bytes_per_second) {}
  RateLimiter limiter;
  std::size_t streams = 0;  // guarded by the table's mutex
};

// Sessions with open streams at this server. Thread-safe.
class SessionTable {
 public:
  explicit SessionTable(std::size_t max_streams) : max_streams_(max_streams) {}

  // Null: the session has as many streams as it may.
  std::shared_ptr<SessionShare> open_stream(const SessionToken& token,
                                            std::uint64_t bytes_per_second);
  void close_stream(const SessionToken& token);

 private:
  const std::size_t max_streams_;
  std::mutex mutex_;
  std::unordered_map<SessionToken, std::shared_ptr<SessionShare>> shares_;  // guarded by mutex_
};

// The shared state of all connections of a server. Thread-safe.
struct ServerContext {
  ServerContext(const ServerOptions& server_options, const SegmentRegistry& segment_registry,
                const Incarnation& own)
      : options(server_options),
        registry(segment_registry),
        incarnation(own),
        sessions(server_options.max_streams_per_session) {}

  const ServerOptions options;
  const SegmentRegistry& registry;
  const Incarnation incarnation;
  SessionTable sessions;
  std::atomic<std::uint64_t> connections = 0;
  std::atomic<std::uint64_t> accepted = 0;
  std::atomic<std::uint64_t> shed = 0;
  std::atomic<std::uint64_t> encrypted = 0;
  std::atomic<std::uint64_t> encrypted_by_kernel = 0;
  std::atomic<std::uint64_t> ops = 0;
  std::atomic<std::uint64_t> bytes_sent = 0;
  std::atomic<std::uint64_t> bytes_sent_encrypted = 0;
};

// The serving end of one stream: a hello, then requests that are answered in order. One thread uses
// it.
class ServerStream {
 public:
  enum class Progress {
    kIdle,       // waits for input
    kBlocked,    // waits for room in the socket
    kAgain,      // has more to do: its turn was over
    kThrottled,  // waits for its share of the rate, until resume_at()
    kClosed,     // to be destroyed
  };

  ServerStream(UniqueFd socket, ServerContext& context, TimePoint now);
  ~ServerStream();
  ServerStream(const ServerStream&) = delete;
  ServerStream& operator=(const ServerStream&) = delete;

  // Takes one turn. It is bounded in bytes and operations, so that no peer starves another.
  Progress step(TimePoint now);
  TimePoint resume_at() const { return resume_at_; }

  bool admitted() const { return share_ != nullptr; }
  const SessionToken& token() const { return token_; }
  TimePoint opened_at() const { return opened_at_; }
  bool stalled(TimePoint now) const;
  // Takes the session's present rate from the registry. False: the session is gone.
  bool refresh_session();
  int fd() const { return socket_.get(); }

 private:
  // What the stream waits for.
  enum class Stage { kBegin, kTls, kHello, kNonce, kProof, kRequests };

  // kAgain: the reader was admitted.
  Progress handshake();
  // Looks whether the reader begins with TLS.
  Progress begin();
  Progress shake_tls();
  // Each takes one part of the hello, in this order. kAgain: the next part is due.
  Progress read_hello();
  Progress read_nonce();
  Progress read_proof();
  Progress admit(std::uint64_t bytes_per_second);
  // kAgain: the first `bytes` of `in_` are here.
  Progress await(std::size_t bytes);
  Progress refuse(HelloStatus status);
  bool reply(HelloStatus status);
  bool send_whole(std::span<const std::byte> bytes);
  // Starts the next answer. False: no whole request is here, or the stream is broken.
  bool start_next_request();
  // Until `limit` bytes of `in_` are used, at most.
  bool receive(std::size_t limit);
  bool request_waiting() const { return in_used_ - in_begin_ >= kRequestBytes; }

  UniqueFd socket_;
  ServerContext& context_;
  const TimePoint opened_at_;
  TimePoint last_progress_;
  TimePoint resume_at_{};
  Stage stage_ = Stage::kBegin;
  std::unique_ptr<DataTls> tls_;  // null: plain
  SessionToken token_;
  HelloExchange exchange_;
  std::shared_ptr<SessionShare> share_;  // null before kRequests
  Sender sender_;                        // uses tls_
  bool closed_ = false;
  std::array<std::byte, 64 * kRequestBytes> in_;
  std::size_t in_begin_ = 0;
  std::size_t in_used_ = 0;
};

}  // namespace rekindle::transport::tcp
