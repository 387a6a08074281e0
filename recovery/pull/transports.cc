#include "recovery/pull/transports.h"

namespace rekindle::pull {

std::vector<std::string> transports_for(
    const TransportChoice& choice, std::span<transport::HandshakeConnector* const> handshakes) {
  if (!choice.forced.empty()) return {choice.forced};
  std::vector<std::string> names;
  if (choice.same_host) names.emplace_back("shm");
  for (const auto* connector : handshakes) {
    std::string name(connector->transport());
    if (connector->usable() || choice.used.contains(name)) names.push_back(std::move(name));
  }
  names.emplace_back("tcp");
  std::erase_if(names, [&](const std::string& name) { return choice.avoid.contains(name); });
  return names;
}

}  // namespace rekindle::pull
