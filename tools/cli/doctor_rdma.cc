#include <algorithm>

#include "tools/cli/doctor.h"
#include "tools/cli/output.h"
#include "transport/verbs/host/gpu_direct.h"

namespace rekindle::cli::doctor {

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
