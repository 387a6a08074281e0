#include <algorithm>
#include <array>

#include <arpa/inet.h>

#include "transport/verbs/fabric.h"

namespace rekindle::transport::verbs {

std::string to_string(const RailAddress& address) {
  if (address.link == LinkLayer::kInfiniBand) return fmt::format("LID {}", address.lid);
  constexpr std::array<std::uint8_t, 12> kMapped{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  const bool v4 = std::equal(kMapped.begin(), kMapped.end(), address.gid.begin());
  std::array<char, INET6_ADDRSTRLEN> text{};
  ::inet_ntop(v4 ? AF_INET : AF_INET6, address.gid.data() + (v4 ? kMapped.size() : 0), text.data(),
              text.size());
  return text.data();
}

}  // namespace rekindle::transport::verbs
