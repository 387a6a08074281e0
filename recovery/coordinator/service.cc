#include "recovery/coordinator/service.h"

#include <chrono>
#include <utility>

#include "recovery/rpc/address.h"
#include "recovery/rpc/convert.h"
#include "src/base/log.h"

namespace rekindle::coordinator {

namespace {

TimePoint now() { return std::chrono::steady_clock::now(); }

// An agent that listens on every address does not know its own: it is where it called from.
void fill_host(NodeInfo& info, const rpc::Peer& peer) {
  auto parsed = rpc::HostPort::parse(info.control_endpoint);
  if (!parsed || (parsed->host != "0.0.0.0" && parsed->host != "::")) return;
  const std::string seen = host_of(peer.address);
  if (seen.empty()) return;
  parsed->host = seen;
  info.control_endpoint = parsed->to_string();
}

}  // namespace

Service::Service(Core& core, Issuer issuer, const Timing& timing)
    : core_(core), issuer_(std::move(issuer)), timing_(timing) {}

template <typename Request, typename Response>
void Service::serve(rpc::RpcServer& server, proto::Method method,
                    Result<Response> (Service::*handler)(const rpc::Peer&, const Request&)) {
  server.handle(method,
                [this, handler](const rpc::Peer& peer, std::string body,
                                std::shared_ptr<rpc::EventSink>) -> rpc::Task<Result<std::string>> {
                  CO_TRY(const Request request, rpc::parse_body<Request>(body));
                  CO_TRY(const Response response, (this->*handler)(peer, request));
                  co_return response.SerializeAsString();
                });
}

void Service::attach(rpc::RpcServer& server) {
  serve(server, proto::COORDINATOR_REGISTER, &Service::enroll);
  serve(server, proto::COORDINATOR_HEARTBEAT, &Service::heartbeat);
  serve(server, proto::COORDINATOR_ANNOUNCE, &Service::announce);
  serve(server, proto::COORDINATOR_PUBLISH, &Service::publish);
  serve(server, proto::COORDINATOR_OPEN_PULL, &Service::open_pull);
  serve(server, proto::COORDINATOR_PULL_PROGRESS, &Service::pull_progress);
  serve(server, proto::COORDINATOR_CLOSE_PULL, &Service::close_pull);
  serve(server, proto::COORDINATOR_STATUS, &Service::status);
  serve(server, proto::COORDINATOR_RETIRE, &Service::retire);
  server.on_peer_closed([this](const rpc::Peer& peer) {
    core_.disconnected(peer.node_id, peer.incarnation, peer.address, now());
  });
}

Result<proto::RegisterResponse> Service::enroll(const rpc::Peer& peer,
                                                const proto::RegisterRequest& request) {
  TRY_VOID(check_speaker(peer, request.node().incarnation()));
  if (request.node().node_id() != peer.node_id) {
    return fail(ErrorCode::kInvalid, "the connection says it is '{}', the registration '{}'",
                peer.node_id, request.node().node_id());
  }
  TRY(NodeInfo info, from_proto(request.node()));
  fill_host(info, peer);
  auto registered =
      core_.enroll(info, request.failure_domain(), request.highest_epoch(), peer.address, now());
  if (!registered) {
    log::warn("node.refused", "node", info.node_id, "from", peer.address, "error",
              registered.error());
    return fail(std::move(registered).error());
  }
  log::info("node.registered", "node", info.node_id, "address", info.control_endpoint, "epoch",
            registered->epoch);
  proto::RegisterResponse response;
  response.set_epoch(registered->epoch);
  response.set_heartbeat_interval_ms(
      static_cast<std::uint32_t>(milliseconds(timing_.heartbeat_interval)));
  response.set_ttl_ms(static_cast<std::uint32_t>(milliseconds(timing_.dead_after)));
  response.set_seen_from(host_of(peer.address));
  return response;
}

Result<proto::HeartbeatResponse> Service::heartbeat(const rpc::Peer& peer,
                                                    const proto::HeartbeatRequest& request) {
  TRY_VOID(check_speaker(peer, request.incarnation()));
  TRY(const auto answer, core_.heartbeat(request.node_id(), peer.incarnation, request.epoch(),
                                         request.progress(), now()));
  proto::HeartbeatResponse response;
  response.set_epoch(answer.epoch);
  response.set_coordinator_time_ms(answer.coordinator_time_ms);
  for (const auto& id : answer.retire) *response.add_retire() = rpc::to_proto(id);
  return response;
}

Result<proto::AnnounceResponse> Service::announce(const rpc::Peer& peer,
                                                  const proto::AnnounceRequest& request) {
  TRY_VOID(check_speaker(peer, request.incarnation()));
  std::vector<Holding> add;
  for (const auto& message : request.add()) {
    TRY(Holding holding, from_proto(message));
    add.push_back(std::move(holding));
  }
  std::vector<HoldingKey> remove;
  for (const auto& message : request.remove()) {
    TRY(ModelVersion id, rpc::from_proto(message.id()));
    remove.push_back({std::move(id), rpc::from_proto(message.layout())});
  }
  TRY(const auto conflicts, core_.announce(request.node_id(), peer.incarnation, request.epoch(),
                                           request.full(), std::move(add), remove, now()));
  proto::AnnounceResponse response;
  for (const auto& conflict : conflicts) {
    log::warn("announce.conflict", "node", request.node_id(), "version", conflict.id.to_string(),
              "why", conflict.why);
    auto& message = *response.add_conflicts();
    *message.mutable_id() = rpc::to_proto(conflict.id);
    message.set_why(conflict.why);
  }
  return response;
}

Result<proto::PublishResponse> Service::publish(const rpc::Peer& peer,
                                                const proto::PublishRequest& request) {
  TRY_VOID(check_speaker(peer, request.incarnation()));
  TRY(const ModelVersion id, rpc::from_proto(request.id()));
  // A command that publishes into a store without an agent is no member; its claim counts all the
  // same.
  const bool member = peer.role == proto::ROLE_AGENT;
  TRY(const std::uint64_t epoch,
      core_.publish(member ? request.node_id() : "", peer.incarnation, id,
                    rpc::from_proto(request.root()), rpc::from_proto(request.tensor_set()),
                    request.checkpoint_bytes(), now()));
  log::info("version.claimed", "version", id.to_string(), "by", request.node_id());
  proto::PublishResponse response;
  response.set_epoch(epoch);
  return response;
}

Result<proto::OpenPullResponse> Service::open_pull(const rpc::Peer& peer,
                                                   const proto::OpenPullRequest& request) {
  TRY_VOID(check_speaker(peer, request.puller().incarnation()));
  TRY(const OpenPullRequest parsed, from_proto(request));
  TRY(const OpenedPull opened, core_.open_pull(parsed, now()));
  log::info("pull.opened", "puller", parsed.puller.node_id, "version", opened.id.to_string(),
            "sources", opened.sources.size(), "queued_ms", milliseconds(opened.retry_after));
  return to_proto(opened, issuer_);
}

Result<proto::PullProgressResponse> Service::pull_progress(
    const rpc::Peer& peer, const proto::PullProgressRequest& request) {
  TRY_VOID(check_speaker(peer, request.puller().incarnation()));
  TRY(const PullProgress parsed, from_proto(request));
  TRY(const PullProgressAnswer answer, core_.pull_progress(parsed, now()));
  proto::PullProgressResponse response;
  for (const auto& offer : answer.sources) *response.add_sources() = to_proto(offer, issuer_);
  response.set_grace(answer.grace);
  return response;
}

Result<proto::ClosePullResponse> Service::close_pull(const rpc::Peer&,
                                                     const proto::ClosePullRequest& request) {
  TRY(const PullId id, PullId::from_bytes(request.pull_id()));
  core_.close_pull(id, now());
  log::info("pull.closed", "pull", id.hex(), "outcome",
            request.outcome().code() == proto::STATUS_OK ? "ok" : request.outcome().message());
  return proto::ClosePullResponse();
}

Result<proto::ClusterStatusResponse> Service::status(const rpc::Peer&,
                                                     const proto::ClusterStatusRequest&) {
  const TimePoint at = now();
  core_.tick(at);
  return make_status(core_, at);
}

Result<proto::RetireResponse> Service::retire(const rpc::Peer& peer,
                                              const proto::RetireRequest& request) {
  TRY(const ModelVersion id, rpc::from_proto(request.id()));
  TRY(const std::uint32_t nodes, core_.retire(id, now()));
  log::info("version.retired", "version", id.to_string(), "by", peer.address, "nodes", nodes);
  proto::RetireResponse response;
  response.set_nodes(nodes);
  return response;
}

}  // namespace rekindle::coordinator
