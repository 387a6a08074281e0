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
#include "transport/types.h"

namespace rekindle::transport {

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
  // True when wait_fd() should be watched for EPOLLOUT, too (a request is stuck in the socket).
  virtual bool wants_write() const { return false; }

  virtual std::string_view transport() const = 0;  // "tcp", "shm", "verbs", "fake"
  virtual std::string describe() const = 0;  // "tcp 10.0.0.2:41234 -> 10.0.0.3:7401", for messages
};

// Where and as whom to connect, out of a granted handshake over the agents' control connection.
struct PathTarget {
  std::string transport;    // which Connector
  std::string endpoint;     // transport-specific bytes that the peer's Server gave out
  SessionToken token;       // what the server knows this session by
  Incarnation incarnation;  // of the peer's process: another one answers kStale
};

// Makes paths; thread-safe. connect() blocks until `deadline` at most: never call it on a poller.
class Connector {
 public:
  virtual ~Connector() = default;
  virtual std::string_view transport() const = 0;
  virtual Result<std::unique_ptr<Path>> connect(const PathTarget& target, TimePoint deadline) = 0;
};

}  // namespace rekindle::transport
