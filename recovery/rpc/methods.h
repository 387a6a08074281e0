#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "proto/frame.pb.h"
#include "recovery/rpc/rpc.h"
#include "src/async/task.h"

// The methods of proto/frame.proto with the types of their messages, and typed calls and handlers.
// A caller includes the .pb.h of the messages that it uses.
namespace rekindle::proto {

template <typename RequestType, typename ResponseType>
struct Signature {
  using Request = RequestType;
  using Response = ResponseType;
};

template <Method method>
struct SignatureOf;

// The `class` keywords declare the messages, so that this header includes none of them.
// clang-format off
template <> struct SignatureOf<COORDINATOR_REGISTER> : Signature<class RegisterRequest, class RegisterResponse> {};
template <> struct SignatureOf<COORDINATOR_HEARTBEAT> : Signature<class HeartbeatRequest, class HeartbeatResponse> {};
template <> struct SignatureOf<COORDINATOR_ANNOUNCE> : Signature<class AnnounceRequest, class AnnounceResponse> {};
template <> struct SignatureOf<COORDINATOR_PUBLISH> : Signature<class PublishRequest, class PublishResponse> {};
template <> struct SignatureOf<COORDINATOR_OPEN_PULL> : Signature<class OpenPullRequest, class OpenPullResponse> {};
template <> struct SignatureOf<COORDINATOR_PULL_PROGRESS> : Signature<class PullProgressRequest, class PullProgressResponse> {};
template <> struct SignatureOf<COORDINATOR_CLOSE_PULL> : Signature<class ClosePullRequest, class ClosePullResponse> {};
template <> struct SignatureOf<COORDINATOR_STATUS> : Signature<class ClusterStatusRequest, class ClusterStatusResponse> {};
template <> struct SignatureOf<COORDINATOR_RETIRE> : Signature<class RetireRequest, class RetireResponse> {};
template <> struct SignatureOf<COORDINATOR_DRAIN> : Signature<class DrainRequest, class DrainResponse> {};
template <> struct SignatureOf<COORDINATOR_REPORT_RANK> : Signature<class RankReport, class RankResponse> {};
template <> struct SignatureOf<COORDINATOR_RESOLVE> : Signature<class ResolveRequest, class ResolveResponse> {};
template <> struct SignatureOf<COORDINATOR_LET_GO> : Signature<class LetGoRequest, class LetGoResponse> {};
template <> struct SignatureOf<COORDINATOR_ROUND> : Signature<class RoundReport, class RoundOrders> {};
template <> struct SignatureOf<COORDINATOR_BEGIN_UPDATE> : Signature<class BeginUpdateRequest, class BeginUpdateResponse> {};
template <> struct SignatureOf<COORDINATOR_UPDATE_STATUS> : Signature<class UpdateStatusRequest, class RoundStatus> {};
template <> struct SignatureOf<COORDINATOR_REPORT_JOINT> : Signature<class JointReport, class JointRoster> {};
template <> struct SignatureOf<COORDINATOR_PLAN_UPDATE> : Signature<class PlanUpdateRequest, class UpdatePlan> {};
template <> struct SignatureOf<AGENT_OPEN_DIRECT> : Signature<class OpenDirectRequest, class OpenDirectResponse> {};
template <> struct SignatureOf<AGENT_GET_PAGE> : Signature<class GetPageRequest, class GetPageResponse> {};
template <> struct SignatureOf<AGENT_OPEN_SESSION> : Signature<class OpenSessionRequest, class OpenSessionResponse> {};
template <> struct SignatureOf<AGENT_CLOSE_SESSION> : Signature<class CloseSessionRequest, class CloseSessionResponse> {};
template <> struct SignatureOf<AGENT_PROVE_RANGES> : Signature<class ProveRangesRequest, class ProveRangesResponse> {};
template <> struct SignatureOf<AGENT_STATUS> : Signature<class AgentStatusRequest, class AgentStatusResponse> {};
template <> struct SignatureOf<AGENT_CONNECT_PATHS> : Signature<class ConnectPathsRequest, class ConnectPathsResponse> {};
template <> struct SignatureOf<AGENT_WATCH_HAVE> : Signature<class WatchHaveRequest, class WatchHaveResponse> {};
template <> struct SignatureOf<AGENT_JOINT> : Signature<class JointRequest, class JointResponse> {};
template <> struct SignatureOf<LOCAL_PUBLISH> : Signature<class LocalPublishRequest, class TransferResult> {};
template <> struct SignatureOf<LOCAL_PULL> : Signature<class LocalPullRequest, class TransferResult> {};
template <> struct SignatureOf<LOCAL_RETIRE> : Signature<class LocalRetireRequest, class LocalRetireResponse> {};
template <> struct SignatureOf<LOCAL_PLAN> : Signature<class LocalPullRequest, class LocalPlanResponse> {};
template <> struct SignatureOf<LOCAL_VERIFY> : Signature<class LocalVerifyRequest, class LocalVerifyResponse> {};
template <> struct SignatureOf<LOCAL_RELEASE> : Signature<class LocalReleaseRequest, class LocalReleaseResponse> {};
template <> struct SignatureOf<LOCAL_SWITCH> : Signature<class LocalSwitchRequest, class LocalSwitchResponse> {};
template <> struct SignatureOf<DRILL> : Signature<class DrillRequest, class DrillResponse> {};
template <> struct SignatureOf<FIND_TRACE> : Signature<class TraceRequest, class TraceResponse> {};
template <> struct SignatureOf<WHOAMI> : Signature<class WhoamiRequest, class WhoamiResponse> {};
template <> struct SignatureOf<AUTHORIZE> : Signature<class AuthorizeRequest, class AuthorizeResponse> {};
// clang-format on

}  // namespace rekindle::proto

namespace rekindle::rpc {

template <proto::Method method>
using RequestOf = typename proto::SignatureOf<method>::Request;
template <proto::Method method>
using ResponseOf = typename proto::SignatureOf<method>::Response;

template <proto::Method method>
async::Task<Result<ResponseOf<method>>> call(std::shared_ptr<RpcClient> client,
                                             RequestOf<method> request,
                                             std::chrono::milliseconds deadline,
                                             trace::Context parent = {}) {
  CO_TRY(const std::string body,
         co_await client->call_raw(method, request.SerializeAsString(), deadline, {}, parent));
  co_return parse_body<ResponseOf<method>>(body);
}

// The sink of a streaming method; other handlers ignore it.
using Events = std::shared_ptr<EventSink>;

// `answer(Peer, Request, Events)` returns async::Task<Result<Response>>. It must outlive the
// server's calls.
template <proto::Method method, typename Answer>
void handle(RpcServer& server, Answer answer, bool local_only = false) {
  const auto run = [](Answer with, Peer peer, std::string body,
                      Events events) -> async::Task<Result<std::string>> {
    CO_TRY(RequestOf<method> request, parse_body<RequestOf<method>>(body));
    body.clear();
    CO_TRY(const ResponseOf<method> response,
           co_await with(std::move(peer), std::move(request), std::move(events)));
    co_return response.SerializeAsString();
  };
  server.handle(
      method,
      [run, answer = std::move(answer)](const Peer& peer, std::string body, const Events& events) {
        return run(answer, peer, std::move(body), events);
      },
      local_only);
}

}  // namespace rekindle::rpc
