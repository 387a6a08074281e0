#include "recovery/agent/peer_sessions.h"

#include <algorithm>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"
#include "recovery/rpc/grants.h"
#include "recovery/rpc/peer_budgets.h"
#include "src/async/offload.h"
#include "src/base/clock.h"
#include "src/base/fair_places.h"
#include "src/base/log.h"

namespace rekindle::agent {

using async::Task;

namespace {

constexpr std::uint32_t kPathsOffered = 16;
constexpr int kMaxStreamHosts = 64;
// A puller waits for a session for 1.5 s.
constexpr std::chrono::milliseconds kOpenPatience{1000};
constexpr std::chrono::milliseconds kGrantCheckInterval{500};

Error no_such_session() { return {ErrorCode::kDenied, "no such session: open one first"}; }

// In the order of the layout.
void add_region(proto::OpenSessionResponse& response, transport::RegionKey key,
                std::uint64_t bytes) {
  auto* region = response.add_regions();
  region->set_segment(static_cast<std::uint32_t>(response.regions_size() - 1));
  region->set_region(key.region);
  region->set_generation(key.generation);
  region->set_size_bytes(bytes);
}

// A session belongs to its connection. Nobody would end one that opens after its connection has
// ended.
Task<Result<void>> still_asked() {
  const bool cancelled = co_await async::is_cancelled();
  if (cancelled) co_return fail(ErrorCode::kUnavailable, "cancelled");
  co_return Result<void>();
}

// None are checked of a puller of protocol 2, which names none, or behind a Unix socket.
std::vector<std::string> stream_hosts(const rpc::Peer& peer,
                                      const proto::OpenSessionRequest& request) {
  const auto address = rpc::HostPort::parse(peer.address);
  if (peer.public_key.empty() || !address) return {};
  const auto named = std::min(request.stream_hosts_size(), kMaxStreamHosts);
  std::vector<std::string> hosts(request.stream_hosts().begin(),
                                 request.stream_hosts().begin() + named);
  hosts.push_back(address->host);
  return hosts;
}

// 0 means no limit.
std::uint64_t lower_rate(std::uint64_t a, std::uint64_t b) {
  return a == 0 || b == 0 ? std::max(a, b) : std::min(a, b);
}

}  // namespace

PeerSessions::PeerSessions(boost::asio::any_io_executor executor, Parts parts, Options options)
    : parts_(std::move(parts)),
      rights_(parts_.identity, parts_.grant_clock),
      options_(std::move(options)),
      ended_(executor),
      ending_alone_(executor) {}

std::uint32_t PeerSessions::count(const ModelVersion& id) const {
  return static_cast<std::uint32_t>(std::ranges::count_if(
      sessions_, [&](const auto& session) { return session.second.copy.id == id; }));
}

Result<CopyKey> PeerSessions::copy_of(const SessionToken& token, const rpc::Peer& peer) const {
  const auto found = sessions_.find(token);
  if (found == sessions_.end() || found->second.connection != connection_of(peer)) {
    return fail(no_such_session());
  }
  return found->second.copy;
}

bool PeerSessions::begin_watch(const SessionToken& token) {
  const auto found = sessions_.find(token);
  return found != sessions_.end() && !std::exchange(found->second.watched, true);
}

void PeerSessions::end_watch(const SessionToken& token) {
  const auto found = sessions_.find(token);
  if (found != sessions_.end()) found->second.watched = false;
}

Task<Result<void>> PeerSessions::require_verified(CopyKey key, std::chrono::milliseconds patience) {
  const Served* served = parts_.served.find(key);
  if (served == nullptr || !served->complete() || !options_.require_verified) {
    co_return Result<void>();
  }
  co_return co_await options_.require_verified(served->stored, patience);
}

Result<std::optional<TimePoint>> PeerSessions::check_grant(
    const rpc::Peer& peer, const proto::OpenSessionRequest& request) const {
  const rpc::Identity& self = parts_.identity;
  TRY(const auto meant, Incarnation::from_bytes(request.source_incarnation()));
  if (meant != self.incarnation) {
    return fail(ErrorCode::kStale,
                "{} has restarted: this is another incarnation; look it up again", self.node_id);
  }
  const Digest root = rpc::from_proto(request.root());
  TRY(const TimePoint end, rights_.check(peer, request.grant(), root));
  // A release before protocol 3 renews no grant.
  if (peer.public_key.empty()) return std::nullopt;
  return end;
}

Result<const Served*> PeerSessions::admit(const rpc::Peer& peer,
                                          const proto::OpenSessionRequest& request) const {
  const rpc::Identity& self = parts_.identity;
  TRY_VOID(check_grant(peer, request));
  const Digest root = rpc::from_proto(request.root());
  TRY(const ModelVersion id, rpc::from_proto(request.id()));
  const Served* served = parts_.served.find({id, root, rpc::from_proto(request.layout())});
  if (served == nullptr) {
    return fail(ErrorCode::kStale, "{} no longer holds {} in this layout: look it up again",
                self.node_id, id.to_string());
  }
  if (parts_.served.draining().contains(id)) {
    return fail(ErrorCode::kStale, "{} is being retired on {}: pull another version",
                id.to_string(), self.node_id);
  }
  TRY_VOID(check_room(peer));
  return served;
}

Result<void> PeerSessions::check_room(const rpc::Peer& peer) const {
  const std::string key = rpc::budget_key(peer);
  PlacesTaken taken;
  for (const auto& [token, session] : sessions_) ++taken[session.budget_key];
  const std::size_t of_peer = taken.contains(key) ? taken.at(key) : 0;
  if (!key.empty() && of_peer >= limits_.max_of_one_peer()) {
    return fail(ErrorCode::kUnavailable,
                "{} has {} sessions with {}, as many as one puller's host may have: try another "
                "source, or again later",
                key, of_peer, parts_.identity.node_id);
  }
  if (places_left(limits_.max_pullers, taken, key) > 0) return {};
  return fail(ErrorCode::kUnavailable,
              "{} serves {} pullers already: try another source, or again later",
              parts_.identity.node_id, sessions_.size());
}

Task<Result<proto::OpenSessionResponse>> PeerSessions::open(rpc::Peer peer,
                                                            proto::OpenSessionRequest request) {
  if (!request.renews().empty()) co_return renew(peer, request);
  CO_TRY(const Served* wanted, admit(peer, request));
  CO_TRY_VOID(co_await require_verified(key_of(*wanted->manifest), kOpenPatience));
  CO_TRY_VOID(co_await still_asked());
  // Again: the copy may have gone meanwhile.
  CO_TRY(const Served* served, admit(peer, request));
  CO_TRY(const auto grant_end, check_grant(peer, request));

  transport::Session session;
  session.token = SessionToken::random();
  session.puller = peer.node_id;
  session.regions = served->regions;
  std::sort(session.regions.begin(), session.regions.end());
  session.max_bytes_per_second =
      lower_rate(request.grant().max_bytes_per_second(), limits_.max_bytes_per_second);
  session.sends_token = peer.public_key.empty();
  session.stream_hosts = stream_hosts(peer, request);

  const std::vector<std::string> transports(request.transports().begin(),
                                            request.transports().end());
  CO_TRY(auto response, offer(session, transports));
  for (std::size_t i = 0; i < served->regions.size(); ++i) {
    add_region(response, served->regions[i], served->segments[i]->bytes().size());
  }
  const CopyKey copy = key_of(*served->manifest);
  log::info("session.open", "puller", peer.node_id, "address", peer.address, "version",
            copy.id.to_string());
  sessions_[session.token] = {.connection = connection_of(peer),
                              .copy = copy,
                              .puller = peer.node_id,
                              .grant_end = grant_end,
                              .own_grant = is_own(request.grant()),
                              .budget_key = rpc::budget_key(peer)};
  parts_.registry.admit(std::move(session));
  if (grant_end && !std::exchange(watching_grants_, true)) {
    ending_alone_.spawn("session.grants", watch_grants());
  }
  co_return response;
}

Result<proto::OpenSessionResponse> PeerSessions::renew(const rpc::Peer& peer,
                                                       const proto::OpenSessionRequest& request) {
  TRY(const auto token, SessionToken::from_bytes(request.renews()));
  TRY(const CopyKey copy, copy_of(token, peer));
  TRY(const auto grant_end, check_grant(peer, request));
  if (copy.root != rpc::from_proto(request.root())) {
    return fail(ErrorCode::kDenied, "the session reads another version than the new grant");
  }
  Session& session = sessions_.at(token);
  // A grant that was overtaken on its way takes nothing back.
  if (grant_end && session.grant_end) session.grant_end = std::max(session.grant_end, grant_end);
  session.own_grant = is_own(request.grant());
  proto::OpenSessionResponse response;
  response.set_token(request.renews());
  return response;
}

bool PeerSessions::is_own(const proto::Grant& grant) const {
  return grant.issuer() == parts_.identity.incarnation.to_bytes();
}

// A coordinator that is away gives no grants: then running pulls go on, and pullers get time to
// renew when it is back.
std::vector<SessionToken> PeerSessions::without_grant() const {
  const TimePoint now = steady_now();
  const auto contact = parts_.grant_clock.in_contact_since(now);
  const bool coordinator_renews = contact && now >= *contact + rpc::grant_times().patience;
  std::vector<SessionToken> tokens;
  for (const auto& [token, session] : sessions_) {
    const bool over = session.grant_end && *session.grant_end <= now;
    if (over && (session.own_grant || coordinator_renews)) tokens.push_back(token);
  }
  return tokens;
}

Task<void> PeerSessions::watch_grants() {
  const auto has_grant = [](const auto& entry) { return entry.second.grant_end.has_value(); };
  while (std::ranges::any_of(sessions_, has_grant)) {
    for (const auto& token : without_grant()) {
      log::info("session.grant_over", "session", transport::handle_of(token).hex());
      co_await end(token);
    }
    co_await async::sleep_for(kGrantCheckInterval);
    // This object may be gone.
    if (co_await async::is_cancelled()) co_return;
  }
  watching_grants_ = false;
}

Result<proto::OpenSessionResponse> PeerSessions::open_readable(
    const rpc::Peer& peer, Readable readable, const std::vector<std::string>& transports) {
  TRY_VOID(check_room(peer));
  transport::Session session;
  session.token = SessionToken::random();
  session.puller = peer.node_id;
  session.regions = {readable.key};
  session.sends_token = peer.public_key.empty();
  session.max_bytes_per_second = limits_.max_bytes_per_second;
  TRY(auto response, offer(session, transports));
  add_region(response, readable.key, readable.bytes);
  log::info("session.open", "puller", peer.node_id, "address", peer.address, "reads", "no copy");
  sessions_[session.token] = {.connection = connection_of(peer),
                              .copy = {},
                              .puller = peer.node_id,
                              .memory = std::move(readable.memory),
                              .budget_key = rpc::budget_key(peer)};
  parts_.registry.admit(std::move(session));
  return response;
}

Result<proto::OpenSessionResponse> PeerSessions::offer(
    const transport::Session& session, const std::vector<std::string>& transports) const {
  proto::OpenSessionResponse response;
  response.set_token(session.token.to_bytes());
  response.set_max_bytes_per_second(session.max_bytes_per_second);
  for (const auto& wanted : transports) {
    for (const auto* server : parts_.servers) {
      if (server->transport() != wanted) continue;
      auto* offer = response.add_offers();
      offer->set_transport(wanted);
      const bool as_configured = wanted == "tcp" && !options_.tcp_endpoint.empty();
      offer->set_endpoint(as_configured ? options_.tcp_endpoint
                                        : server->endpoint(options_.advertised_host()));
      offer->set_max_paths(kPathsOffered);
    }
  }
  if (response.offers_size() == 0) {
    return fail(ErrorCode::kUnavailable, "{} serves none of the transports asked for",
                parts_.identity.node_id);
  }
  return response;
}

Task<Result<proto::ConnectPathsResponse>> PeerSessions::connect_paths(
    rpc::Peer peer, proto::ConnectPathsRequest request) {
  CO_TRY(const auto token, SessionToken::from_bytes(request.token()));
  CO_TRY_VOID(copy_of(token, peer));
  const auto server = std::ranges::find_if(parts_.servers, [&](const transport::Server* one) {
    return one->transport() == request.transport();
  });
  if (server == parts_.servers.end()) {
    co_return fail(ErrorCode::kUnavailable, "{} does not serve over {}", parts_.identity.node_id,
                   request.transport());
  }
  // Named, not a temporary: g++ 12 destroys captures of a temporary inside co_await twice.
  auto work = [server = *server, token, asked = std::move(*request.mutable_request())] {
    return server->accept(token, asked);
  };
  CO_TRY(auto answer, co_await async::offload(parts_.blocking_pool, std::move(work)));
  proto::ConnectPathsResponse response;
  response.set_response(std::move(answer));
  co_return response;
}

Task<Result<proto::CloseSessionResponse>> PeerSessions::close(rpc::Peer peer,
                                                              proto::CloseSessionRequest request) {
  CO_TRY(const auto token, SessionToken::from_bytes(request.token()));
  if (copy_of(token, peer)) co_await end(token);
  co_return proto::CloseSessionResponse();
}

// Revokes the session first, so that no new read starts. Then it waits for reads that are under
// way, off the control thread. Once begun it is carried through.
Task<void> PeerSessions::end(SessionToken token) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const auto found = sessions_.find(token);
  if (found == sessions_.end()) co_return;
  log::info("session.end", "puller", found->second.puller);
  const std::shared_ptr<const void> memory = std::move(found->second.memory);
  sessions_.erase(found);
  parts_.registry.revoke(token);
  const auto wait_for_reads = [this, token] {
    for (auto* server : parts_.servers) server->drop_session(token);
    return true;
  };
  ++ending_;
  co_await async::offload(parts_.blocking_pool, wait_for_reads);
  if (--ending_ == 0) ended_.notify();
}

Task<void> PeerSessions::drain(std::chrono::milliseconds deadline) {
  const TimePoint give_up = steady_now() + deadline;
  while (ending_ > 0 && steady_now() < give_up) co_await ended_.wait_until(give_up);
}

Task<void> PeerSessions::end_all_of(ModelVersion id, std::optional<Digest> layout) {
  std::vector<SessionToken> tokens;
  for (const auto& [token, session] : sessions_) {
    const bool reads_it = session.copy.id == id && (!layout || session.copy.layout == *layout);
    if (reads_it) tokens.push_back(token);
  }
  for (const auto& token : tokens) co_await end(token);
}

void PeerSessions::on_disconnect(const rpc::Peer& peer) {
  rights_.disconnected(peer);
  const std::string connection = connection_of(peer);
  std::vector<SessionToken> tokens;
  for (const auto& [token, session] : sessions_) {
    if (session.connection == connection) tokens.push_back(token);
  }
  for (const auto& token : tokens) ending_alone_.spawn("session.end", end(token));
}

}  // namespace rekindle::agent
