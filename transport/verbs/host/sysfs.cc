#include "transport/verbs/host/sysfs.h"

#include <algorithm>
#include <charconv>
#include <fstream>

namespace rekindle::transport::verbs {

namespace {

std::filesystem::path port_directory(const std::filesystem::path& sysfs, std::string_view device,
                                     std::string_view port) {
  return sysfs / "class/infiniband" / device / "ports" / port;
}

std::uint64_t parse_rate(std::string_view text) {
  constexpr double kBytesPerGbit = 1e9 / 8;
  double gbit = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), gbit);
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  if (error != std::errc() || !(gbit > 0 && gbit < 1e6) || !unit.starts_with(" Gb/sec")) return 0;
  return static_cast<std::uint64_t>(gbit * kBytesPerGbit);
}

std::optional<GidType> parse_gid_type(const std::string& text) {
  if (text == "RoCE v2") return GidType::kRoceV2;
  if (text == "IB/RoCE v1") return GidType::kRoceV1;  // InfiniBand's, too
  return std::nullopt;
}

void read_gids(const std::filesystem::path& base, PortView& view) {
  for (const std::string& name : list_names(base / "gids")) {
    std::uint32_t index = 0;
    const char* const last = name.data() + name.size();
    if (std::from_chars(name.data(), last, index).ptr != last) continue;
    const auto gid = parse_sysfs_gid(read_line(base / "gids" / name).value_or(""));
    if (!gid || kind_of(*gid) == GidKind::kNone) continue;
    const auto type = parse_gid_type(read_line(base / "gid_attrs/types" / name).value_or(""));
    const bool infiniband = view.link == LinkLayer::kInfiniBand;
    view.gids.push_back(
        {index, infiniband ? GidType::kInfiniBand : type.value_or(GidType::kInfiniBand), *gid});
    if (const auto netdev = read_line(base / "gid_attrs/ndevs" / name)) {
      view.netdevs[index] = *netdev;
    }
  }
}

// Digits compare by value, so that names sort as people count.
bool before(std::string_view a, std::string_view b) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto number = [&](std::string_view& text) {
    const auto* const end = std::find_if_not(text.begin(), text.end(), is_digit);
    std::string_view digits(text.begin(), static_cast<std::size_t>(end - text.begin()));
    text.remove_prefix(digits.size());
    while (digits.size() > 1 && digits.front() == '0') digits.remove_prefix(1);
    return digits;
  };
  while (!a.empty() && !b.empty()) {
    if (is_digit(a.front()) && is_digit(b.front())) {
      const std::string_view x = number(a);
      const std::string_view y = number(b);
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
    } else {
      if (a.front() != b.front()) return a.front() < b.front();
      a.remove_prefix(1);
      b.remove_prefix(1);
    }
  }
  return a.size() < b.size();
}

}  // namespace

std::optional<std::string> read_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  if (!file || !std::getline(file, line)) return std::nullopt;
  line.erase(line.find_last_not_of(" \t\r\n") + 1);
  return line;
}

std::optional<int> read_int(const std::filesystem::path& path) {
  const auto text = read_line(path);
  if (!text) return std::nullopt;
  int value = 0;
  const char* const last = text->data() + text->size();
  const auto [end, error] = std::from_chars(text->data(), last, value);
  if (error != std::errc() || end != last) return std::nullopt;
  return value;
}

std::vector<std::string> list_names(const std::filesystem::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  std::ranges::sort(names, before);
  return names;
}

std::vector<PortView> read_ports(const std::filesystem::path& sysfs) {
  std::vector<PortView> views;
  for (const std::string& device : list_names(sysfs / "class/infiniband")) {
    for (const std::string& port : list_names(sysfs / "class/infiniband" / device / "ports")) {
      const auto base = port_directory(sysfs, device, port);
      PortView view;
      view.device = device;
      const char* const last = port.data() + port.size();
      if (std::from_chars(port.data(), last, view.port).ptr != last) continue;
      const std::string state = read_line(base / "state").value_or("?");  // "4: ACTIVE"
      const auto colon = state.find(": ");
      view.state = colon == std::string::npos ? state : state.substr(colon + 2);
      view.link = read_line(base / "link_layer").value_or("") == "InfiniBand"
                      ? LinkLayer::kInfiniBand
                      : LinkLayer::kEthernet;
      view.bytes_per_second = parse_rate(read_line(base / "rate").value_or(""));
      const std::string lid = read_line(base / "lid").value_or("");  // "0x1a"
      if (lid.starts_with("0x")) {
        std::from_chars(lid.data() + 2, lid.data() + lid.size(), view.lid, 16);
      }
      read_gids(base, view);
      views.push_back(std::move(view));
    }
  }
  return views;
}

std::uint64_t read_port_rate(const std::filesystem::path& sysfs, std::string_view device,
                             std::uint8_t port) {
  const auto base = port_directory(sysfs, device, std::to_string(port));
  return parse_rate(read_line(base / "rate").value_or(""));
}

}  // namespace rekindle::transport::verbs
