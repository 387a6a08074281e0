#include <algorithm>

#include "src/base/units.h"
#include "src/store/numa.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/doctor.h"
#include "tools/cli/output.h"
#include "transport/verbs/host/gpu_direct.h"

#if REKINDLE_WITH_CUDA
#include "src/cuda/device.h"
#endif
#if REKINDLE_WITH_NCCL
#include "src/cuda/nccl.h"
#endif

namespace rekindle::cli::doctor {
namespace {

constexpr std::string_view kNet = "sys/class/net/";
constexpr std::string_view kInfiniband = "sys/class/infiniband/";

void append(std::string& list, const std::string& item) {
  list += (list.empty() ? "" : "; ") + item;
}

// "4: ACTIVE" becomes "ACTIVE".
std::string after_colon(const std::string& text) {
  const auto colon = text.find(": ");
  return colon == std::string::npos ? text : text.substr(colon + 2);
}

// The GIDs in use and their kinds: "fe80::… (RoCE v2)".
std::string gids_of(const Kernel& kernel, const std::string& port) {
  std::string gids;
  std::size_t more = 0;
  constexpr std::size_t kShown = 4;
  std::size_t shown = 0;
  for (const std::string& index : kernel.list(port + "/gids")) {
    const std::string gid = kernel.read(port + "/gids/" + index).value_or("");
    if (gid.empty() || gid.find_first_not_of("0:") == std::string::npos) continue;
    if (shown == kShown) {
      ++more;
      continue;
    }
    const std::string type = kernel.read(port + "/gid_attrs/types/" + index).value_or("");
    gids += fmt::format("{}{} {}{}", shown == 0 ? "" : ", ", index, gid,
                        type.empty() ? "" : " " + type);
    ++shown;
  }
  if (more > 0) gids += fmt::format(" +{}", more);
  return gids.empty() ? "no GID" : "GID " + gids;
}

}  // namespace

Check check_numa(const Kernel& kernel) {
  std::string nodes;
  std::size_t count = 0;
  for (const std::string& name : kernel.list("sys/devices/system/node")) {
    if (!name.starts_with("node") || name.size() < 5 || name[4] < '0' || name[4] > '9') continue;
    ++count;
    append(nodes,
           fmt::format("{} cpus {}", name,
                       kernel.read("sys/devices/system/node/" + name + "/cpulist").value_or("?")));
  }
  store::NumaPlacement placement;
  (void)placement.choose({}, read_numa_nodes(kernel.root / "sys"));
  Check check{"numa", Level::kOk, count == 0 ? "one node" : nodes, ""};
  if (!placement.nodes().empty()) {
    check.found += fmt::format(
        "; an agent places the part of a worker on the node of its GPU, and other copies on the "
        "node of the RDMA devices, or interleaved over nodes {} if these are on several",
        number_list(placement.nodes()));
  }
  if (count > 1 && kernel.read_number("proc/sys/kernel/numa_balancing").value_or(0) != 0) {
    check.level = Level::kWarn;
    check.advice =
        "automatic balancing moves pages of the store about; sysctl kernel.numa_balancing=0";
  }
  return check;
}

Check check_network(const Kernel& kernel) {
  std::string up;
  for (const std::string& name : kernel.list(kNet)) {
    const std::string base = std::string(kNet) + name;
    const std::string state = kernel.read(base + "/operstate").value_or("unknown");
    if (name == "lo" || (state != "up" && state != "unknown")) continue;
    // -1 or unreadable: a virtual interface.
    const auto speed = kernel.read_number(base + "/speed");
    std::string text = printable(name);
    text += speed && *speed > 0 ? fmt::format(" {} Gbit/s", static_cast<double>(*speed) / 1e3)
                                : " speed unknown";
    text += fmt::format(", mtu {}", kernel.read(base + "/mtu").value_or("?"));
    append(up, text);
  }
  if (up.empty()) {
    return {"network", Level::kWarn, "no interface is up but loopback",
            "other hosts cannot be reached; only pulls on this host work"};
  }
  return {"network", Level::kOk, up, ""};
}

Check check_tcp(const Kernel& kernel) {
  const std::string base = "proc/sys/net/ipv4/tcp_";
  const auto chosen = kernel.read(base + "congestion_control");
  if (!chosen) return {"tcp", Level::kOk, "the kernel does not tell its congestion control", ""};
  return {
      "tcp", Level::kOk,
      fmt::format("congestion control {}; --tcp-congestion may choose of: {}", printable(*chosen),
                  printable(kernel.read(base + "available_congestion_control").value_or("?"))),
      ""};
}

Check check_rdma(const Kernel& kernel, bool compiled_in) {
  std::string devices;
  bool active = false;
  for (const std::string& device : kernel.list(kInfiniband)) {
    for (const std::string& port : kernel.list(std::string(kInfiniband) + device + "/ports")) {
      const std::string base = std::string(kInfiniband) + device + "/ports/" + port;
      const std::string state = after_colon(kernel.read(base + "/state").value_or("?"));
      active |= state == "ACTIVE";
      append(devices,
             fmt::format("{} port {} {} {} {}, {}", printable(device), port, state,
                         kernel.read(base + "/link_layer").value_or("?"),
                         kernel.read(base + "/rate").value_or("?"), gids_of(kernel, base)));
    }
  }
  if (devices.empty()) {
    return {"rdma", Level::kOk, "no device: transfers between hosts use TCP", ""};
  }
  if (!active) {
    return {"rdma", Level::kWarn, devices,
            "no port is active: check the cable or the switch; transfers use TCP meanwhile"};
  }
  if (!compiled_in) {
    return {"rdma", Level::kWarn, devices, "this build has no RDMA backend: transfers use TCP"};
  }
  return {"rdma", Level::kOk, devices, ""};
}

Check check_gpus(const Kernel& kernel, bool compiled_in) {
  std::string gpus;
  for (const std::string& name : kernel.list("proc/driver/nvidia/gpus")) {
    const std::string text =
        kernel.read("proc/driver/nvidia/gpus/" + name + "/information").value_or("");
    const auto at = text.find("Model:");
    const auto end = text.find('\n', at);
    std::string model =
        at == std::string::npos ? "unknown model" : text.substr(at + 6, end - at - 6);
    model.erase(0, model.find_first_not_of(" \t"));
    append(gpus, fmt::format("{} at {}", printable(model), printable(name)));
  }
  if (gpus.empty()) {
    return {"gpu", Level::kOk, "none: weights stay in host memory", ""};
  }
  if (!compiled_in) {
    return {"gpu", Level::kWarn, gpus,
            "this build has no GPU backend: weights are handed over in host memory"};
  }
  return {"gpu", Level::kOk, gpus, ""};
}

#if REKINDLE_WITH_CUDA

namespace {

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

Check check_nccl() {
#if REKINDLE_WITH_NCCL
  const auto nccl = cuda::Nccl::load();
  if (!nccl) {
    return {"nccl", Level::kWarn, nccl.error().message(),
            "broadcasts between GPUs need it: install libnccl2; pulls do not"};
  }
  const int version = (*nccl)->version();
  return {"nccl", Level::kOk,
          fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100), ""};
#else
  return {"nccl", Level::kOk, "not in this build", ""};
#endif
}

}  // namespace

Checks cuda_checks(bool gpus) {
  const auto driver = cuda::Driver::load();
  if (!driver) {
    if (!gpus) return {{"cuda", Level::kOk, driver.error().message(), ""}};
    return {{"cuda", Level::kWarn, driver.error().message(),
             "there are GPUs, but weights are handed over in host memory: mend the driver"}};
  }
  const auto devices = cuda::list_devices(**driver);
  if (!devices) return {{"cuda", Level::kWarn, devices.error().message(), "see nvidia-smi"}};
  Checks checks;
  for (const auto& device : *devices) {
    Check check{"cuda", Level::kOk,
                fmt::format("{} {}, {}, driver {}", device.id, printable(device.name),
                            format_bytes(device.total_bytes), version_text((*driver)->version())),
                ""};
    if (!device.not_shareable.empty()) {
      check.level = Level::kWarn;
      check.advice = fmt::format("{}: workers upload by themselves, slower", device.not_shareable);
    }
    checks.push_back(std::move(check));
  }
  checks.push_back(check_nccl());
  return checks;
}

#else

Checks cuda_checks(bool) { return {}; }

#endif

Checks device_checks(const Kernel& kernel) {
  const BuildInfo info = build_info();
  Checks checks = {check_numa(kernel), check_network(kernel), check_tcp(kernel),
                   check_rdma(kernel, info.verbs)};
  for (Check& check : rdma_checks(kernel)) checks.push_back(std::move(check));
  checks.insert(std::prev(checks.end()),
                check_gpus(kernel, info.cuda));  // how NICs reach them: last
  const bool gpus = !kernel.list("proc/driver/nvidia/gpus").empty();
  for (Check& check : cuda_checks(gpus)) checks.insert(std::prev(checks.end()), std::move(check));
  return checks;
}

namespace verbs = transport::verbs;

namespace {

std::string yes_no(const std::optional<bool>& value) {
  return !value ? "unknown" : *value ? "yes" : "no";
}

std::string advice_for(const RailView& rail) {
  const std::string netdev = rail.netdev.empty() ? "its interface" : printable(rail.netdev);
  const bool ethernet = rail.link == verbs::LinkLayer::kEthernet;
  if (!rail.up && rail.why.starts_with("port")) {
    return ethernet ? fmt::format("check cable and switch port, and `ip link set {} up`", netdev)
                    : "check the cable, and that a subnet manager runs";
  }
  if (!rail.up && rail.why.find("GID") != std::string::npos) {
    return fmt::format("give {} an IP address; see `rekindle topo`", netdev);
  }
  if (!rail.up) return "see `rekindle topo`";
  constexpr std::uint32_t kLargeMtu = 4096;
  if (ethernet && rail.mtu_bytes != 0 && rail.mtu_bytes < kLargeMtu) {
    return fmt::format("packets are small: `ip link set {} mtu 9000` allows {}, if the switches do",
                       netdev, kLargeMtu);
  }
  return "";
}

}  // namespace

Check check_rail(const RailView& rail) {
  Check check{printable(rail.name()), rail.up ? Level::kOk : Level::kWarn, "", advice_for(rail)};
  check.found = rail.up ? "up" : "down: " + rail.why;
  if (rail.bytes_per_second > 0) {
    check.found += fmt::format(", {} Gb/s", static_cast<double>(rail.bytes_per_second) * 8 / 1e9);
  }
  check.found += fmt::format(" {}", to_string(rail.link));
  if (rail.gid_index >= 0) {
    check.found += fmt::format(", GID {} {}", rail.gid_index, verbs::format_gid(rail.gid));
    if (rail.up) check.found += fmt::format(" ({})", rail.why);
  }
  if (rail.link == verbs::LinkLayer::kInfiniBand && rail.lid != 0) {
    check.found += fmt::format(", LID {}", rail.lid);
  }
  if (rail.mtu_bytes != 0) check.found += fmt::format(", MTU {}", rail.mtu_bytes);
  check.found += fmt::format(", memory windows {}", yes_no(rail.memory_windows));
  if (rail.memory_windows == false) check.found += " (one key for all pullers)";
  check.found += fmt::format(", dmabuf {}", yes_no(rail.dmabuf));
  return check;
}

Check check_gpu_direct(const RdmaView& view, const verbs::GpuDirectFacts& facts) {
  if (facts.gpu && view.rails.empty()) {
    return {"gpu direct", Level::kOk, "host staging: no RDMA device", ""};
  }
  const verbs::GpuDirectDecision decision = verbs::decide_gpu_direct(facts);
  return {"gpu direct", Level::kOk, fmt::format("{}: {}", to_string(decision.how), decision.why),
          decision.advice};
}

verbs::GpuDirectFacts gpu_direct_facts(const Kernel& kernel, const RdmaView& view) {
  verbs::GpuDirectFacts facts;
  facts.gpu = !view.topology.gpus().empty();
  facts.peermem = verbs::peermem_loaded(kernel / "sys");
  facts.nic_dmabuf =
      !view.rails.empty() &&
      std::ranges::all_of(view.rails, [](const RailView& rail) { return rail.dmabuf == true; });
  if (!facts.gpu) return facts;
  if (const auto cuda = verbs::CudaExport::load()) {
    facts.driver_dmabuf = (*cuda)->all_support_dmabuf();
  }
  return facts;
}

Checks rdma_checks(const Kernel& kernel) {
  verbs::FabricOptions options;
  options.sysfs = kernel / "sys";
  auto view = look_at_rdma(options);
  if (!view) return {{"rails", Level::kFail, view.error().message(), ""}};
  Checks checks;
  for (const RailView& rail : view->rails) checks.push_back(check_rail(rail));
  if (!view->rails.empty() && !view->lacking.empty()) {
    checks.push_back({"rails", Level::kWarn, printable(view->lacking),
                      "transfers use TCP meanwhile; the lines above are from sysfs"});
  }
  checks.push_back(check_gpu_direct(*view, gpu_direct_facts(kernel, *view)));
  return checks;
}

}  // namespace rekindle::cli::doctor
