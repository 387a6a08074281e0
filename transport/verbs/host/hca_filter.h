#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"

namespace rekindle::transport::verbs {

// Which ports of this host are used, and how.
struct FabricOptions {
  // An HcaFilter. Empty: all ports.
  std::string hca;
  // An HcaFilter of the rails that are safe without encryption. Not empty: others are not used.
  std::string trusted;
  // For RoCE ports. -1: chosen by choose_gid().
  int gid_index = -1;
  // Overrides sysfs (docs/internals/verbs.md). Empty: none.
  std::filesystem::path topology_file;
  std::filesystem::path sysfs = "/sys";
  // For every packet. RoCE: DSCP << 2.
  int traffic_class = 0;
  int service_level = 0;
};

// Which ports may be used, in NCCL_IB_HCA's syntax: [^][=]NAME[:PORT][,NAME[:PORT]...].
//   mlx5_0:1,mlx5_2   names are prefixes: mlx5_1 is also mlx5_10; no port: every port
//   =mlx5_1           names are whole; the sign is for the whole list
//   ^mlx5_3           all but these; ^=mlx5_3 with whole names
class HcaFilter {
 public:
  // An empty text lets every port through. kInvalid: the message shows the mistake and the syntax.
  static Result<HcaFilter> parse(std::string_view text);

  bool allows(std::string_view device, std::uint8_t port) const;
  // Whether some port of the device might be allowed. Other devices need not even be opened.
  bool may_allow(std::string_view device) const;
  const std::string& text() const { return text_; }

 private:
  struct Entry {
    std::string name;
    int port = kAnyPort;
  };
  static constexpr int kAnyPort = -1;

  static Result<Entry> parse_entry(std::string_view text, std::string_view whole);
  bool names(const Entry& entry, std::string_view device) const;

  std::string text_;
  bool exclude_ = false;
  bool exact_ = false;
  std::vector<Entry> entries_;
};

}  // namespace rekindle::transport::verbs
