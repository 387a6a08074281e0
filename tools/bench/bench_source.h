#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "tools/bench/bench_memory.h"
#include "transport/path.h"
#include "transport/verbs/host/hca_filter.h"

namespace rekindle::bench {

struct SourceOptions {
  std::string transport;
  std::size_t streams = 1;
  // What it sends at most, 0 for no limit; plain streams share it equally.
  std::uint64_t link_bytes_per_second = 0;
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

}  // namespace rekindle::bench
