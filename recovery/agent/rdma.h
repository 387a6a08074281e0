#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "transport/verbs/host/hca_filter.h"

namespace rekindle::transport {
class HandshakeConnector;
class SegmentRegistry;
class Server;
}  // namespace rekindle::transport

namespace rekindle::agent {

struct RdmaOptions {
  bool enabled = true;
  transport::verbs::FabricOptions fabric;
  // Encryption is demanded, and rails encrypt nothing: only those of FabricOptions::trusted serve.
  // Otherwise that list does not count.
  bool trusted_only = false;
  // NICs may write to GPU memory.
  bool gpu_direct = false;
};

// The memory windows of all devices.
struct WindowFigures {
  std::uint64_t in_use = 0;
  std::uint64_t limit = 0;  // 0: no device has windows of type 2B
  // Since the start.
  std::uint64_t bound = 0;
  std::uint64_t invalidated = 0;
  std::uint64_t refused = 0;  // a device had none left
};

// The RDMA devices of this host, their registered memory, and the two ends of the transport over
// them. Hides whether this build has RDMA at all.
class Rdma {
 public:
  // Its server and every path must have ended.
  virtual ~Rdma() = default;
  // nullptr: not in this build, not enabled, or no device here. kInvalid: impossible options.
  static Result<std::unique_ptr<Rdma>> open(const RdmaOptions& options);

  // The NUMA node that all devices in use are on. -1: several, or unknown.
  virtual int numa_node() const = 0;
  struct RailView {
    std::string name;  // "mlx5_0:1"
    // Why it is down. "": it is up.
    std::string why_down;
    std::uint64_t bytes_per_second = 0;  // of the link; 0: unknown
  };
  virtual std::vector<RailView> rails() const = 0;
  // MemoryRegistrar::maps_files_for_writing().
  virtual bool maps_files_for_writing() const = 0;
  // The homes of the rails that may write to the memory of the GPU with this UUID, by the choice of
  // choose_gpu_rails(). kUnavailable: there are none. kNotFound: RdmaOptions::gpu_direct is off.
  virtual Result<std::vector<std::string>> homes_near_gpu(std::string_view uuid) const = 0;
  virtual WindowFigures windows() const = 0;
  virtual transport::HandshakeConnector& connector() = 0;
  virtual std::unique_ptr<transport::Server> serve(transport::SegmentRegistry& registry,
                                                   const Incarnation& incarnation) = 0;
};

}  // namespace rekindle::agent
