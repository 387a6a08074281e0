#pragma once

#include <memory>

#include "src/base/result.h"
#include "tools/bench/bench_memory.h"
#include "transport/path.h"
#include "transport/registry.h"
#include "transport/verbs/host/hca_filter.h"

// `bench transfer --transport verbs`: both ends over this host's RDMA devices, and plain READs over
// queue pairs of the same number beside them. In builds without libibverbs everything here fails
// and says so (bench_verbs_none.cc).
namespace rekindle::bench {

class SourceProcess;
struct Setup;
struct Measured;

struct VerbsOptions {
  transport::verbs::FabricOptions puller;
  transport::verbs::FabricOptions source;
};

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

}  // namespace rekindle::bench
