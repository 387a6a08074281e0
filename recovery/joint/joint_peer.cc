#include "recovery/joint/joint_peer.h"

#include <utility>

#include "recovery/rpc/methods.h"
#include "src/base/clock.h"

namespace rekindle::joint {

namespace {

constexpr std::chrono::seconds kPatience{10};
constexpr std::chrono::milliseconds kConnect{3000};
constexpr std::chrono::milliseconds kCall{10000};
constexpr std::chrono::milliseconds kPause{100};

}  // namespace

async::Task<Result<proto::JointResponse>> JointPeer::try_once(proto::JointRequest request) {
  if (client_ == nullptr || !client_->connected()) {
    CO_TRY(const Incarnation expected, Incarnation::from_bytes(node_.incarnation()));
    CO_TRY(client_, co_await rpc::RpcClient::connect(node_.control_endpoint(), identity_, kConnect,
                                                     expected));
  }
  const auto client = client_;
  co_return co_await rpc::call<proto::AGENT_JOINT>(client, std::move(request), kCall);
}

async::Task<Result<proto::JointResponse>> JointPeer::call(proto::JointRequest request) {
  const TimePoint give_up = steady_now() + kPatience;
  while (true) {
    auto answer = co_await try_once(request);
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
