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

Service::Service(boost::asio::any_io_executor executor, Core& core, Committer& committer,
                 Options options)
    : core_(core),
      committer_(committer),
      options_(std::move(options)),
      rounds_changed_(std::move(executor)) {}

Result<void> Service::may_answer() const {
  return options_.may_answer ? options_.may_answer() : Result<void>();
}

async::Task<Result<std::string>> Service::gated(async::Task<Result<std::string>> answer) {
  CO_TRY_VOID(may_answer());
  auto body = co_await std::move(answer);
  CO_TRY_VOID(may_answer());
  co_return body;
}

template <typename Request, typename Response>
void Service::serve(rpc::RpcServer& server, proto::Method method,
                    Result<Response> (Service::*handler)(const rpc::Peer&, const Request&)) {
  server.handle_at_once(
      method,
      [this, handler](const rpc::Peer& peer, const std::string& body) -> Result<std::string> {
        TRY_VOID(may_answer());
        TRY(const Request request, rpc::parse_body<Request>(body));
        TRY(const Response response, (this->*handler)(peer, request));
        return response.SerializeAsString();
      });
}

void Service::serve_waiting(
    rpc::RpcServer& server, proto::Method method,
    std::function<async::Task<Result<std::string>>(rpc::Peer, std::string)> handler) {
  server.handle(method,
                [this, handler = std::move(handler)](const rpc::Peer& peer, std::string body,
                                                     const std::shared_ptr<rpc::EventSink>&) {
                  return gated(handler(peer, std::move(body)));
                });
}

template <typename Request, typename Response>
void Service::serve_durably(rpc::RpcServer& server, proto::Method method,
                            async::Task<Result<Response>> (Service::*handler)(rpc::Peer, Request)) {
  const auto run = [](Service* self, decltype(handler) call, rpc::Peer peer,
                      std::string body) -> async::Task<Result<std::string>> {
    CO_TRY(Request request, rpc::parse_body<Request>(body));
    CO_TRY(const Response response, co_await (self->*call)(std::move(peer), std::move(request)));
    co_return response.SerializeAsString();
  };
  serve_waiting(server, method, [this, handler, run](rpc::Peer peer, std::string body) {
    return run(this, handler, std::move(peer), std::move(body));
  });
}

void Service::attach(rpc::RpcServer& server) {
  serve_durably(server, proto::COORDINATOR_REGISTER, &Service::enroll);
  serve_durably(server, proto::COORDINATOR_ANNOUNCE, &Service::announce);
  serve_durably(server, proto::COORDINATOR_PUBLISH, &Service::publish);
  serve_durably(server, proto::COORDINATOR_RETIRE, &Service::retire);
  serve_durably(server, proto::COORDINATOR_DRAIN, &Service::drain);
  serve(server, proto::COORDINATOR_HEARTBEAT, &Service::heartbeat);
  serve(server, proto::COORDINATOR_OPEN_PULL, &Service::open_pull);
  serve(server, proto::COORDINATOR_PULL_PROGRESS, &Service::pull_progress);
  serve(server, proto::COORDINATOR_CLOSE_PULL, &Service::close_pull);
  serve(server, proto::COORDINATOR_STATUS, &Service::status);
  serve(server, proto::COORDINATOR_REPORT_RANK, &Service::report_rank);
  serve(server, proto::COORDINATOR_RESOLVE, &Service::resolve);
  serve(server, proto::COORDINATOR_LET_GO, &Service::let_go);
  serve_waiting(server, proto::COORDINATOR_ROUND, [this](rpc::Peer peer, std::string body) {
    return report_round(std::move(peer), std::move(body));
  });
  serve_waiting(
      server, proto::COORDINATOR_BEGIN_UPDATE,
      [this](const rpc::Peer&, std::string body) { return begin_update(std::move(body)); });
  serve_waiting(
      server, proto::COORDINATOR_UPDATE_STATUS,
      [this](const rpc::Peer&, std::string body) { return update_status(std::move(body)); });
  server.on_peer_closed([this](const rpc::Peer& peer) {
    core_.disconnected(peer.node_id, peer.incarnation, peer.address, now());
  });
}

async::Task<Result<proto::RegisterResponse>> Service::enroll(rpc::Peer peer,
                                                             proto::RegisterRequest request) {
  CO_TRY_VOID(check_speaker(peer, request.node().incarnation()));
  if (request.node().node_id() != peer.node_id) {
    co_return fail(ErrorCode::kInvalid, "the connection says it is '{}', the registration '{}'",
                   peer.node_id, request.node().node_id());
  }
  CO_TRY(NodeInfo info, from_proto(request.node()));
  fill_host(info, peer);
  const auto ask = [&] {
    return core_.enroll(info, request.failure_domain(), request.highest_epoch(), peer.address,
                        now());
  };
  auto registered = ask();
  if (registered.commit != 0) {  // the epoch is raised first
    CO_TRY_VOID(co_await committer_.wait(registered.commit));
    registered = ask();
  }
  if (!registered.answer) {
    log::warn("node.refused", "node", info.node_id, "from", peer.address, "error",
              registered.answer.error());
    co_return fail(std::move(registered.answer).error());
  }
  log::info("node.registered", "node", info.node_id, "address", info.control_endpoint, "epoch",
            registered.answer->epoch);
  proto::RegisterResponse response;
  response.set_epoch(registered.answer->epoch);
  response.set_heartbeat_interval_ms(
      static_cast<std::uint32_t>(milliseconds(options_.timing.heartbeat_interval)));
  response.set_ttl_ms(static_cast<std::uint32_t>(milliseconds(options_.timing.dead_after)));
  response.set_seen_from(host_of(peer.address));
  co_return response;
}

Result<proto::HeartbeatResponse> Service::heartbeat(const rpc::Peer& peer,
                                                    const proto::HeartbeatRequest& request) {
  TRY_VOID(check_speaker(peer, request.incarnation()));
  TRY(const Heartbeat parsed, from_proto(request));
  TRY(const auto answer, core_.heartbeat(request.node_id(), peer.incarnation, parsed, now()));
  for (const auto& id : parsed.failed_fetches) {
    log::warn("replica.failed", "version", id.to_string(), "node", request.node_id());
  }
  return to_proto(answer);
}

async::Task<Result<proto::AnnounceResponse>> Service::announce(rpc::Peer peer,
                                                               proto::AnnounceRequest request) {
  CO_TRY_VOID(check_speaker(peer, request.incarnation()));
  std::vector<Holding> add;
  for (const auto& message : request.add()) {
    CO_TRY(Holding holding, from_proto(message));
    add.push_back(std::move(holding));
  }
  std::vector<HoldingKey> remove;
  for (const auto& message : request.remove()) {
    CO_TRY(ModelVersion id, rpc::from_proto(message.id()));
    remove.push_back({std::move(id), rpc::from_proto(message.layout())});
  }
  Announced announced = core_.announce(request.node_id(), peer.incarnation, request.epoch(),
                                       request.full(), std::move(add), remove, now());
  if (!announced.answer) co_return fail(std::move(announced.answer).error());
  const auto committed = co_await committer_.wait(announced.commit);
  proto::AnnounceResponse response;
  for (const auto& conflict : core_.finish(std::move(announced), committed)) {
    log::warn("announce.conflict", "node", request.node_id(), "version", conflict.id.to_string(),
              "why", conflict.why);
    auto& message = *response.add_conflicts();
    *message.mutable_id() = rpc::to_proto(conflict.id);
    message.set_why(conflict.why);
    message.set_again(conflict.again);
  }
  co_return response;
}

async::Task<Result<proto::PublishResponse>> Service::publish(rpc::Peer peer,
                                                             proto::PublishRequest request) {
  CO_TRY_VOID(check_speaker(peer, request.incarnation()));
  CO_TRY(const ModelVersion id, rpc::from_proto(request.id()));
  // A command that publishes into a store without an agent is no member; its claim counts all the
  // same.
  const bool member = peer.role == proto::ROLE_AGENT;
  auto claimed = core_.publish(
      member ? request.node_id() : "", peer.incarnation, id, rpc::from_proto(request.root()),
      rpc::from_proto(request.tensor_set()), request.checkpoint_bytes(), now(),
      request.has_replicas() ? std::optional(request.replicas()) : std::nullopt);
  CO_TRY_VOID(co_await committer_.wait(claimed.commit));
  CO_TRY(const std::uint64_t epoch, std::move(claimed.answer));
  log::info("version.claimed", "version", id.to_string(), "by", request.node_id());
  proto::PublishResponse response;
  response.set_epoch(epoch);
  co_return response;
}

Result<proto::ResolveResponse> Service::resolve(const rpc::Peer&,
                                                const proto::ResolveRequest& request) {
  TRY_VOID(check_model_name(request.model()));
  TRY(const ModelVersion id, core_.latest(request.model(), now()));
  proto::ResolveResponse response;
  *response.mutable_id() = rpc::to_proto(id);
  return response;
}

Result<proto::OpenPullResponse> Service::open_pull(const rpc::Peer& peer,
                                                   const proto::OpenPullRequest& request) {
  TRY_VOID(check_speaker(peer, request.puller().incarnation()));
  TRY(const OpenPullRequest parsed, from_proto(request));
  auto answer = core_.open_pull(parsed, now());
  if (!answer) {
    const auto verifying = core_.yet_to_verify(parsed);
    if (verifying.empty()) return fail(std::move(answer).error());
    proto::OpenPullResponse response;
    response.mutable_verifying()->Add(verifying.begin(), verifying.end());
    return response;
  }
  const OpenedPull& opened = *answer;
  log::info("pull.opened", "puller", parsed.puller.node_id, "version", opened.id.to_string(),
            "sources", opened.sources.size(), "queued_ms", milliseconds(opened.retry_after));
  return to_proto(opened, options_.issuer);
}

Result<proto::PullProgressResponse> Service::pull_progress(
    const rpc::Peer& peer, const proto::PullProgressRequest& request) {
  TRY_VOID(check_speaker(peer, request.puller().incarnation()));
  TRY(const PullProgress parsed, from_proto(request));
  TRY(const PullProgressAnswer answer, core_.pull_progress(parsed, now()));
  proto::PullProgressResponse response;
  for (const auto& offer : answer.sources)
    *response.add_sources() = to_proto(offer, options_.issuer);
  response.set_grace(answer.grace);
  return response;
}

Result<proto::ClosePullResponse> Service::close_pull(const rpc::Peer& peer,
                                                     const proto::ClosePullRequest& request) {
  TRY(const PullId id, PullId::from_bytes(request.pull_id()));
  TRY_VOID(core_.close_pull(id, peer.incarnation, now()));
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

async::Task<Result<proto::RetireResponse>> Service::retire(rpc::Peer peer,
                                                           proto::RetireRequest request) {
  CO_TRY(const ModelVersion id, rpc::from_proto(request.id()));
  std::optional<Duration> deadline;
  if (request.has_deadline_ms()) deadline = std::chrono::milliseconds(request.deadline_ms());
  auto retired = core_.retire(id, now(), deadline);
  CO_TRY_VOID(co_await committer_.wait(retired.commit));
  CO_TRY(const std::uint32_t nodes, std::move(retired.answer));
  log::info("version.retired", "version", id.to_string(), "by", peer.address, "nodes", nodes);
  proto::RetireResponse response;
  response.set_nodes(nodes);
  co_return response;
}

Result<proto::LetGoResponse> Service::let_go(const rpc::Peer& peer,
                                             const proto::LetGoRequest& request) {
  TRY_VOID(check_speaker(peer, request.incarnation()));
  TRY(const ModelVersion id, rpc::from_proto(request.id()));
  TRY_VOID(core_.let_go(request.node_id(), peer.incarnation, id, now()));
  log::info("version.may_go", "version", id.to_string(), "from", request.node_id());
  return proto::LetGoResponse();
}

async::Task<Result<proto::DrainResponse>> Service::drain(rpc::Peer peer,
                                                         proto::DrainRequest request) {
  CO_TRY_VOID(check_text("a node id", request.node_id()));
  auto drained = core_.drain(request.node_id(), !request.undo(), now());
  CO_TRY_VOID(co_await committer_.wait(drained.commit));
  CO_TRY(const Draining draining, std::move(drained.answer));
  log::info(request.undo() ? "node.undrained" : "node.drained", "node", request.node_id(), "by",
            peer.address, "pullers", draining.readers);
  co_return to_proto(draining);
}

Result<proto::RankResponse> Service::report_rank(const rpc::Peer& peer,
                                                 const proto::RankReport& request) {
  TRY_VOID(check_speaker(peer, request.incarnation()));
  TRY(const RankReport report, from_proto(request));
  TRY(const InstanceAnswer answer, core_.report_rank(report, now()));
  return to_proto(answer);
}

}  // namespace rekindle::coordinator
