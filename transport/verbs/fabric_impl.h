#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/verbs/fabric.h"
#include "transport/verbs/fabric_monitor.h"
#include "transport/verbs/hca_filter.h"

namespace rekindle::transport::verbs {

class FabricImpl final : public Fabric, private FabricEvents {
 public:
  FabricImpl(Api& api, const FabricOptions& options, HcaFilter filter, Topology topology);
  Result<void> start();

  const std::vector<std::unique_ptr<Device>>& devices() const override { return devices_; }
  const std::vector<std::unique_ptr<Rail>>& rails() const override { return rails_; }
  const FabricOptions& options() const override { return options_; }
  const Topology& topology() const override { return topology_; }
  std::string why_empty() const override { return why_empty_; }
  void refresh() override;

 private:
  // What one look at a port has found.
  struct Sight {
    bool up = false;
    RailAddress address;
    std::string why;  // this address, or why the port is down
    std::uint32_t mtu_bytes = 0;
    std::uint64_t bytes_per_second = 0;
  };
  using GidTable = std::vector<ibv_gid_entry>;

  // start()
  void open_devices();
  Result<void> open_device(ibv_device* device, const std::string& name);
  void explain_empty(const std::vector<std::string>& names, const std::string& trouble);

  // FabricEvents, on the monitor's thread
  void on_port_lost(std::size_t device, int port) override;
  void on_device_lost(std::size_t device, std::string_view why) override;
  void look_at(std::size_t device) override;

  Result<GidTable> read_gids(const Device& device);
  Sight see(const Rail& rail, const ibv_port_attr& attr, const Result<GidTable>& gids);
  std::uint64_t speed_of(const Rail& rail, const ibv_port_attr& attr) const;
  static void publish(Rail& rail, const Sight& sight);
  static void take_down(Rail& rail, std::string_view why);

  Api& api_;
  const FabricOptions options_;
  const HcaFilter filter_;
  const Topology topology_;
  std::string why_empty_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<Rail>> rails_;  // those of one device stand together
  std::mutex look_mutex_;                     // one look at a time: what is published is in order
  std::unique_ptr<FabricMonitor> monitor_;    // last: it uses all of the above
};

}  // namespace rekindle::transport::verbs
