#include "recovery/joint/joint_peer.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "recovery/rpc/methods.h"
#include "src/base/clock.h"

namespace rekindle::joint {

namespace {

constexpr std::chrono::milliseconds kConnect{3000};
constexpr std::chrono::milliseconds kPause{100};

// Never 0, which would mean no deadline.
std::chrono::milliseconds left_until(TimePoint give_up) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(give_up - steady_now());
  return std::max(left, std::chrono::milliseconds(1));
}

}  // namespace

async::Task<Result<proto::JointResponse>> JointPeer::try_until(proto::JointRequest request,
                                                               TimePoint give_up) {
  if (client_ == nullptr || !client_->connected()) {
    CO_TRY(const Incarnation expected, Incarnation::from_bytes(node_.incarnation()));
    CO_TRY(client_, co_await rpc::RpcClient::connect(node_.control_endpoint(), identity_,
                                                     std::min(kConnect, left_until(give_up)),
                                                     expected, proto::ROLE_AGENT));
  }
  const auto client = client_;
  co_return co_await rpc::call<proto::AGENT_JOINT>(client, std::move(request), left_until(give_up));
}

async::Task<Result<proto::JointResponse>> JointPeer::call(proto::JointRequest request) {
  const TimePoint give_up = steady_now() + patience_;
  while (true) {
    auto answer = co_await try_until(request, give_up);
    // The agent may hear of the roster later than this one.
    const bool unknown = !answer && answer.error().code() == ErrorCode::kNotFound;
    if (answer || (!unknown && !may_pass(answer.error()))) co_return answer;
    if (over_() || co_await async::is_cancelled()) co_return answer;
    if (steady_now() >= give_up) {
      co_return fail(ErrorCode::kPeerLost, "{} at {} does not take part any more: {}",
                     node_.node_id(), node_.control_endpoint(), answer.error().message());
    }
    co_await async::sleep_for(kPause);
  }
}

}  // namespace rekindle::joint
