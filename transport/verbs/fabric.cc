#include "transport/verbs/fabric.h"

#include "transport/verbs/fabric_impl.h"

namespace rekindle::transport::verbs {

Device::Device(Api& device_api, std::string name, ContextHandle context, PdHandle pd,
               const DeviceLimits& limits, const FabricOptions& options)
    : api_(device_api),
      name_(std::move(name)),
      context_(std::move(context)),
      pd_(std::move(pd)),
      limits_(limits),
      options_(options) {}

std::string to_string(const RailAddress& address) {
  if (address.link == LinkLayer::kInfiniBand) return fmt::format("LID {}", address.lid);
  return format_gid(address.gid);
}

std::string Rail::name() const { return fmt::format("{}:{}", device_.name(), port_); }

Rail::State Rail::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

Result<std::unique_ptr<Fabric>> Fabric::open(Api& api, const FabricOptions& options) {
  if (options.gid_index > 255) {
    return fail(ErrorCode::kInvalid, "--gid-index {}: it is at most 255", options.gid_index);
  }
  TRY(HcaFilter filter, HcaFilter::parse(options.hca));
  TRY(Topology topology, Topology::open(options.sysfs, options.topology_file));
  auto fabric = std::make_unique<FabricImpl>(api, options, std::move(filter), std::move(topology));
  TRY_VOID(fabric->start());
  return fabric;
}

}  // namespace rekindle::transport::verbs
