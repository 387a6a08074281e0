#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "proto/agent.pb.h"
#include "recovery/rpc/rpc.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/result.h"

namespace rekindle::joint {

// Of a page of declarations, leaves or pieces: it arrives within the deadline of a call on a slow
// link.
inline constexpr std::uint64_t kPageBytes = std::uint64_t{1} << 20;

// The same call may succeed later.
inline bool may_pass(const Error& error) {
  return error.code() == ErrorCode::kUnavailable || error.code() == ErrorCode::kPeerLost ||
         error.code() == ErrorCode::kTimeout;
}

// Calls another agent of a roster, or this one. A lost connection, and an agent that is not ready
// yet, are tried again until `patience` has passed. Control thread only.
class JointPeer {
 public:
  // `identity` outlives it. `over`: calls are not tried again.
  JointPeer(proto::NodeAddress node, const rpc::Identity& identity, std::function<bool()> over,
            Duration patience = std::chrono::seconds(10))
      : node_(std::move(node)), identity_(identity), over_(std::move(over)), patience_(patience) {}

  const std::string& name() const { return node_.node_id(); }
  // kPeerLost: the agent is gone, or was silent for too long.
  async::Task<Result<proto::JointResponse>> call(proto::JointRequest request);
  async::Task<Result<proto::JointResponse>> try_once(proto::JointRequest request) {
    return try_until(std::move(request), steady_now() + patience_);
  }

 private:
  async::Task<Result<proto::JointResponse>> try_until(proto::JointRequest request,
                                                      TimePoint give_up);

  const proto::NodeAddress node_;
  const rpc::Identity& identity_;
  const std::function<bool()> over_;
  const Duration patience_;
  std::shared_ptr<rpc::RpcClient> client_;
};

}  // namespace rekindle::joint
