#include "recovery/pull/path_opener.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>

#include "recovery/pull/local_source.h"
#include "src/async/offload.h"
#include "src/async/task_group.h"
#include "src/base/log.h"

namespace rekindle::pull {

using transport::HandshakeConnector;

namespace {

constexpr std::chrono::milliseconds kSessionDeadline{1500};
constexpr std::chrono::milliseconds kConnectDeadline{2000};
constexpr std::chrono::milliseconds kHandshakeDeadline{3000};
constexpr std::uint32_t kPathsPerSource = 4;

struct MadePaths {
  transport::Paths paths;
  std::optional<Error> error;
};

// The first path decides: a failure of a later one is no failure. Blocks until `deadline` at most.
MadePaths make_paths(transport::Connector& connector, const transport::PathTarget& target,
                     std::uint32_t wanted, TimePoint deadline) {
  MadePaths made;
  while (made.paths.size() < wanted && !made.error) {
    auto path = connector.connect(target, deadline);
    if (path) {
      made.paths.push_back(std::move(*path));
    } else {
      made.error = std::move(path).error();
    }
  }
  return made;
}

// The peer's endpoint may have changed since the session was opened.
void renew_offer(ActiveSource& source, const SessionToken& token, const std::string& transport,
                 const std::string& endpoint) {
  if (!source.session || source.session->token != token || endpoint.empty()) return;
  for (auto& offer : source.session->offers) {
    if (offer.transport == transport) offer.endpoint = endpoint;
  }
}

}  // namespace

std::vector<std::string> transports_for(const TransportChoice& choice,
                                        std::span<HandshakeConnector* const> handshakes) {
  if (!choice.forced.empty()) return {choice.forced};
  std::vector<std::string> names;
  if (choice.same_host) names.emplace_back("shm");
  for (const auto* connector : handshakes) {
    std::string name(connector->transport());
    if (connector->usable() || choice.used.contains(name)) names.push_back(std::move(name));
  }
  names.emplace_back("tcp");
  std::erase_if(names, [&](const std::string& name) { return choice.avoid.contains(name); });
  return names;
}

PathOpener::PathOpener(const PullEnvironment& environment, Silence& silence, Options options)
    : environment_(environment), silence_(silence), options_(std::move(options)) {}

async::Task<Result<void>> PathOpener::renew(ActiveSource& source) {
  if (source.peer == nullptr) co_return Result<void>();
  if (source.session) {
    boost::asio::co_spawn(environment_.executor,
                          SourcePeer::close_session(source.peer, source.session->token),
                          boost::asio::detached);
    source.session.reset();
  }
  if (source.peer->connected()) co_return Result<void>();
  const auto deadline = silence_.at_most(kSessionDeadline, steady_now());
  CO_TRY(source.peer, co_await SourcePeer::connect(source.record, environment_.identity, deadline));
  co_return Result<void>();
}

async::Task<Result<void>> PathOpener::open_session(ActiveSource& source, trace::Context parent) {
  if (source.peer == nullptr) co_return Result<void>();
  const auto& host = environment_.self.host_id();
  TransportChoice choice{
      .forced = options_.forced_transport,
      .same_host = !host.empty() && host == source.record.node().host_id(),
      .used = source.used,
      .avoid = source.avoid,
  };
  SourcePeer::SessionRequest wanted{environment_.self,
                                    options_.id,
                                    options_.root,
                                    source.record.grant(),
                                    transports_for(choice, handshakes()),
                                    parent};
  const auto deadline = silence_.at_most(kSessionDeadline, steady_now());
  CO_TRY(source.session, co_await source.peer->open_session(std::move(wanted), deadline));
  source.cap_bytes_per_second = source.session->max_bytes_per_second;
  co_return Result<void>();
}

async::Task<void> PathOpener::keep_alive(const ActiveSource& source) const {
  const proto::Grant& grant = source.record.grant();
  const bool own_grant = grant.issuer() == grant.source_incarnation();
  const bool renews = source.session && !source.peer->before_protocol_3();
  if (!renews) return SourcePeer::keep_alive(source.peer);
  SourcePeer::SessionRequest wanted{environment_.self, options_.id, options_.root, grant, {}, {}};
  return own_grant
             ? SourcePeer::renew_grant(source.peer, std::move(wanted), source.session->token)
             : SourcePeer::renew_session(source.peer, std::move(wanted), source.session->token);
}

async::Task<Result<PathOpener::Opened>> PathOpener::open_paths(ActiveSource& source) {
  if (source.peer == nullptr) co_return open_local(source);
  const PeerSession session = *source.session;
  std::optional<Error> last_error;
  for (const auto& offer : session.offers) {
    auto paths = co_await open_offer(source, session.token, offer);
    if (paths) {
      if (handshake_connector(offer.transport) != nullptr) source.used.insert(offer.transport);
      source.transport = paths->front()->transport();
      co_return Opened{session.regions, std::move(*paths)};
    }
    last_error = std::move(paths).error();
    tell_failure(source, offer.transport, *last_error);
  }
  if (last_error) co_return fail(std::move(*last_error));
  const std::string& forced = options_.forced_transport;
  co_return fail(ErrorCode::kUnavailable, "source {} offers no transport that this side can use{}",
                 source.name, forced.empty() ? "" : " (--transport " + forced + ")");
}

PathOpener::Opened PathOpener::open_local(ActiveSource& source) {
  source.transport = "local";
  Opened opened;
  for (std::uint32_t i = 0; i < source.local_segments.size(); ++i) opened.regions.push_back({i, 0});
  opened.paths.push_back(
      std::make_unique<MemoryPath>(source.name, source.local_segments, source.keep_alive));
  return opened;
}

async::Task<Result<transport::Paths>> PathOpener::open_offer(ActiveSource& source,
                                                             SessionToken token,
                                                             PeerSession::Offer offer) {
  if (handshake_connector(offer.transport) != nullptr) {
    co_return co_await join_rails(source, token, std::move(offer), {});
  }
  transport::Connector* const found = connector(offer.transport);
  if (found == nullptr) {
    co_return fail(ErrorCode::kUnavailable, "{} is not compiled in here", offer.transport);
  }
  const transport::PathTarget target{offer.transport, offer.endpoint, token,
                                     source.peer->incarnation(), source.peer->before_protocol_3()};
  const std::uint32_t wanted = std::clamp(offer.max_paths, 1u, kPathsPerSource);
  const TimePoint now = steady_now();
  const TimePoint deadline = now + silence_.at_most(kConnectDeadline, now);
  // Named, not a temporary: g++ 12 destroys captures of a temporary inside co_await twice.
  auto work = [connector = found, &target, wanted, deadline] {
    return std::make_shared<MadePaths>(make_paths(*connector, target, wanted, deadline));
  };
  auto made = co_await async::offload(*environment_.blocking_pool, std::move(work));
  if (made->paths.empty()) co_return fail(std::move(*made->error));
  co_return guarded(source, std::move(made->paths));
}

std::span<HandshakeConnector* const> PathOpener::handshakes() const {
  if (options_.encrypted && !environment_.trusts_rails) return {};
  return environment_.handshakes;
}

transport::Connector* PathOpener::connector(const std::string& transport) const {
  if (options_.encrypted && transport == "tcp") return environment_.encrypting;
  for (auto* connector : environment_.connectors) {
    if (connector->transport() == transport) return connector;
  }
  return nullptr;
}

HandshakeConnector* PathOpener::handshake_connector(const std::string& transport) const {
  for (auto* connector : handshakes()) {
    if (connector->transport() == transport) return connector;
  }
  return nullptr;
}

std::optional<PeerSession::Offer> PathOpener::rail_offer(const ActiveSource& source) const {
  const bool connected = source.session && source.peer != nullptr && source.peer->connected();
  if (!connected || source.transport == "shm") return std::nullopt;
  for (const auto& offer : source.session->offers) {
    const bool usable = handshake_connector(offer.transport) != nullptr;
    if (usable && !source.avoid.contains(offer.transport)) return offer;
  }
  return std::nullopt;
}

// Making queue pairs takes system calls, and proving a link takes up to half a second: both run on
// the blocking pool. The exchange with the peer is an ordinary call, so a peer that does not answer
// holds up nobody else.
async::Task<Result<transport::Paths>> PathOpener::join_rails(ActiveSource& source,
                                                             SessionToken token,
                                                             PeerSession::Offer offer,
                                                             std::vector<std::string> in_use) {
  HandshakeConnector* const connector = handshake_connector(offer.transport);
  if (options_.use_memory) options_.use_memory(*connector);
  const auto& closed = options_.closed_homes;
  in_use.insert(in_use.end(), closed.begin(), closed.end());
  const std::shared_ptr<SourcePeer> peer = source.peer;
  const transport::PathTarget target{offer.transport, offer.endpoint, token, peer->incarnation(),
                                     peer->before_protocol_3()};
  using Begun = Result<std::shared_ptr<transport::Handshake>>;
  using Finished = Result<std::shared_ptr<transport::Paths>>;
  // Named, not temporaries: g++ 12 destroys captures of a temporary inside co_await twice.
  auto begin = [connector, &target, &in_use]() -> Begun {
    TRY(auto handshake, connector->begin(target, in_use));
    return std::shared_ptr<transport::Handshake>(std::move(handshake));
  };
  CO_TRY(const auto handshake,
         co_await async::offload(*environment_.blocking_pool, std::move(begin)));
  const auto deadline = silence_.at_most(kHandshakeDeadline, steady_now());
  CO_TRY(const std::string answer,
         co_await peer->connect_paths(token, offer.transport, handshake->request(), deadline));
  auto finish = [handshake, &answer]() -> Finished {
    TRY(auto paths, handshake->finish(answer));
    return std::make_shared<transport::Paths>(std::move(paths));
  };
  const auto paths = co_await async::offload(*environment_.blocking_pool, std::move(finish));
  renew_offer(source, token, offer.transport, handshake->endpoint());
  if (!paths) co_return fail(paths.error());
  co_return guarded(source, std::move(**paths));
}

transport::Paths PathOpener::guarded(const ActiveSource& source, transport::Paths paths) const {
  if (environment_.links == nullptr) return paths;
  // Only a pull has a version.
  const std::string reader = options_.id.model.empty() ? "" : options_.id.to_string();
  for (auto& path : paths) {
    path = environment_.links->guard(std::move(path), source.name, reader);
  }
  return paths;
}

bool PathOpener::has_another_transport(const ActiveSource& source) const {
  return options_.forced_transport.empty() && source.transport == "verbs";
}

void PathOpener::give_up_transport(ActiveSource& source, const Error& cause) {
  source.avoid.insert(source.transport);
  tell_failure(source, source.transport, cause);
}

// Shown once for each transport and pull: a broken fabric is broken for every source. A forced
// transport has no other to fall back to: the loss of its source says enough.
void PathOpener::tell_failure(const ActiveSource& source, const std::string& transport,
                              const Error& cause) {
  const bool falls_back = options_.forced_transport.empty() && transport != "tcp";
  const bool tell = falls_back && options_.first_failure_of && options_.first_failure_of(transport);
  if (!tell) {
    log::info("pull.transport_failed", "source", source.name, "transport", transport, "error",
              cause);
    return;
  }
  log::warn("pull.transport_failed", "source", source.name, "transport", transport, "error", cause);
  if (!options_.note) return;
  options_.note(fmt::format("{} to {} does not work, trying the next transport: {}", transport,
                            source.name, cause.message()));
}

async::Task<void> PathOpener::close_sessions(SourceTable& sources) {
  std::vector<async::Task<void>> closes;
  for (auto& source : sources) {
    if (source.peer == nullptr || !source.session || source.state.lost()) continue;
    auto close = SourcePeer::close_session(source.peer, source.session->token);
    // A slow source is not waited for.
    if (source.state.phase() == SourceState::Phase::kSlow) {
      boost::asio::co_spawn(environment_.executor, std::move(close), boost::asio::detached);
    } else {
      closes.push_back(std::move(close));
    }
    source.session.reset();
  }
  co_await async::run_all(std::move(closes));
}

}  // namespace rekindle::pull
