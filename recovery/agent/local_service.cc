#include "recovery/agent/local_service.h"

#include <utility>

#include "recovery/agent/local_wire.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"

namespace rekindle::agent {

using async::Task;
std::filesystem::path agent_socket(const std::filesystem::path& store_directory) {
  return store_directory / "agent" / "agent.sock";
}

namespace {

OnProgress stream_to(rpc::Events events) {
  return
      [events = std::move(events)](const Progress& progress) { events->send(to_proto(progress)); };
}

Task<Result<proto::TransferResult>> publish(AgentCore& core, proto::LocalPublishRequest request,
                                            rpc::Events events) {
  CO_TRY(auto parsed, from_proto(request));
  CO_TRY(const auto summary,
         co_await core.publish(std::move(parsed), stream_to(std::move(events))));
  co_return to_proto(summary);
}

Task<Result<proto::TransferResult>> pull_version(AgentCore& core, proto::LocalPullRequest request,
                                                 rpc::Events events) {
  CO_TRY(auto parsed, from_proto(request));
  CO_TRY(const auto outcome, co_await core.pull(std::move(parsed), stream_to(std::move(events))));
  co_return to_proto(outcome.summary);
}

Task<Result<proto::LocalPlanResponse>> plan(AgentCore& core, proto::LocalPullRequest request,
                                            rpc::Events) {
  CO_TRY(auto parsed, from_proto(request));
  CO_TRY(const auto summary, co_await core.plan(std::move(parsed)));
  co_return to_proto(summary);
}

Task<Result<proto::LocalRetireResponse>> retire(AgentCore& core, proto::LocalRetireRequest request,
                                                rpc::Events) {
  CO_TRY(const auto id, rpc::from_proto(request.id()));
  proto::LocalRetireResponse response;
  CO_TRY(const auto freed, co_await core.retire(id));
  response.set_freed_bytes(freed);
  co_return response;
}

Task<Result<proto::LocalVerifyResponse>> verify(AgentCore& core, proto::LocalVerifyRequest request,
                                                rpc::Events) {
  CO_TRY(const auto id, rpc::from_proto(request.id()));
  CO_TRY(auto copies, co_await core.verify(id));
  proto::LocalVerifyResponse response;
  for (auto& copy : copies) *response.add_copies() = std::move(copy);
  co_return response;
}

// Only processes of our own user on this host may call it.
template <proto::Method method, typename Answer>
void handle_locally(rpc::RpcServer& server, AgentCore& core, Answer answer) {
  rpc::handle<method>(
      server,
      [&core, answer](const rpc::Peer&, rpc::RequestOf<method> request, rpc::Events events) {
        return answer(core, std::move(request), std::move(events));
      },
      /*local_only=*/true);
}

}  // namespace

void LocalService::install(rpc::RpcServer& server) {
  handle_locally<proto::LOCAL_PUBLISH>(server, core_, publish);
  handle_locally<proto::LOCAL_PULL>(server, core_, pull_version);
  handle_locally<proto::LOCAL_PLAN>(server, core_, plan);
  handle_locally<proto::LOCAL_RETIRE>(server, core_, retire);
  handle_locally<proto::LOCAL_VERIFY>(server, core_, verify);
}

}  // namespace rekindle::agent
