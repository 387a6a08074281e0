#include "recovery/coordinator/coordinator_service.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include <fmt/ranges.h>

#include "recovery/coordinator/coordinator_wire.h"
#include "recovery/rpc/address.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/peer_budgets.h"
#include "recovery/rpc/rights.h"
#include "recovery/trace/trace_wire.h"
#include "src/base/log.h"

namespace rekindle::coordinator {

namespace {

// An agent that listens on every address does not know its own. It gets the one it called from.
void fill_host(NodeInfo& info, const rpc::Peer& peer) {
  auto parsed = rpc::HostPort::parse(info.control_endpoint);
  if (!parsed || (parsed->host != "0.0.0.0" && parsed->host != "::")) return;
  const std::string seen = host_of(peer.address);
  if (seen.empty()) return;
  parsed->host = seen;
  info.control_endpoint = parsed->to_string();
}

// Which process or address has the node id of `info` before its lease has ended. "": none, or the
// same.
std::string holder_of(const Membership& members, const NodeInfo& info) {
  const auto found = members.all().find(info.node_id);
  if (found == members.all().end() || found->second.is_dead()) return "";
  const NodeInfo& holder = found->second.info;
  const bool same_process = holder.incarnation == info.incarnation;
  if (same_process && holder.control_endpoint == info.control_endpoint) return "";
  return fmt::format("{} at {} of {}, before its lease had ended",
                     same_process ? "the same process" : "another process", holder.control_endpoint,
                     holder.party.empty() ? std::string("nobody who proved it") : holder.party);
}

}  // namespace

CoordinatorService::CoordinatorService(Core& core, FleetWatch& watch, Committer& committer,
                                       Options options)
    : core_(core),
      watch_(watch),
      committer_(committer),
      options_(std::move(options)),
      gate_(options_.may_answer) {}

template <typename Request, typename Response>
void CoordinatorService::serve(rpc::RpcServer& server, proto::Method method,
                               Result<Response> (CoordinatorService::*handler)(const rpc::Peer&,
                                                                               const Request&)) {
  server.handle_at_once(
      method,
      [this, handler](const rpc::Peer& peer, const std::string& body) -> Result<std::string> {
        TRY_VOID(gate_.check());
        TRY(const Request request, rpc::parse_body<Request>(body));
        TRY(const Response response, (this->*handler)(peer, request));
        return response.SerializeAsString();
      });
}

template <typename Request, typename Response>
void CoordinatorService::serve_durably(
    rpc::RpcServer& server, proto::Method method,
    async::Task<Result<Response>> (CoordinatorService::*handler)(rpc::Peer, Request)) {
  const auto run = [](CoordinatorService* self, decltype(handler) call, rpc::Peer peer,
                      std::string body) -> async::Task<Result<std::string>> {
    CO_TRY(Request request, rpc::parse_body<Request>(body));
    CO_TRY(const Response response, co_await (self->*call)(std::move(peer), std::move(request)));
    co_return response.SerializeAsString();
  };
  gate_.serve(server, method, [this, handler, run](rpc::Peer peer, std::string body) {
    return run(this, handler, std::move(peer), std::move(body));
  });
}

void CoordinatorService::attach(rpc::RpcServer& server) {
  serve_durably(server, proto::COORDINATOR_REGISTER, &CoordinatorService::enroll);
  serve_durably(server, proto::COORDINATOR_ANNOUNCE, &CoordinatorService::announce);
  serve_durably(server, proto::COORDINATOR_PUBLISH, &CoordinatorService::publish);
  serve_durably(server, proto::COORDINATOR_RETIRE, &CoordinatorService::retire);
  serve_durably(server, proto::COORDINATOR_DRAIN, &CoordinatorService::drain);
  serve(server, proto::COORDINATOR_HEARTBEAT, &CoordinatorService::heartbeat);
  serve(server, proto::COORDINATOR_OPEN_PULL, &CoordinatorService::open_pull);
  serve(server, proto::COORDINATOR_PULL_PROGRESS, &CoordinatorService::pull_progress);
  serve(server, proto::COORDINATOR_CLOSE_PULL, &CoordinatorService::close_pull);
  serve(server, proto::COORDINATOR_STATUS, &CoordinatorService::status);
  serve(server, proto::COORDINATOR_REPORT_RANK, &CoordinatorService::report_rank);
  serve(server, proto::COORDINATOR_RESOLVE, &CoordinatorService::resolve);
  serve(server, proto::COORDINATOR_LET_GO, &CoordinatorService::let_go);
  if (options_.access != nullptr) {
    serve(server, proto::WHOAMI, &CoordinatorService::whoami);
    serve(server, proto::AUTHORIZE, &CoordinatorService::authorize);
  }
  if (options_.tracer != nullptr) {
    serve(server, proto::FIND_TRACE, &CoordinatorService::find_trace);
  }
  server.on_peer_closed([this](const rpc::Peer& peer) {
    core_.disconnected(peer.node_id, peer.incarnation, peer.address, steady_now());
  });
}

async::Task<Result<proto::RegisterResponse>> CoordinatorService::enroll(
    rpc::Peer peer, proto::RegisterRequest request) {
  CO_TRY_VOID(check_speaker(peer, request.node().incarnation()));
  if (request.node().node_id() != peer.node_id) {
    co_return fail(ErrorCode::kInvalid, "the connection says it is '{}', the registration '{}'",
                   peer.node_id, request.node().node_id());
  }
  CO_TRY(NodeInfo info, from_proto(request.node()));
  // Pullers go there.
  CO_TRY_VOID(rpc::HostPort::parse(info.control_endpoint));
  set_party(info, peer);
  fill_host(info, peer);
  std::string replaces;
  const auto ask = [&] {
    replaces = holder_of(core_.fleet().members, info);
    return core_.enroll(info, request.failure_domain(), request.highest_epoch(), peer.address,
                        steady_now());
  };
  auto registered = ask();
  // With a commit the epoch is being raised first.
  if (registered.commit != 0) {
    CO_TRY_VOID(co_await committer_.wait(registered.commit));
    registered = ask();
  }
  if (!registered.answer) {
    if (may_log(peer)) {
      log::warn("node.refused", "node", info.node_id, "from", peer.address, "error",
                registered.answer.error());
    }
    co_return fail(std::move(registered.answer).error());
  }
  if (may_log(peer)) {
    log::info("node.registered", "node", info.node_id, "address", info.control_endpoint, "epoch",
              registered.answer->epoch);
  }
  // A member that registers again and again must not fill the audit log.
  if (registered.answer->is_new && options_.access != nullptr) {
    options_.access->note(rpc::audit_entry(peer, "register", info.node_id, {}));
  }
  if (!replaces.empty()) note_replacement(peer, info, replaces);
  proto::RegisterResponse response;
  response.set_epoch(registered.answer->epoch);
  response.set_heartbeat_interval_ms(
      static_cast<std::uint32_t>(milliseconds(options_.timing.heartbeat_interval)));
  response.set_ttl_ms(static_cast<std::uint32_t>(milliseconds(options_.timing.dead_after)));
  response.set_seen_from(host_of(peer.address));
  co_return response;
}

void CoordinatorService::note_replacement(const rpc::Peer& peer, const NodeInfo& info,
                                          const std::string& replaces) {
  if (may_log(peer)) {
    log::warn("node.replaced", "node", info.node_id, "by", info.control_endpoint, "replaces",
              replaces);
  }
  if (options_.access == nullptr) return;
  auto entry = rpc::audit_entry(peer, "replace_node", info.node_id, {});
  entry.result = "replaces " + replaces;
  options_.access->note_some(std::move(entry));
}

Result<proto::HeartbeatResponse> CoordinatorService::heartbeat(
    const rpc::Peer& peer, const proto::HeartbeatRequest& request) {
  TRY_VOID(check_speaker(peer, request.node_id(), request.incarnation()));
  TRY(const Heartbeat parsed, from_proto(request));
  TRY(const auto answer,
      core_.heartbeat(request.node_id(), peer.incarnation, parsed, steady_now()));
  TRY(auto told, events_from(request));
  watch_.told(request.node_id(), peer.incarnation, admissible(peer, std::move(told)));
  for (const auto& id : parsed.failed_fetches) {
    if (!may_log(peer)) break;
    log::warn("replica.failed", "version", id.to_string(), "node", request.node_id());
  }
  proto::HeartbeatResponse response = to_proto(answer);
  response.set_has_rights(options_.access != nullptr && options_.access->has_rights());
  return response;
}

// Else a member could fill the disk.
bool CoordinatorService::may_log(const rpc::Peer& peer) {
  constexpr double kLinesPerSecond = 4;
  constexpr double kMostLines = 256;
  return rates_
      .take(rpc::budget_key(peer) + " " + peer.node_id, "log", 1, kLinesPerSecond, kMostLines,
            steady_now())
      .has_value();
}

// A host tells what it and its workers did with models that it may have, and not too much.
std::vector<FleetEvent> CoordinatorService::admissible(const rpc::Peer& peer,
                                                       std::vector<FleetEvent> told) {
  constexpr double kEventsPerSecond = 64;
  constexpr double kMostEvents = 1024;
  const auto principals = rpc::principals_of(peer);
  std::erase_if(told, [&](const FleetEvent& event) {
    return FleetWatch::is_kind_of_coordinator(event.kind) ||
           (event.id && options_.access != nullptr &&
            !options_.access->may_hold(principals, event.id->model));
  });
  const auto taken =
      rates_.take(rpc::budget_key(peer) + " " + peer.node_id, "events",
                  static_cast<double>(told.size()), kEventsPerSecond, kMostEvents, steady_now());
  if (!taken) told.clear();
  return told;
}

void CoordinatorService::note_announced(const rpc::Peer& peer,
                                        const std::vector<ModelVersion>& unknown) {
  if (options_.access == nullptr) return;
  for (const ModelVersion& id : unknown) {
    if (core_.fleet().catalog.find(id) == nullptr) continue;
    options_.access->note(rpc::audit_entry(peer, "announce", id.to_string(), {}));
  }
}

async::Task<Result<proto::AnnounceResponse>> CoordinatorService::announce(
    rpc::Peer peer, proto::AnnounceRequest request) {
  CO_TRY_VOID(check_speaker(peer, request.node_id(), request.incarnation()));
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
  std::vector<ModelVersion> unknown;
  for (const Holding& holding : add) {
    if (core_.fleet().catalog.find(holding.id) == nullptr) unknown.push_back(holding.id);
  }
  Announced announced = core_.announce(request.node_id(), peer.incarnation, request.epoch(),
                                       request.full(), std::move(add), remove, steady_now());
  if (!announced.answer) co_return fail(std::move(announced.answer).error());
  const auto committed = co_await committer_.wait(announced.commit);
  proto::AnnounceResponse response;
  for (const auto& conflict : core_.finish(std::move(announced), committed)) {
    if (may_log(peer)) {
      log::warn("announce.conflict", "node", request.node_id(), "version", conflict.id.to_string(),
                "why", conflict.why);
    }
    auto& message = *response.add_conflicts();
    *message.mutable_id() = rpc::to_proto(conflict.id);
    message.set_why(conflict.why);
    message.set_again(conflict.again);
  }
  note_announced(peer, unknown);
  co_return response;
}

async::Task<Result<proto::PublishResponse>> CoordinatorService::publish(
    rpc::Peer peer, proto::PublishRequest request) {
  CO_TRY_VOID(check_speaker(peer, request.node_id(), request.incarnation()));
  CO_TRY(Publication publication, from_proto(request));
  publication.claimant = rpc::budget_key(peer);
  // A command that publishes into a store without an agent is no member. Its claim counts, too.
  const bool member = peer.role == proto::ROLE_AGENT;
  auto claimed =
      core_.publish(member ? peer.node_id : "", peer.incarnation, publication, steady_now());
  CO_TRY_VOID(co_await committer_.wait(claimed.commit));
  CO_TRY(const std::uint64_t epoch, std::move(claimed.answer));
  log::info("version.claimed", "version", publication.id.to_string(), "by", request.node_id(),
            "parts", publication.parts.size());
  proto::PublishResponse response;
  response.set_epoch(epoch);
  co_return response;
}

Result<proto::ResolveResponse> CoordinatorService::resolve(const rpc::Peer&,
                                                           const proto::ResolveRequest& request) {
  TRY_VOID(check_model_name(request.model()));
  TRY(const ModelVersion id, core_.latest(request.model(), steady_now()));
  proto::ResolveResponse response;
  *response.mutable_id() = rpc::to_proto(id);
  return response;
}

Result<proto::OpenPullResponse> CoordinatorService::open_pull(
    const rpc::Peer& peer, const proto::OpenPullRequest& request) {
  TRY_VOID(check_speaker(peer, request.puller().node_id(), request.puller().incarnation()));
  TRY(OpenPullRequest parsed, from_proto(request));
  set_party(parsed.puller, peer);
  auto answer = core_.open_pull(parsed, steady_now());
  if (!answer) {
    const auto verifying = core_.resolver().yet_to_verify(parsed);
    if (verifying.empty()) return fail(std::move(answer).error());
    proto::OpenPullResponse response;
    response.mutable_verifying()->Add(verifying.begin(), verifying.end());
    return response;
  }
  const OpenedPull& opened = *answer;
  if (may_log(peer)) {
    log::info("pull.opened", "puller", parsed.puller.node_id, "version", opened.id.to_string(),
              "sources", opened.sources.size(), "queued_ms", milliseconds(opened.retry_after));
  }
  return to_proto(opened, options_.signer);
}

Result<proto::PullProgressResponse> CoordinatorService::pull_progress(
    const rpc::Peer& peer, const proto::PullProgressRequest& request) {
  TRY_VOID(check_speaker(peer, request.puller().node_id(), request.puller().incarnation()));
  TRY(PullProgress parsed, from_proto(request));
  set_party(parsed.puller, peer);
  TRY(const PullProgressAnswer answer, core_.pull_progress(parsed, steady_now()));
  proto::PullProgressResponse response;
  for (const auto& offer : answer.sources)
    *response.add_sources() = to_proto(offer, options_.signer);
  response.set_grace(answer.grace);
  return response;
}

Result<proto::ClosePullResponse> CoordinatorService::close_pull(
    const rpc::Peer& peer, const proto::ClosePullRequest& request) {
  if (request.pull_id().empty()) {
    if (takes_unopened(peer, request.spans_size())) keep_spans(peer, request);
    return proto::ClosePullResponse();
  }
  TRY(const PullId id, PullId::from_bytes(request.pull_id()));
  std::string why;
  if (request.outcome().code() != proto::STATUS_OK) {
    why = request.outcome().message().empty() ? "failed" : request.outcome().message();
  }
  const bool ran = core_.pulls().table().all().contains(id);
  watch_.pull_closes(core_, id, peer.incarnation, cut(why), steady_now(),
                     std::chrono::system_clock::now());
  TRY_VOID(core_.close_pull(id, peer.incarnation, steady_now()));
  if (ran) keep_spans(peer, request);
  if (may_log(peer)) {
    log::info("pull.closed", "pull", id.hex(), "outcome", why.empty() ? "ok" : cut(why));
  }
  return proto::ClosePullResponse();
}

// Who has no right at all can have pulled nothing.
bool CoordinatorService::takes_unopened(const rpc::Peer& peer, int spans) {
  if (options_.access != nullptr && options_.access->whoami(peer).rights().empty()) return false;
  const TimePoint now = steady_now();
  return unopened_of_.take(rpc::budget_key(peer), "spans", spans, 1, 128, now) &&
         unopened_.take(static_cast<std::uint64_t>(spans), now);
}

// They are those of the puller and of a pull, whatever they say.
void CoordinatorService::keep_spans(const rpc::Peer& peer, const proto::ClosePullRequest& request) {
  if (options_.tracer == nullptr) return;
  const int most = std::min(request.spans_size(), static_cast<int>(trace::kMostPullSpans));
  for (int i = 0; i < most; ++i) {
    auto span = trace::from_proto(request.spans(i));
    if (!span) continue;
    span->node = peer.node_id;
    std::erase_if(span->attributes, [](const trace::Attribute& attribute) {
      return attribute.key == trace::kOperation &&
             attribute.value != trace::Attribute{"", "pull"}.value;
    });
    options_.tracer->adopt(std::move(*span));
  }
}

// Names the agents that have spans of their own.
Result<proto::TraceResponse> CoordinatorService::find_trace(const rpc::Peer&,
                                                            const proto::TraceRequest& request) {
  TRY(auto response, trace::find_trace(*options_.tracer, request));
  std::set<std::string> named;
  for (const auto& span : response.spans()) {
    named.insert(span.node());
    for (const auto& attribute : span.attributes()) {
      if (attribute.key() == trace::kSource) named.insert(attribute.text());
      if (attribute.key() != trace::kSources) continue;
      std::istringstream sources(attribute.text());
      for (std::string source; sources >> source;) named.insert(source);
    }
  }
  for (const auto& [node_id, member] : core_.fleet().members.all()) {
    if (named.contains(node_id)) *response.add_nodes() = to_proto(member.info);
  }
  return response;
}

Result<proto::WhoamiResponse> CoordinatorService::whoami(const rpc::Peer& peer,
                                                         const proto::WhoamiRequest&) {
  return options_.access->whoami(peer);
}

Result<proto::AuthorizeResponse> CoordinatorService::authorize(
    const rpc::Peer& peer, const proto::AuthorizeRequest& request) {
  return options_.access->authorize(peer, request);
}

Result<proto::ClusterStatusResponse> CoordinatorService::status(
    const rpc::Peer& peer, const proto::ClusterStatusRequest& request) {
  proto::ClusterStatusResponse response;
  if (request.has_events()) {
    *response.mutable_events() = events_after(core_, watch_, request.events().after());
  } else {
    const TimePoint at = steady_now();
    core_.tick(at);
    response = make_status(core_, at);
  }
  if (options_.access != nullptr) options_.access->hide_unreadable(peer, response);
  return response;
}

async::Task<Result<proto::RetireResponse>> CoordinatorService::retire(
    rpc::Peer peer, proto::RetireRequest request) {
  CO_TRY(const ModelVersion id, rpc::from_proto(request.id()));
  std::optional<Duration> deadline;
  if (request.has_deadline_ms()) deadline = std::chrono::milliseconds(request.deadline_ms());
  auto retired = core_.retire(id, steady_now(), deadline);
  CO_TRY_VOID(co_await committer_.wait(retired.commit));
  CO_TRY(const std::uint32_t nodes, std::move(retired.answer));
  log::info("version.retired", "version", id.to_string(), "by", peer.address, "nodes", nodes);
  proto::RetireResponse response;
  response.set_nodes(nodes);
  co_return response;
}

Result<proto::LetGoResponse> CoordinatorService::let_go(const rpc::Peer& peer,
                                                        const proto::LetGoRequest& request) {
  TRY_VOID(check_speaker(peer, request.node_id(), request.incarnation()));
  TRY(const ModelVersion id, rpc::from_proto(request.id()));
  TRY_VOID(core_.let_go(request.node_id(), peer.incarnation, id, steady_now()));
  log::info("version.may_go", "version", id.to_string(), "from", request.node_id());
  return proto::LetGoResponse();
}

async::Task<Result<proto::DrainResponse>> CoordinatorService::drain(rpc::Peer peer,
                                                                    proto::DrainRequest request) {
  CO_TRY_VOID(check_text("a node id", request.node_id()));
  auto drained = core_.drain(request.node_id(), !request.undo(), steady_now());
  CO_TRY_VOID(co_await committer_.wait(drained.commit));
  CO_TRY(const Draining draining, std::move(drained.answer));
  log::info(request.undo() ? "node.undrained" : "node.drained", "node", request.node_id(), "by",
            peer.address, "pullers", draining.readers);
  co_return to_proto(draining);
}

Result<proto::RankResponse> CoordinatorService::report_rank(const rpc::Peer& peer,
                                                            const proto::RankReport& request) {
  TRY_VOID(check_speaker(peer, request.node_id(), request.incarnation()));
  TRY(const RankReport report, from_proto(request));
  const auto served = core_.instances().all().find(report.instance);
  if (served != core_.instances().all().end() && options_.access != nullptr &&
      !options_.access->may_read(peer, served->second.id.model)) {
    return fail(ErrorCode::kDenied,
                "instance '{}' serves a model which {} may not read; choose another name",
                report.instance, fmt::join(rpc::principals_of(peer), " "));
  }
  TRY(const InstanceAnswer answer, core_.report_rank(report, steady_now()));
  return to_proto(answer);
}

}  // namespace rekindle::coordinator
