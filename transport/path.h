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
#include "src/base/memory_life.h"
#include "src/base/result.h"
#include "transport/read_op.h"

namespace rekindle::transport {

// The poller thread of a path. Paths whose homes have the same name share one thread, which runs
// near these CPUs.
struct PollerHome {
  std::string name;       // "mlx5_0"
  std::vector<int> cpus;  // empty: any
};

// One connected route to one peer over one transport. One poller thread owns and uses it.
class Path {
 public:
  // No op may be in flight: call abort(), then poll() until in_flight() is 0. The destructor
  // asserts it.
  virtual ~Path() = default;

  // Takes a prefix of `ops` and returns its length. 0: the path is full, poll first. Each op taken
  // yields exactly one Completion, also when the peer dies. kPeerLost: the path was aborted, or its
  // connection broke.
  virtual Result<std::size_t> post(std::span<const ReadOp> ops) = 0;

  // Moves bytes, then fills a prefix of `out` with finished ops and returns its length. Never
  // blocks.
  virtual std::size_t poll(std::span<Completion> out) = 0;

  // Ends every op in flight as soon as nothing can touch its memory any more. Keep polling until
  // all are reported: kAborted, or kOk for those that have landed. The path is unusable from then
  // on. Idempotent.
  virtual void abort() = 0;

  virtual std::size_t in_flight() const = 0;
  // Payload bytes landed so far, partial ops included: progress deadlines look at this.
  virtual std::uint64_t bytes_landed() const = 0;
  // Readable (EPOLLIN) when poll() has something to do; -1 when the path must be polled.
  virtual int wait_fd() const = 0;
  // Call this before waiting for wait_fd(). False: poll() has something to report already.
  virtual bool arm() { return true; }
  // poll() is due by then even if wait_fd() is quiet, for example because of a rate.
  virtual std::optional<TimePoint> wake_at() const { return std::nullopt; }
  // True while a request is stuck in the socket: wait_fd() is to be watched for EPOLLOUT, too.
  virtual bool wants_write() const { return false; }

  virtual std::string_view transport() const = 0;  // "tcp", "tcp+tls", "shm", "verbs", "fake"
  virtual std::string describe() const = 0;  // "tcp 10.0.0.2:41234 -> 10.0.0.3:7401", for messages
  // Why the path broke: "port down", "nobody answered 8 times". Empty while it works, or if the
  // reason is unknown.
  virtual std::string why_broken() const { return {}; }
  // nullptr: any poller will do. The result is valid as long as the path.
  virtual const PollerHome* home() const { return nullptr; }
};

// Where to connect, and with which rights. The agents agreed on it over their control connection.
struct PathTarget {
  // Selects the Connector.
  std::string transport;
  // Bytes that the peer's Server gave out; each transport has its own format.
  std::string endpoint;
  // Gives the rights of the session to whoever knows it.
  SessionToken token;
  // The peer's process. Another incarnation answers kStale.
  Incarnation incarnation;
  // The peer is of a release before protocol 3: streams send it the token, and prove nothing.
  bool sends_token = false;
};

using Paths = std::vector<std::unique_ptr<Path>>;

// The connecting of paths that need an exchange with the peer's Server over the control connection.
class Handshake {
 public:
  virtual ~Handshake() = default;
  // The input of Server::accept() at the other end.
  virtual const std::string& request() const = 0;
  // Call this once. It blocks for at most a second: never call it on a poller or the control
  // thread. Paths that do not work are left out. If none works, the error says why.
  virtual Result<Paths> finish(std::string_view response) = 0;
  // After finish(): the peer's present endpoint, for the next begin() of this session. Empty: it
  // has not changed.
  virtual const std::string& endpoint() const = 0;
};

// Makes paths. Thread-safe. connect() blocks until `deadline` at most: never call it on a poller.
class Connector {
 public:
  virtual ~Connector() = default;
  virtual std::string_view transport() const = 0;
  virtual Result<std::unique_ptr<Path>> connect(const PathTarget& target, TimePoint deadline) = 0;
};

// Memory of a GPU in which reads can land.
struct DeviceLanding {
  // Stands for the memory in ReadOp::local, with ReadOp::in_device. Nothing is mapped there.
  std::span<std::byte> addresses;
  // The homes of paths that do not reach the memory, for HandshakeConnector::begin().
  std::vector<std::string> other_homes;
  // The memory stays registered as long as this lives, which must outlive every path that reads
  // into it.
  std::shared_ptr<const void> registered;
};

// Makes paths by a Handshake. Thread-safe.
class HandshakeConnector {
 public:
  virtual ~HandshakeConnector() = default;
  virtual std::string_view transport() const = 0;
  // False: this host cannot use the transport now, so no peer needs to be asked.
  virtual bool usable() const = 0;
  // Blocks for system calls only. `in_use`: the homes of living paths to that peer, which are not
  // made again. kUnavailable: this host has no rail. kNotFound: no path is missing.
  virtual Result<std::unique_ptr<Handshake>> begin(const PathTarget& target,
                                                   std::span<const std::string> in_use) = 0;
  // Announces memory that reads will land in. It stays announced as long as the result lives, which
  // must outlive every path that reads into it. Returns at once. With a `life`, the transport may
  // keep what it has prepared until the life ends, for the next use of the same memory.
  virtual std::shared_ptr<const void> use_memory(std::span<std::byte> memory,
                                                 std::shared_ptr<MemoryLife> life) = 0;
  // Prepares memory for later uses. Returns when that is done, or at the deadline.
  virtual void prepare_memory(std::span<std::byte> memory, std::shared_ptr<MemoryLife> life,
                              TimePoint deadline) = 0;
  // Registers the first `bytes` of the dmabuf `fd` with the devices of these homes. Blocks as long
  // as the devices need. kUnavailable, kExhausted: a device refuses; nothing is registered then.
  virtual Result<DeviceLanding> use_device_memory(int /*fd*/, std::uint64_t /*bytes*/,
                                                  std::span<const std::string> /*homes*/) {
    return fail(ErrorCode::kUnavailable, "{} reads into host memory only", transport());
  }
};

}  // namespace rekindle::transport
