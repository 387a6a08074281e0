#include "recovery/agent/peer_service.h"

#include <algorithm>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"
#include "recovery/rpc/grants.h"
#include "recovery/rpc/methods.h"
#include "src/async/offload.h"
#include "src/async/task.h"
#include "src/base/log.h"

namespace rekindle::agent {

using async::Task;

namespace {

constexpr std::uint64_t kDirectGrantMs = 3'600'000;
constexpr std::uint32_t kPathsOffered = 16;
constexpr std::chrono::milliseconds kVerifyPatience{1000};  // a puller waits 1.5 s for a session

// Our own monotonic clock as a grant issuer (--from).
std::uint64_t own_clock_ms() {
  return static_cast<std::uint64_t>(
      milliseconds(std::chrono::steady_clock::now().time_since_epoch()));
}

}  // namespace

PeerService::PeerService(const rpc::Identity& identity, ServedVersions& served,
                         GrantClock& grant_clock, transport::SegmentRegistry& registry,
                         std::vector<transport::Server*> servers, WorkerPool& digest_pool,
                         WorkerPool& blocking_pool, PeerServiceOptions options)
    : identity_(identity),
      served_(served),
      grant_clock_(grant_clock),
      registry_(registry),
      servers_(std::move(servers)),
      digest_pool_(digest_pool),
      blocking_pool_(blocking_pool),
      options_(std::move(options)) {}

void PeerService::install(rpc::RpcServer& server) {
  const auto answer = [this](auto method) {
    return [this, method](rpc::Peer peer, auto request, rpc::Events events) {
      return (this->*method)(std::move(peer), std::move(request), std::move(events));
    };
  };
  rpc::handle<proto::AGENT_OPEN_DIRECT>(server, answer(&PeerService::open_direct));
  rpc::handle<proto::AGENT_GET_PAGE>(server, answer(&PeerService::get_page));
  rpc::handle<proto::AGENT_OPEN_SESSION>(server, answer(&PeerService::open_session));
  rpc::handle<proto::AGENT_CONNECT_PATHS>(server, answer(&PeerService::connect_paths));
  rpc::handle<proto::AGENT_CLOSE_SESSION>(server, answer(&PeerService::close_session));
  rpc::handle<proto::AGENT_PROVE_RANGES>(server, answer(&PeerService::prove_ranges));
  rpc::handle<proto::AGENT_WATCH_HAVE>(server, answer(&PeerService::watch_have));
  server.on_peer_closed([this](const rpc::Peer& peer) { on_disconnect(peer); });
}

std::string PeerService::connection_of(const rpc::Peer& peer) {
  return peer.incarnation.hex() + " " + peer.address;
}

Task<Result<proto::OpenDirectResponse>> PeerService::open_direct(rpc::Peer peer,
                                                                 proto::OpenDirectRequest request,
                                                                 rpc::Events) {
  CO_TRY_VOID(check_model_name(request.model()));
  const auto newest = served_.newest_version(request.model());
  const std::uint64_t version = request.latest() ? newest.value_or(0) : request.version();
  const ModelVersion id{request.model(), version};
  const bool named = newest || !request.latest();
  auto copies = named ? served_.find(id) : std::vector<const Served*>{};
  std::vector<CopyKey> keys;
  for (const Served* copy : copies) keys.push_back(key_of(*copy->manifest));
  // The verification of all of them begins; who asks waits for it where none can be read.
  std::optional<Error> unfit;
  bool verifying = false;
  for (const CopyKey& key : keys) {
    auto verified = co_await require_verified(key, std::chrono::milliseconds(0));
    if (verified) continue;
    verifying = verifying || verified.error().code() == ErrorCode::kUnavailable;
    unfit = std::move(verified).error();
  }
  copies.clear();
  for (const CopyKey& key : keys) {  // what came and went meanwhile
    const Served* copy = served_.find(key);
    if (copy != nullptr && (!copy->complete() || copy->verified())) copies.push_back(copy);
  }
  if (copies.empty() && verifying) {
    proto::OpenDirectResponse response;
    response.set_verifying(true);
    co_return response;
  }
  if (copies.empty() && unfit) co_return fail(std::move(*unfit));
  if (copies.empty()) {
    co_return fail(ErrorCode::kNotFound, "NO_SOURCE: {} does not hold {}{}", identity_.node_id,
                   request.latest() ? request.model() : id.to_string(),
                   newest ? fmt::format(" (newest here: {})", *newest) : "");
  }
  const Checkpoint& checkpoint = copies.front()->checkpoint();
  proto::OpenDirectResponse response;
  *response.mutable_id() = rpc::to_proto(id);
  *response.mutable_root() = rpc::to_proto(checkpoint.root);
  *response.mutable_tensor_set() = rpc::to_proto(checkpoint.tensors.digest());
  response.set_checkpoint_bytes(checkpoint.tensors.total_bytes());
  grant_clock_.observe(identity_.incarnation, own_clock_ms(), std::chrono::steady_clock::now());
  for (const Served* copy : copies) {
    auto* source = response.add_sources();
    source->mutable_node()->set_node_id(identity_.node_id);
    source->mutable_node()->set_incarnation(identity_.incarnation.to_bytes());
    *source->mutable_layout() = rpc::to_proto(copy->manifest->layout.digest());
    source->set_complete(copy->complete());
    if (!copy->complete()) {
      *source->mutable_held() = rpc::to_proto(copy->held->snapshot().ranges());
    }
    source->set_payload_bytes(copy->manifest->layout.payload_bytes());
    auto* grant = source->mutable_grant();
    grant->set_puller_incarnation(peer.incarnation.to_bytes());
    grant->set_source_incarnation(identity_.incarnation.to_bytes());
    *grant->mutable_root() = rpc::to_proto(checkpoint.root);
    grant->set_issuer(identity_.incarnation.to_bytes());
    grant->set_expiry_ms(own_clock_ms() + kDirectGrantMs);
    grant->set_serial(next_serial_++);
    rpc::sign_grant(*grant, identity_.secret);
  }
  co_return response;
}

// What is being filled shows only what has verified.
Task<Result<void>> PeerService::require_verified(CopyKey key, std::chrono::milliseconds patience) {
  const Served* served = served_.find(key);
  if (served == nullptr || !served->complete() || !options_.require_verified) {
    co_return Result<void>();
  }
  co_return co_await options_.require_verified(served->stored, patience);
}

Result<void> PeerService::admit(const rpc::Peer& peer, const proto::OpenSessionRequest& request,
                                const Served*& served) const {
  TRY(const auto meant, Incarnation::from_bytes(request.source_incarnation()));
  if (meant != identity_.incarnation) {
    return fail(ErrorCode::kStale,
                "{} has restarted: this is another incarnation; look it up again",
                identity_.node_id);
  }
  const Digest root = rpc::from_proto(request.root());
  TRY_VOID(rpc::check_grant(request.grant(), identity_.secret,
                            {peer.incarnation, identity_.incarnation, root}));
  TRY(const auto issuer, Incarnation::from_bytes(request.grant().issuer()));
  TRY_VOID(grant_clock_.check(issuer, request.grant().epoch(), request.grant().expiry_ms(),
                              std::chrono::steady_clock::now()));
  TRY(const ModelVersion id, rpc::from_proto(request.id()));
  served = served_.find({id, root, rpc::from_proto(request.layout())});
  if (served == nullptr) {
    return fail(ErrorCode::kStale, "{} no longer holds {} in this layout: look it up again",
                identity_.node_id, id.to_string());
  }
  if (served_.draining().contains(id)) {
    return fail(ErrorCode::kStale, "{} is being retired on {}: pull another version",
                id.to_string(), identity_.node_id);
  }
  if (sessions_.size() >= options_.max_pullers) {
    return fail(ErrorCode::kUnavailable,
                "{} serves {} pullers already: try another source, or again later",
                identity_.node_id, sessions_.size());
  }
  return {};
}

std::uint32_t PeerService::session_count(const ModelVersion& id) const {
  return static_cast<std::uint32_t>(std::ranges::count_if(
      sessions_, [&](const auto& session) { return session.second.copy.id == id; }));
}

Task<Result<proto::OpenSessionResponse>> PeerService::open_session(
    rpc::Peer peer, proto::OpenSessionRequest request, rpc::Events) {
  executor_ = co_await boost::asio::this_coro::executor;
  const Served* served = nullptr;
  CO_TRY_VOID(admit(peer, request, served));
  const CopyKey wanted_copy = key_of(*served->manifest);
  CO_TRY_VOID(co_await require_verified(wanted_copy, kVerifyPatience));
  CO_TRY_VOID(admit(peer, request, served));  // again: it may have gone meanwhile

  transport::Session session;
  session.token = SessionToken::random();
  session.puller = peer.node_id;
  session.regions = served->regions;
  std::sort(session.regions.begin(), session.regions.end());
  const std::uint64_t granted = request.grant().max_bytes_per_second();
  const std::uint64_t own = options_.max_bytes_per_second;
  session.max_bytes_per_second =
      granted == 0 || own == 0 ? std::max(granted, own) : std::min(granted, own);

  proto::OpenSessionResponse response;
  response.set_token(session.token.to_bytes());
  response.set_max_bytes_per_second(session.max_bytes_per_second);
  for (std::size_t i = 0; i < served->regions.size(); ++i) {
    auto* region = response.add_regions();
    region->set_segment(static_cast<std::uint32_t>(i));
    region->set_region(served->regions[i].region);
    region->set_generation(served->regions[i].generation);
    region->set_size_bytes(served->segments[i]->bytes().size());
  }
  for (const auto& wanted : request.transports()) {
    for (const auto* server : servers_) {
      if (server->transport() != wanted) continue;
      auto* offer = response.add_offers();
      offer->set_transport(wanted);
      const bool as_told = wanted == "tcp" && !options_.tcp_endpoint.empty();
      offer->set_endpoint(as_told ? options_.tcp_endpoint
                                  : server->endpoint(options_.advertised_host()));
      offer->set_max_paths(kPathsOffered);
    }
  }
  if (response.offers_size() == 0) {
    co_return fail(ErrorCode::kUnavailable, "{} serves none of the transports asked for",
                   identity_.node_id);
  }
  const CopyKey copy = key_of(*served->manifest);
  log::info("session.open", "puller", peer.node_id, "address", peer.address, "version",
            copy.id.to_string());
  sessions_[session.token] = {connection_of(peer), copy, peer.node_id, false};
  registry_.admit(std::move(session));
  co_return response;
}

Task<Result<proto::ConnectPathsResponse>> PeerService::connect_paths(
    rpc::Peer peer, proto::ConnectPathsRequest request, rpc::Events) {
  CO_TRY(const auto token, SessionToken::from_bytes(request.token()));
  const auto session = sessions_.find(token);
  if (session == sessions_.end() || session->second.connection != connection_of(peer)) {
    co_return fail(ErrorCode::kDenied, "no such session: open one first");
  }
  const auto server = std::find_if(
      servers_.begin(), servers_.end(),
      [&](const transport::Server* s) { return s->transport() == request.transport(); });
  if (server == servers_.end()) {
    co_return fail(ErrorCode::kUnavailable, "{} does not serve over {}", identity_.node_id,
                   request.transport());
  }
  // Named, not a temporary: g++ 12 destroys captures of a temporary inside co_await twice.
  auto work = [server = *server, token, asked = std::move(*request.mutable_request())] {
    return server->accept(token, asked);
  };
  CO_TRY(auto answer, co_await async::offload(blocking_pool_, std::move(work)));
  proto::ConnectPathsResponse response;
  response.set_response(std::move(answer));
  co_return response;
}

Task<Result<proto::CloseSessionResponse>> PeerService::close_session(
    rpc::Peer peer, proto::CloseSessionRequest request, rpc::Events) {
  CO_TRY(const auto token, SessionToken::from_bytes(request.token()));
  const auto found = sessions_.find(token);
  if (found != sessions_.end() && found->second.connection == connection_of(peer)) {
    co_await end_session(token);
  }
  co_return proto::CloseSessionResponse();
}

// Revokes first, so that no new read starts, then drains what is under way: off the control thread.
Task<void> PeerService::end_session(SessionToken token) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);  // once begun it is done
  const auto found = sessions_.find(token);
  if (found == sessions_.end()) co_return;
  log::info("session.end", "puller", found->second.puller);
  sessions_.erase(found);
  registry_.revoke(token);
  ++ending_;
  auto drop = [this, token] {
    for (auto* server : servers_) server->drop_session(token);
    return true;
  };
  co_await async::offload(blocking_pool_, std::move(drop));
  --ending_;
}

Task<void> PeerService::drain(std::chrono::milliseconds deadline) {
  const auto give_up = std::chrono::steady_clock::now() + deadline;
  while (ending_ > 0 && std::chrono::steady_clock::now() < give_up) {
    co_await async::sleep_for(std::chrono::milliseconds(5));
  }
}

Task<void> PeerService::end_sessions_of(ModelVersion id, std::optional<Digest> layout) {
  std::vector<SessionToken> tokens;
  for (const auto& [token, session] : sessions_) {
    if (session.copy.id == id && (!layout || session.copy.layout == *layout))
      tokens.push_back(token);
  }
  for (const auto& token : tokens) co_await end_session(token);
}

void PeerService::on_disconnect(const rpc::Peer& peer) {
  std::vector<SessionToken> tokens;
  for (const auto& [token, session] : sessions_) {
    if (session.connection == connection_of(peer)) tokens.push_back(token);
  }
  for (const auto& token : tokens) {
    boost::asio::co_spawn(executor_, end_session(token), boost::asio::detached);
  }
}

}  // namespace rekindle::agent
