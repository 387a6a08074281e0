#include "recovery/agent/local_service.h"

#include <utility>

#include "recovery/agent/local_wire.h"
#include "recovery/rpc/convert.h"

namespace rekindle::agent {

using async::Task;
using Sink = std::shared_ptr<rpc::EventSink>;

std::filesystem::path agent_socket(const std::filesystem::path& store_directory) {
  return store_directory / "agent" / "agent.sock";
}

namespace {

OnProgress stream_to(Sink sink) {
  return [sink = std::move(sink)](const Progress& progress) { sink->send(to_proto(progress)); };
}

Task<Result<std::string>> publish(AgentCore& core, std::string body, Sink sink) {
  CO_TRY(const auto request, rpc::parse_body<proto::LocalPublishRequest>(body));
  CO_TRY(auto parsed, from_proto(request));
  CO_TRY(const auto summary, co_await core.publish(std::move(parsed), stream_to(std::move(sink))));
  co_return to_proto(summary).SerializeAsString();
}

Task<Result<std::string>> pull_version(AgentCore& core, std::string body, Sink sink) {
  CO_TRY(const auto request, rpc::parse_body<proto::LocalPullRequest>(body));
  CO_TRY(auto parsed, from_proto(request));
  CO_TRY(const auto outcome, co_await core.pull(std::move(parsed), stream_to(std::move(sink))));
  co_return to_proto(outcome.summary).SerializeAsString();
}

Task<Result<std::string>> plan(AgentCore& core, std::string body) {
  CO_TRY(const auto request, rpc::parse_body<proto::LocalPullRequest>(body));
  CO_TRY(auto parsed, from_proto(request));
  CO_TRY(const auto summary, co_await core.plan(std::move(parsed)));
  co_return to_proto(summary).SerializeAsString();
}

Task<Result<std::string>> retire(AgentCore& core, std::string body) {
  CO_TRY(const auto request, rpc::parse_body<proto::LocalRetireRequest>(body));
  CO_TRY(const auto id, rpc::from_proto(request.id()));
  CO_TRY(const auto freed, co_await core.retire(id));
  proto::LocalRetireResponse response;
  response.set_freed_bytes(freed);
  co_return response.SerializeAsString();
}

Task<Result<std::string>> verify(AgentCore& core, std::string body) {
  CO_TRY(const auto request, rpc::parse_body<proto::LocalVerifyRequest>(body));
  CO_TRY(const auto id, rpc::from_proto(request.id()));
  CO_TRY(auto copies, co_await core.verify(id));
  proto::LocalVerifyResponse response;
  for (auto& copy : copies) *response.add_copies() = std::move(copy);
  co_return response.SerializeAsString();
}

}  // namespace

void LocalService::install(rpc::RpcServer& server) {
  constexpr bool kLocalOnly = true;
  server.handle(
      proto::LOCAL_PUBLISH,
      [this](const rpc::Peer&, std::string body, Sink sink) {
        return publish(core_, std::move(body), std::move(sink));
      },
      kLocalOnly);
  server.handle(
      proto::LOCAL_PULL,
      [this](const rpc::Peer&, std::string body, Sink sink) {
        return pull_version(core_, std::move(body), std::move(sink));
      },
      kLocalOnly);
  server.handle(
      proto::LOCAL_PLAN,
      [this](const rpc::Peer&, std::string body, Sink) { return plan(core_, std::move(body)); },
      kLocalOnly);
  server.handle(
      proto::LOCAL_RETIRE,
      [this](const rpc::Peer&, std::string body, Sink) { return retire(core_, std::move(body)); },
      kLocalOnly);
  server.handle(
      proto::LOCAL_VERIFY,
      [this](const rpc::Peer&, std::string body, Sink) { return verify(core_, std::move(body)); },
      kLocalOnly);
}

}  // namespace rekindle::agent
