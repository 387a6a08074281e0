#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "transport/read_op.h"

namespace rekindle::transport {

// The thread that a path wants to be polled by: paths of the same name share one, near these CPUs.
struct PollerHome {
  std::string name;       // "mlx5_0"
  std::vector<int> cpus;  // empty: any
};

// One connected route to one peer over one transport. Owned and used by one poller thread; only
// wait_fd() and the destructor's contract matter to others.
class Path {
 public:
  // In-flight ops must be zero (abort, then poll until in_flight() == 0): the destructor asserts
  // it.
  virtual ~Path() = default;

  // Takes a prefix of `ops`, returns its length; 0 means full, poll first. Each op taken yields
  // exactly one Completion, also when the peer dies. After abort() or a broken connection:
  // kPeerLost.
  virtual Result<std::size_t> post(std::span<const ReadOp> ops) = 0;

  // Moves bytes, then fills a prefix of `out` with finished ops and returns its length. Never
  // blocks.
  virtual std::size_t poll(std::span<Completion> out) = 0;

  // Ends every op in flight as soon as nothing can touch its memory any more; keep polling until
  // all are reported (kAborted, or kOk for those that made it). Idempotent. The path is unusable
  // then.
  virtual void abort() = 0;

  virtual std::size_t in_flight() const = 0;
  // Payload bytes landed so far, partial ops included: progress deadlines look at this.
  virtual std::uint64_t bytes_landed() const = 0;
  // Readable (EPOLLIN) when poll() has something to do; -1 when the path must be polled.
  virtual int wait_fd() const = 0;
  // Before waiting for wait_fd(): false when poll() has news already.
  virtual bool arm() { return true; }
  // poll() has something to do by then, whatever wait_fd() says (a rate to be kept).
  virtual std::optional<TimePoint> wake_at() const { return std::nullopt; }
  // True when wait_fd() should be watched for EPOLLOUT, too (a request is stuck in the socket).
  virtual bool wants_write() const { return false; }

  virtual std::string_view transport() const = 0;  // "tcp", "shm", "verbs", "fake"
  virtual std::string describe() const = 0;  // "tcp 10.0.0.2:41234 -> 10.0.0.3:7401", for messages
  // Why it broke: "port down", "nobody answered 8 times"; "" while it has not, or nobody knows.
  virtual std::string why_broken() const { return {}; }
  // nullptr: any poller. Valid as long as the path.
  virtual const PollerHome* home() const { return nullptr; }
};

// Where and as whom to connect, out of a granted handshake over the agents' control connection.
struct PathTarget {
  std::string transport;    // which Connector
  std::string endpoint;     // transport-specific bytes that the peer's Server gave out
  SessionToken token;       // what the server knows this session by
  Incarnation incarnation;  // of the peer's process: another one answers kStale
};

using Paths = std::vector<std::unique_ptr<Path>>;

// A connection that takes a word with the peer's Server over the control connection.
class Handshake {
 public:
  virtual ~Handshake() = default;
  virtual const std::string& request() const = 0;  // for Server::accept() at the other end
  // Once. Blocks for at most a second: never call it on a poller or the control thread. What does
  // not work of it is left out, with why in the error when nothing does.
  virtual Result<Paths> finish(std::string_view response) = 0;
  // After it: what the peer offers now, for the next begin() of this session; "": as before.
  virtual const std::string& endpoint() const = 0;
};

// Makes paths; thread-safe. connect() blocks until `deadline` at most: never call it on a poller.
class Connector {
 public:
  virtual ~Connector() = default;
  virtual std::string_view transport() const = 0;
  virtual Result<std::unique_ptr<Path>> connect(const PathTarget& target, TimePoint deadline) = 0;
};

// Makes paths by a handshake instead; thread-safe.
class HandshakeConnector {
 public:
  virtual ~HandshakeConnector() = default;
  virtual std::string_view transport() const = 0;
  // Whether there is any use in asking a peer for an offer.
  virtual bool usable() const = 0;
  // Blocks for system calls only. `in_use`: homes of the paths to that peer that are alive; they
  // are not made again. kUnavailable: no rail here; kNotFound: nothing is missing.
  virtual Result<std::unique_ptr<Handshake>> begin(const PathTarget& target,
                                                   std::span<const std::string> in_use) = 0;
  // Memory that reads will land in, of any length: as long as the result lives, and longer than any
  // path that reads into it. Returns at once.
  virtual std::shared_ptr<const void> use_memory(std::span<std::byte> memory, int fd,
                                                 std::uint64_t fd_offset) = 0;
};

}  // namespace rekindle::transport
