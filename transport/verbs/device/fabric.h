#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "src/base/result.h"
#include "transport/verbs/device/memory_window.h"
#include "transport/verbs/device/verbs_api.h"
#include "transport/verbs/host/gid.h"
#include "transport/verbs/host/hca_filter.h"
#include "transport/verbs/host/topology.h"

// The RDMA devices of this host. A process opens them once, and its server and its pulls share
// them. A monitor thread follows their state. Thread-safe.
namespace rekindle::transport::verbs {

// How others reach a port.
struct RailAddress {
  LinkLayer link = LinkLayer::kEthernet;
  Gid gid{};
  std::uint8_t gid_index = 0;
  std::uint16_t lid = 0;  // InfiniBand
  bool operator==(const RailAddress&) const = default;
};
std::string to_string(const RailAddress& address);  // "10.0.0.7", "fe80::1", "LID 12"

// The constant facts about an open device.
struct DeviceLimits {
  std::uint32_t max_sge = 1;
  std::uint32_t max_qp_wr = 1;
  std::uint32_t max_cqe = 1;
  std::uint32_t max_mr = 0;
  std::uint32_t max_mw = 0;
  std::uint64_t max_mr_bytes = 0;
  // READs at once, per queue pair: as the answering end, and as the asking end.
  std::uint8_t max_rd_atomic = 1;
  std::uint8_t max_init_rd_atomic = 1;
  bool memory_windows_2b = false;
};

class Device {
 public:
  // `name` as in /sys/class/infiniband.
  Device(Api& device_api, std::string name, ContextHandle context, PdHandle pd,
         const DeviceLimits& limits, const FabricOptions& options);

  Api& api() const { return api_; }
  const std::string& name() const { return name_; }
  ibv_context* context() const { return context_.get(); }
  ibv_pd* pd() const { return pd_.get(); }
  const DeviceLimits& limits() const { return limits_; }
  const FabricOptions& fabric_options() const { return options_; }
  std::uint32_t index() const { return index_; }          // in Fabric::devices()
  int numa_node() const { return numa_node_; }            // -1: unknown
  const std::vector<int>& cpus() const { return cpus_; }  // near it; empty: any
  // The device is gone for good (removed, IBV_EVENT_DEVICE_FATAL): nothing new is made on it.
  bool dead() const { return dead_.load(std::memory_order_acquire); }
  WindowCounts& windows() { return windows_; }

 private:
  friend class FabricImpl;
  Api& api_;
  const std::string name_;
  const ContextHandle context_;
  const PdHandle pd_;
  const DeviceLimits limits_;
  const FabricOptions options_;
  std::uint32_t index_ = 0;
  int numa_node_ = -1;
  std::vector<int> cpus_;
  std::atomic<bool> dead_ = false;
  WindowCounts windows_;
};

// One port of one device.
class Rail {
 public:
  Rail(Device& device, std::uint8_t port) : device_(device), port_(port) {}

  struct State {
    bool up = false;
    std::uint32_t epoch = 0;
    RailAddress address;
    std::uint32_t mtu_bytes = 0;         // active path MTU: 256 … 4096
    std::uint64_t bytes_per_second = 0;  // of the link; 0: unknown
    std::string why_down;                // "port down", "device removed", "no usable GID"
  };

  Device& device() const { return device_; }
  std::uint8_t port() const { return port_; }
  std::uint32_t index() const { return index_; }  // in Fabric::rails()
  std::string name() const;                       // "mlx5_0:1"
  State state() const;
  // Odd: the rail is down. The epoch moves whenever connections over this rail are lost: the port
  // went down, its address changed, or the device is gone. One relaxed load, for pollers.
  std::uint32_t epoch() const { return epoch_.load(std::memory_order_relaxed); }
  static bool is_up(std::uint32_t epoch) { return epoch % 2 == 0; }

 private:
  friend class FabricImpl;
  Device& device_;
  const std::uint8_t port_;
  std::uint32_t index_ = 0;
  std::atomic<std::uint32_t> epoch_ = 1;
  mutable std::mutex mutex_;
  State state_;  // guarded by mutex_
};

class Fabric {
 public:
  virtual ~Fabric() = default;
  // Opens the devices that the filter lets through. To find none is no error: rails() is empty
  // then, and why_empty() gives the reason ("no RDMA device", "--hca '=mlx5_9' matches none of
  // mlx5_0, mlx5_1"). kInvalid: the filter or the topology file is wrong. `api` outlives the
  // fabric.
  static Result<std::unique_ptr<Fabric>> open(Api& api, const FabricOptions& options);

  virtual const std::vector<std::unique_ptr<Device>>& devices() const = 0;
  virtual const std::vector<std::unique_ptr<Rail>>& rails() const = 0;  // never changes
  virtual const FabricOptions& options() const = 0;
  // Covers all NICs of the host, used or not. The topology file has been applied.
  virtual const Topology& topology() const = 0;
  virtual std::string why_empty() const = 0;
  // Looks at every port now, as the monitor thread does once a second. From any thread.
  virtual void refresh() = 0;
};

}  // namespace rekindle::transport::verbs
