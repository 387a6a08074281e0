#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "recovery/agent/agent_core.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::agent {

// Answers the commands of this host: publish, pull, plan, retire, each as a call that streams
// progress. Only on the unix socket, only for our own uid. Control thread only.
class LocalService {
 public:
  explicit LocalService(AgentCore& core) : core_(core) {}
  void install(rpc::RpcServer& server);

 private:
  AgentCore& core_;
};

// The store's agent socket.
std::filesystem::path agent_socket(const std::filesystem::path& store_directory);

}  // namespace rekindle::agent
