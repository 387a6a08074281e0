#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

#include "src/base/ids.h"
#include "src/base/median.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "tools/bench/bench_memory.h"
#include "transport/path.h"
#include "transport/registry.h"
#include "transport/verbs/host/hca_filter.h"

namespace rekindle::bench {

struct SourceOptions {
  std::string transport;
  std::size_t streams = 1;
  // What it sends at most, 0 for no limit; plain streams share it equally.
  std::uint64_t link_bytes_per_second = 0;
  std::string tcp_congestion;
  transport::verbs::FabricOptions fabric;
};

// A process that serves the pool: over a transport of ours, and over plain blocking sockets. It
// ends when this object does, or when this process does.
class SourceProcess {
 public:
  static Result<std::unique_ptr<SourceProcess>> start(const Pool& pool,
                                                      const SourceOptions& options);
  ~SourceProcess();
  SourceProcess(const SourceProcess&) = delete;
  SourceProcess& operator=(const SourceProcess&) = delete;

  const transport::PathTarget& target() const { return target_; }
  transport::RegionKey region() const { return region_; }
  std::uint16_t raw_port() const { return raw_port_; }
  int handshake_socket() const { return handshakes_.get(); }  // of verbs
  double cpu_seconds() const;

 private:
  SourceProcess() = default;
  pid_t pid_ = -1;
  UniqueFd leash_;       // the child ends when this closes
  UniqueFd handshakes_;  // requests and answers
  transport::PathTarget target_;
  transport::RegionKey region_;
  std::uint16_t raw_port_ = 0;
};

// What a raw client asks for: this many bytes of the pool, from `offset` on, around its end.
struct RawRequest {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// `bench transfer --transport verbs`: both ends over this host's RDMA devices, and plain READs over
// queue pairs of the same number beside them. In builds without libibverbs everything here fails
// and says so.
class SourceProcess;
struct Setup;
struct Measured;

// The source process's end; registered when it returns. `registry` outlives it.
class VerbsSource {
 public:
  virtual ~VerbsSource() = default;
  static Result<std::unique_ptr<VerbsSource>> create(const transport::verbs::FabricOptions& options,
                                                     transport::SegmentRegistry& registry,
                                                     const Incarnation& incarnation);
  virtual transport::Server& server() = 0;
};
// Answers the handshakes of one session that come over a socket, until it closes.
void answer_handshakes(transport::Server& server, const SessionToken& token, int socket);

class VerbsPuller {
 public:
  virtual ~VerbsPuller() = default;
  // Reads will land in `destination`, which is registered when it returns.
  static Result<std::unique_ptr<VerbsPuller>> create(const transport::verbs::FabricOptions& options,
                                                     const Pool& destination,
                                                     std::size_t queue_pairs);
  virtual Result<transport::Paths> connect(const SourceProcess& source) = 0;
  // READs of 1 MiB, as many open as the engine keeps open, one thread per rail.
  virtual Result<Measured> measure_reads(const Setup& setup, bool integrity) = 0;
};

Result<Measured> measure_plain_reads(const Setup& setup, bool integrity);

// What one measurement needs. All ways of moving the bytes use the same memory at both ends.
struct Setup {
  const Pool& source_pool;  // also mapped here, for memcpy
  const Pool& destination;
  std::span<const Digest> digests;  // of the source's tiles
  std::span<const std::unique_ptr<SourceProcess>> sources;
  std::string transport;
  std::size_t streams = 1;
  std::uint64_t total_bytes = 0;
  std::uint64_t block_bytes = 0;
  std::uint64_t slice_bytes = 0;
  std::uint64_t row_bytes = 0;
  std::string tcp_congestion;
  VerbsPuller* verbs = nullptr;  // for that transport
};

struct Measured {
  double wall_seconds = 0;
  double cpu_seconds = 0;             // of all processes
  std::vector<double> slice_seconds;  // posted to landed; empty for raw ones
};

// Through the engine.
Result<Measured> measure_engine(const Setup& setup, bool integrity);
// Through the engine, in rows. There are no digests of rows.
Result<Measured> measure_rows(const Setup& setup, bool integrity);
// Blocking sockets, one thread per stream at each end.
Result<Measured> measure_sockets(const Setup& setup, bool integrity);
// memcpy, one thread per stream.
Result<Measured> measure_memcpy(const Setup& setup, bool integrity);

// CPU time of this process and the sources so far.
double cpu_seconds(const Setup& setup);

}  // namespace rekindle::bench
