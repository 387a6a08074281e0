#include "transport/verbs/device/fabric.h"

#include <algorithm>
#include <cerrno>

#include "src/base/units.h"
#include "transport/verbs/device/fabric_monitor.h"
#include "transport/verbs/host/sysfs.h"

// A rail's epoch is even while the port is up. Every loss makes it odd, every return makes it even
// again, so no even value comes twice. A changed address under a port that stays up counts as both.
namespace rekindle::transport::verbs {

class FabricImpl final : public Fabric, private FabricEvents {
 public:
  FabricImpl(Api& api, const FabricOptions& options, HcaFilter filter, HcaFilter trusted,
             Topology topology);
  Result<void> start();

  const std::vector<std::unique_ptr<Device>>& devices() const override { return devices_; }
  const std::vector<std::unique_ptr<Rail>>& rails() const override { return rails_; }
  const FabricOptions& options() const override { return options_; }
  const Topology& topology() const override { return topology_; }
  std::string why_empty() const override { return why_empty_; }
  void refresh() override;

 private:
  // The state of a port at one look.
  struct Sight {
    bool up = false;
    RailAddress address;
    // Why this address was chosen, or why the port is down.
    std::string why;
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
  const HcaFilter trusted_;
  const Topology topology_;
  std::string why_empty_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<Rail>> rails_;  // grouped by device
  // One look at a time, so that states are published in order.
  std::mutex look_mutex_;
  // Last, as its thread uses all of the above.
  std::unique_ptr<FabricMonitor> monitor_;
};

namespace {

std::uint32_t positive(int value) { return value > 0 ? static_cast<std::uint32_t>(value) : 0; }

std::uint8_t at_most_255(int value) { return static_cast<std::uint8_t>(std::clamp(value, 1, 255)); }

DeviceLimits limits_of(const ibv_device_attr& attr) {
  DeviceLimits limits;
  limits.max_sge = std::max(1U, positive(attr.max_sge));
  // The limit for READs: no other requests are posted here. Some providers leave it empty.
  if (attr.max_sge_rd > 0) limits.max_sge = std::min(limits.max_sge, positive(attr.max_sge_rd));
  limits.max_qp_wr = std::max(1U, positive(attr.max_qp_wr));
  limits.max_cqe = std::max(1U, positive(attr.max_cqe));
  limits.max_mr = positive(attr.max_mr);
  limits.max_mw = positive(attr.max_mw);
  limits.max_mr_bytes = attr.max_mr_size;
  limits.max_rd_atomic = at_most_255(attr.max_qp_rd_atom);
  limits.max_init_rd_atomic = at_most_255(attr.max_qp_init_rd_atom);
  limits.memory_windows_2b = (attr.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B) != 0;
  return limits;
}

// Why a kind of device cannot be used; nullptr: it can.
const char* unusable(const ibv_device& device) {
  switch (device.node_type) {
    case IBV_NODE_RNIC:
      return "iWARP: only InfiniBand and RoCE are supported";
    case IBV_NODE_USNIC:
    case IBV_NODE_USNIC_UDP:
    case IBV_NODE_UNSPECIFIED:
      return "it has no reliable connections";
    default:
      return nullptr;
  }
}

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

LinkLayer link_of(const ibv_port_attr& attr) {
  return attr.link_layer == IBV_LINK_LAYER_ETHERNET ? LinkLayer::kEthernet : LinkLayer::kInfiniBand;
}

std::uint32_t mtu_bytes(ibv_mtu mtu) {
  constexpr std::uint32_t kSmallest = 256;
  return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? kSmallest << (mtu - IBV_MTU_256) : kSmallest;
}

std::string_view port_state_name(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_DOWN:
      return "port down";
    case IBV_PORT_INIT:
      return "port waits for the subnet manager";
    case IBV_PORT_ARMED:
    case IBV_PORT_ACTIVE_DEFER:
      return "port is coming up";
    default:
      return "port state unknown";
  }
}

}  // namespace

FabricImpl::FabricImpl(Api& api, const FabricOptions& options, HcaFilter filter, HcaFilter trusted,
                       Topology topology)
    : api_(api),
      options_(options),
      filter_(std::move(filter)),
      trusted_(std::move(trusted)),
      topology_(std::move(topology)) {}

Result<void> FabricImpl::start() {
  open_devices();
  refresh();
  for (const auto& rail : rails_) {  // what came up has been logged already
    if (const Rail::State state = rail->state(); !state.up) {
      log::info("rail.down", "rail", rail->name(), "why", state.why_down);
    }
  }
  if (devices_.empty()) return {};
  std::vector<ibv_context*> contexts;
  for (const auto& device : devices_) contexts.push_back(device->context());
  TRY(monitor_, FabricMonitor::start(api_, contexts, *this));
  return {};
}

void FabricImpl::open_devices() {
  if (const int error = api_.make_fork_safe(); error != 0) {
    why_empty_ = fmt::format(
        "RDMA is not used: {}; a fork would take memory from under the NICs: Linux 5.12 or later",
        errno_error(error, "ibv_fork_init").message());
    return;
  }
  int count = 0;
  errno = 0;
  ibv_device** const list = api_.get_device_list(&count);
  if (list == nullptr) {
    why_empty_ = errno == ENOSYS ? "no RDMA device: the kernel's RDMA modules are not loaded"
                                 : "no RDMA device: " + errno_error(errno, "list them").message();
    return;
  }
  std::vector<std::string> names;
  std::string trouble;
  for (int i = 0; i < count; ++i) {
    names.emplace_back(api_.get_device_name(list[i]));
    if (!filter_.may_allow(names.back()) || !trusted_.may_allow(names.back())) continue;
    if (const auto opened = open_device(list[i], names.back()); !opened) {
      log::warn("fabric.device", "device", names.back(), "unusable", opened.error());
      trouble += fmt::format("{}{}: {}", trouble.empty() ? "" : "; ", names.back(),
                             opened.error().message());
    }
  }
  api_.free_device_list(list);
  if (rails_.empty()) explain_empty(names, trouble);
}

void FabricImpl::explain_empty(const std::vector<std::string>& names, const std::string& trouble) {
  if (names.empty()) {
    why_empty_ = "no RDMA device";
  } else if (!trouble.empty()) {
    why_empty_ = "no usable RDMA device: " + trouble;
  } else {
    why_empty_ = fmt::format(
        "--hca '{}'{} matches none of {}", filter_.text(),
        trusted_.text().empty() ? "" : fmt::format(" with --rail-trusted '{}'", trusted_.text()),
        join(names));
  }
}

Result<void> FabricImpl::open_device(ibv_device* device, const std::string& name) {
  if (const char* const why = unusable(*device)) return fail(ErrorCode::kInvalid, "{}", why);
  errno = 0;
  ContextHandle context(api_.open_device(device), {&api_});
  if (!context) {
    return fail(errno_error(errno, "open it (in a container: pass /dev/infiniband in)"));
  }
  ibv_device_attr attr{};
  if (const int error = api_.query_device(context.get(), &attr); error != 0) {
    return fail_errno(error, "query it");
  }
  std::vector<std::uint8_t> ports;
  for (int port = 1; port <= attr.phys_port_cnt; ++port) {
    const auto number = static_cast<std::uint8_t>(port);
    if (filter_.allows(name, number) && trusted_.allows(name, number)) ports.push_back(number);
  }
  if (ports.empty()) return {};
  errno = 0;
  PdHandle pd(api_.alloc_pd(context.get()), {&api_});
  if (!pd) return fail_errno(errno, "allocate a protection domain");
  auto opened = std::make_unique<Device>(api_, name, std::move(context), std::move(pd),
                                         limits_of(attr), options_);
  opened->index_ = static_cast<std::uint32_t>(devices_.size());
  if (const NicPlace* const place = topology_.nic(name)) {
    opened->numa_node_ = place->numa_node;
    opened->cpus_ = place->cpus;
  }
  for (const std::uint8_t port : ports) {
    auto rail = std::make_unique<Rail>(*opened, port);
    rail->index_ = static_cast<std::uint32_t>(rails_.size());
    rail->state_.epoch = rail->epoch();
    rail->state_.why_down = "not looked at yet";
    rails_.push_back(std::move(rail));
  }
  devices_.push_back(std::move(opened));
  return {};
}

void FabricImpl::refresh() {
  for (std::size_t i = 0; i < devices_.size(); ++i) look_at(i);
}

void FabricImpl::on_port_lost(std::size_t device, int port) {
  const std::lock_guard lock(look_mutex_);
  for (const auto& rail : rails_) {
    if (rail->device().index() == device && rail->port() == port) take_down(*rail, "port down");
  }
}

void FabricImpl::on_device_lost(std::size_t device, std::string_view why) {
  const std::lock_guard lock(look_mutex_);
  devices_[device]->dead_.store(true, std::memory_order_release);
  log::error("fabric.device", "device", devices_[device]->name(), "lost", why, "hint",
             "its rails stay down until this process is started again");
  for (const auto& rail : rails_) {
    if (rail->device().index() == device) take_down(*rail, why);
  }
}

void FabricImpl::look_at(std::size_t index) {
  const std::lock_guard lock(look_mutex_);
  const Device& device = *devices_[index];
  if (device.dead()) return;
  struct Seen {
    Rail* rail;
    ibv_port_attr attr{};
    int error = 0;
  };
  std::vector<Seen> seen;
  for (const auto& rail : rails_) {
    if (&rail->device() != &device) continue;
    Seen& port = seen.emplace_back();
    port.rail = rail.get();
    port.error = api_.query_port(device.context(), rail->port(), &port.attr);
  }
  const Result<GidTable> table = read_gids(device);
  for (const Seen& port : seen) {
    if (port.error != 0) {
      take_down(*port.rail, errno_error(port.error, "query port").message());
    } else {
      publish(*port.rail, see(*port.rail, port.attr, table));
    }
  }
}

Result<FabricImpl::GidTable> FabricImpl::read_gids(const Device& device) {
  // Of all ports of the device. The kernel takes the size of an argument in 16 bits.
  constexpr std::size_t kCapacity = 65535 / sizeof(ibv_gid_entry);
  GidTable table(kCapacity);
  const ssize_t count = api_.query_gid_table(device.context(), table.data(), table.size());
  if (count < 0) return fail_errno(static_cast<int>(-count), "read the GID table");
  table.resize(std::min(table.size(), static_cast<std::size_t>(count)));
  return table;
}

FabricImpl::Sight FabricImpl::see(const Rail& rail, const ibv_port_attr& attr,
                                  const Result<GidTable>& gids) {
  Sight sight;
  sight.address.link = link_of(attr);
  sight.mtu_bytes = mtu_bytes(attr.active_mtu);
  sight.bytes_per_second = speed_of(rail, attr);
  if (attr.state != IBV_PORT_ACTIVE) {
    sight.why = port_state_name(attr.state);
    return sight;
  }
  if (!gids) {
    sight.why = gids.error().message();
    return sight;
  }
  std::vector<GidEntry> entries;
  for (const ibv_gid_entry& entry : *gids) {
    if (entry.port_num != rail.port()) continue;
    GidEntry& own = entries.emplace_back();
    own.index = entry.gid_index;
    own.type = entry.gid_type == IBV_GID_TYPE_ROCE_V2   ? GidType::kRoceV2
               : entry.gid_type == IBV_GID_TYPE_ROCE_V1 ? GidType::kRoceV1
                                                        : GidType::kInfiniBand;
    std::copy_n(std::begin(entry.gid.raw), own.gid.size(), own.gid.begin());
  }
  const RailAddress before = rail.state().address;
  const GidChoice current{before.gid_index, before.gid, ""};
  auto choice = choose_gid(entries, sight.address.link, options_.gid_index, &current);
  if (!choice) {
    sight.why = choice.error().message();
    return sight;
  }
  sight.up = true;
  sight.why = choice->why;
  sight.address.gid = choice->gid;
  sight.address.gid_index = choice->index;
  if (sight.address.link == LinkLayer::kInfiniBand) sight.address.lid = attr.lid;
  return sight;
}

std::uint64_t FabricImpl::speed_of(const Rail& rail, const ibv_port_attr& attr) const {
  struct Step {
    unsigned code;
    std::uint64_t value;
  };
  constexpr std::uint64_t kBytesPerMbit = 1'000'000 / 8;
  constexpr std::array<Step, 5> kLanes = {{{1, 1}, {16, 2}, {2, 4}, {4, 8}, {8, 12}}};
  // One lane, in Mbit/s: SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR.
  constexpr std::array<Step, 8> kSpeeds = {{{1, 2500},
                                            {2, 5000},
                                            {4, 10000},
                                            {8, 10000},
                                            {16, 14000},
                                            {32, 25000},
                                            {64, 50000},
                                            {128, 100000}}};
  const auto* const lanes = std::ranges::find(kLanes, attr.active_width, &Step::code);
  const auto* const speed = std::ranges::find(kSpeeds, attr.active_speed, &Step::code);
  if (lanes != kLanes.end() && speed != kSpeeds.end()) {
    return lanes->value * speed->value * kBytesPerMbit;
  }
  return read_port_rate(options_.sysfs, rail.device().name(), rail.port());  // newer than this list
}

// Held by both: look_mutex_.
void FabricImpl::publish(Rail& rail, const Sight& sight) {
  if (!sight.up) {
    take_down(rail, sight.why);
    const std::lock_guard lock(rail.mutex_);
    rail.state_.address.link = sight.address.link;
    rail.state_.mtu_bytes = sight.mtu_bytes;
    rail.state_.bytes_per_second = sight.bytes_per_second;
    return;
  }
  const std::lock_guard lock(rail.mutex_);
  Rail::State& state = rail.state_;
  const std::uint32_t before = state.epoch;
  if (!state.up) {
    state.epoch += 1;
    log::info("rail.up", "rail", rail.name(), "address", to_string(sight.address), "gid_index",
              sight.address.gid_index, "why", sight.why, "mtu", sight.mtu_bytes, "speed",
              format_rate(static_cast<double>(sight.bytes_per_second)), "epoch", state.epoch);
  } else if (state.address != sight.address || sight.mtu_bytes < state.mtu_bytes) {
    // The MTU is smaller: connections with the larger one get nothing through any more.
    state.epoch += 2;
    log::warn("rail.changed", "rail", rail.name(), "address", to_string(sight.address), "was",
              to_string(state.address), "mtu", sight.mtu_bytes, "epoch", state.epoch);
  }
  state.up = true;
  state.why_down.clear();
  state.address = sight.address;
  state.mtu_bytes = sight.mtu_bytes;
  state.bytes_per_second = sight.bytes_per_second;
  if (state.epoch != before) rail.epoch_.store(state.epoch, std::memory_order_release);
}

void FabricImpl::take_down(Rail& rail, std::string_view why) {
  const std::lock_guard lock(rail.mutex_);
  rail.state_.why_down = why;
  if (!rail.state_.up) return;
  rail.state_.up = false;
  rail.state_.epoch += 1;
  rail.epoch_.store(rail.state_.epoch, std::memory_order_release);
  log::warn("rail.down", "rail", rail.name(), "why", why, "epoch", rail.state_.epoch);
}

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
  TRY(HcaFilter trusted, HcaFilter::parse(options.trusted));
  TRY(Topology topology, Topology::open(options.sysfs, options.topology_file));
  auto fabric = std::make_unique<FabricImpl>(api, options, std::move(filter), std::move(trusted),
                                             std::move(topology));
  TRY_VOID(fabric->start());
  return fabric;
}

}  // namespace rekindle::transport::verbs
